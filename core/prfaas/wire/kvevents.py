"""An engine's events about its prefix cache: vLLM's KV cache events, and our map from bytes to blocks.

The layout is vLLM's (`vllm/distributed/kv_events.py`): an array (ts, events, data_parallel_rank), each event an array
that begins with its kind, in msgpack. Newer vLLM writes maps with the kind under `type`, and may add fields at the end.
The reader accepts both forms, skips unknown fields and kinds, and accepts hashes that are integers or bytes. Our hashes
are the 32 bytes of a SHA-256 chain.

A hybrid cache has two groups. ATTENTION_GROUP lists the blocks of tokens with attention rows here. STATE_GROUP lists
the blocks with a state checkpoint at their end. A hash means another thing in each group: readers key by group.

Routers without a tokenizer match bytes. A `ByteMapBatch` has its own topic. It names the block of tokens that
surely lies within a prefix of a request's canonical bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias, cast

import msgspec

from prfaas.errors import UNREADABLE, ProtocolError

EventHash: TypeAlias = bytes | int
AttentionSpecKind = Literal["mla_attention", "full_attention"]

ATTENTION_GROUP: Final = 0
STATE_GROUP: Final = 1
STATE_SPEC_KIND: Final = "mamba"
"""vLLM's word for every recurrent state."""

EVENTS_PATH: Final = "/v1/kv-events"
EVENTS_CONTENT_TYPE: Final = "application/x-prfaas-events"
MAX_EVENTS_FRAME_BYTES: Final = 8 << 20
"""Longest frame of a mover's stream: one step's events. Those of a prompt of a million tokens fit."""
MEDIUM_DEVICE: Final = "GPU"
MEDIUM_HOST: Final = "CPU"
MEDIUM_DISK: Final = "STORAGE"


# gc=False: events hold no cycles, and come in numbers that would lengthen each collection.
class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Blocks that can be matched from now on, in chain order after `parent_block_hash` (None: the beginning).

    A state checkpoint lists its last block only, because the state exists at that block's end and nowhere else.

    In place of token ids a mover tells a digest for each block (`kvindex.bytes.token_digests`), as bytes.
    """

    block_hashes: list[EventHash]
    parent_block_hash: EventHash | None
    token_ids: list[int] | bytes
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Blocks that cannot be matched any more in this medium and group."""

    block_hashes: list[EventHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Nothing can be matched any more, in any medium and group."""


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Events of one step, in order. `ts` is seconds since 1970."""

    ts: float
    events: list[KvEvent]
    data_parallel_rank: int | None = None


class ByteBlock(msgspec.Struct, frozen=True, gc=False):
    """A prefix of canonical bytes, by its chain hash, surely begins with these `tokens` tokens, by their chain hash.

    If the prefix is too short for a block of tokens, or its text not in the prompt, `tokens` is 0, the hash empty.
    """

    byte_hash: int
    block_hash: bytes
    tokens: int


class ByteMapBatch(msgspec.Struct, frozen=True, gc=False):
    """The byte blocks of one request in order."""

    ts: float
    blocks: list[ByteBlock]


def attention_stored(
    block_hashes: list[EventHash], parent: EventHash | None, block_tokens: int, kind: AttentionSpecKind
) -> BlockStored:
    """Return the event of attention blocks that became matchable, of so many tokens each. It names no token: whoever
    reads events reads no prompts."""
    return BlockStored(
        block_hashes=block_hashes,
        parent_block_hash=parent,
        token_ids=[],
        block_size=block_tokens,
        medium=MEDIUM_DEVICE,
        group_idx=ATTENTION_GROUP,
        kv_cache_spec_kind=kind,
    )


def state_stored(block_hash: EventHash, parent: EventHash | None, block_tokens: int) -> BlockStored:
    """Return the event of a checkpoint at the end of one block of so many tokens."""
    return BlockStored(
        block_hashes=[block_hash],
        parent_block_hash=parent,
        token_ids=[],
        block_size=block_tokens,
        medium=MEDIUM_DEVICE,
        group_idx=STATE_GROUP,
        kv_cache_spec_kind=STATE_SPEC_KIND,
    )


_ENCODER: Final = msgspec.msgpack.Encoder()


def encode_events(batch: EventBatch) -> bytes:
    """Return a batch in the form that vLLM's consumers read."""
    return _ENCODER.encode(batch)


def encode_event(event: KvEvent) -> bytes:
    """Return one event for `join_events`."""
    return _ENCODER.encode(event)


def join_events(ts: float, events: Sequence[bytes]) -> bytes:
    """Return a batch of encoded events, as `encode_events`."""
    return _ENCODER.encode((ts, list(map(msgspec.Raw, events)), 0))


def encode_byte_map(batch: ByteMapBatch) -> bytes:
    """Return a batch of the byte map: maps with the fields' names."""
    return _ENCODER.encode(batch)


class _AnyBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


_KINDS: Final[dict[str, type[KvEvent]]] = {
    kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)
}
_REQUIRED: Final[dict[type[KvEvent], tuple[str, ...]]] = {
    kind: tuple(field.name for field in msgspec.structs.fields(kind) if field.required) for kind in _KINDS.values()
}
_TAGGED: Final = Annotated[list[Any], msgspec.Meta(min_length=1)]
_BATCH: Final = msgspec.msgpack.Decoder(EventBatch)
_BYTE_MAP: Final = msgspec.msgpack.Decoder(ByteMapBatch)


