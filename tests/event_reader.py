"""Reads a mover's stream of cache events as routers do: by HTTP, msgpack and vLLM's format alone."""

import http.client
import itertools
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from prfaas.wire.kvevents import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

from .waiting import PATIENCE_SECONDS


class EventReader:
    """One connection to a data port."""

    def __init__(self, host: str, port: int, query: str = ""):
        self._connection = http.client.HTTPConnection(host, port, timeout=PATIENCE_SECONDS)
        self._connection.request("GET", f"/v1/kv-events{query}")
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200

    def __iter__(self) -> Iterator[tuple[str, int, Any]]:
        while length := self._answer.read(4):
            topic, seq, payload = msgspec.msgpack.decode(self._answer.read(struct.unpack("!I", length)[0]))
            yield topic, seq, payload if topic == "kv" else msgspec.msgpack.decode(payload)

    def take(self, count: int) -> list[tuple[str, int, Any]]:
        return list(itertools.islice(self, count))

    def close(self) -> None:
        self._answer.close()
        self._connection.close()


def cached_after(events: Iterable[KvEvent]) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """Return every block that is cached then, with all its fields, by group, medium and hash."""
    found: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for event in events:
        match event:
            case AllBlocksCleared():
                found.clear()
            case BlockRemoved():
                for one in event.block_hashes:
                    found.pop((event.group_idx, event.medium, one), None)
            case BlockStored():
                parent, size = event.parent_block_hash, event.block_size
                rest = (size, event.lora_name, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
                for at, one in enumerate(event.block_hashes):
                    extra = event.extra_keys[at] if event.extra_keys else None
                    unit = 8 if isinstance(event.token_ids, bytes) else size  # of digests
                    tokens = event.token_ids[at * unit : (at + 1) * unit]
                    found[event.group_idx, event.medium, one] = (parent, tokens, extra, *rest)
                    parent = one
    return found