def read_events(payload: bytes) -> Iterator[KvEvent]:
    """Read the events of a batch of this or another engine, positional or as maps; unknown ones are skipped.

    They are yielded one by one: foreign forms take longer to read, and other tasks may run in between. Raises
    ProtocolError where it is no msgpack, or, after the events before it, where a known event lacks a field or has a
    wrong type.
    """
    try:
        try:
            yield from _BATCH.decode(payload).events
        except msgspec.ValidationError:
            raw = msgspec.msgpack.decode(payload)
            if isinstance(raw, Mapping):
                named = cast(Mapping[str, Any], raw)
                raw = [named.get(field) for field in _AnyBatch.__struct_fields__]
            for event in map(_event, msgspec.convert(raw, _AnyBatch).events):
                if event is not None:
                    yield event
    except UNREADABLE as error:
        raise ProtocolError(f"a batch of KV cache events cannot be read: {error}") from error


def decode_byte_map(payload: bytes) -> ByteMapBatch:
    """Read a batch of the byte map; raises ProtocolError for what is none."""
    try:
        return _BYTE_MAP.decode(payload)
    except UNREADABLE as error:
        raise ProtocolError(f"a batch of the byte map cannot be read: {error}") from error


def _event(raw: Any) -> KvEvent | None:
    """Read one event; None if its kind is unknown."""
    if isinstance(raw, Mapping):
        named = dict(cast(Mapping[str, Any], raw))
        kind = _kind(named.get("type"))
    else:
        tag, *positional = msgspec.convert(raw, _TAGGED)
        kind = _kind(tag)
        named = {} if kind is None else dict(zip(kind.__struct_fields__, positional, strict=False))
    if kind is None:
        return None
    if isinstance(more := named.get("lora_name"), Mapping):  # SGLang's, in some versions: a map of the new fields
        named = {**named, **cast(Mapping[str, Any], more), "lora_name": None}
    if named.get("cache_salt"):  # SGLang's form of vLLM's extra keys
        named["extra_keys"] = [(named["cache_salt"],)]
    missing = [name for name in _REQUIRED[kind] if name not in named]
    if missing:
        raise msgspec.ValidationError(f"{kind.__name__} lacks {', '.join(missing)}")
    fields = [kind.__name__, *(named.get(name) for name in kind.__struct_fields__)]
    # msgpack has bytes of its own. Otherwise msgspec would take a text for their base64.
    return msgspec.convert(fields, kind, builtin_types=(bytes,))


def _kind(tag: Any) -> type[KvEvent] | None:
    return _KINDS.get(msgspec.convert(tag, str))
