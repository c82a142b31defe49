"""Engines of others as a gateway hears them: real ZMQ sockets, and events written only from their documented format.

PUB     [topic, number as 8 bytes big-endian, payload]
ROUTER  takes [identity, "", number], answers [identity, "", number, payload] for each kept batch from there on, one
        message a batch, then the number -1 and an empty payload
"""

import itertools
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import zmq

PORT = 5557
_hosts = itertools.count(2)


def next_host() -> str:
    """Return an address of this machine that no other test listens at."""
    return f"127.{88 + time.time_ns() % 100}.{time.time_ns() // 1000 % 250}.{next(_hosts) % 250}"


def pack(value: Any) -> bytes:  # noqa: PLR0911 - a line a kind
    """Return msgpack, by its specification."""
    match value:
        case None:
            return b"\xc0"
        case bool():
            return b"\xc3" if value else b"\xc2"
        case int() if 0 <= value < 128:
            return bytes([value])
        case int() if value < 0:
            return b"\xd3" + struct.pack(">q", value)
        case int():
            return b"\xcf" + struct.pack(">Q", value)
        case float():
            return b"\xcb" + struct.pack(">d", value)
        case str():
            return b"\xdb" + struct.pack(">I", len(value.encode())) + value.encode()
        case bytes():
            return b"\xc6" + struct.pack(">I", len(value)) + value
        case list() | tuple():
            return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(pack, value))
        case dict():
            items = (pack(part) for pair in value.items() for part in pair)
            return b"\xdf" + struct.pack(">I", len(value)) + b"".join(items)
    raise TypeError(value)


class Engine(ABC):
    """What vLLM and SGLang have in common: a chain of blocks by names of their own making."""

    block_size = 16
    wraps_in_maps = False

    @abstractmethod
    def name(self, tokens: tuple[int, ...]) -> bytes | int:
        """The name of the block that ends these tokens."""

    @abstractmethod
    def stored(self, tokens: list[int], first: int = 0, **more: Any) -> Iterator[dict[str, Any]]:
        """The blocks from number `first` on of a prompt."""

    def removed(self, tokens: list[int], first: int = 0) -> dict[str, Any]:
        """The end of the blocks from number `first` on of a prompt."""
        return {"type": "BlockRemoved", "block_hashes": self.names(tokens)[first:], "medium": "GPU"}

    def names(self, tokens: list[int]) -> list[bytes | int]:
        """The names of a prompt's full blocks."""
        size = self.block_size
        return [self.name(tuple(tokens[:end])) for end in range(size, len(tokens) + 1, size)]

    def batch(self, *events: dict[str, Any]) -> bytes:
        """One step's events, positional as engines wrote them first, or as maps as they do now."""
        written = [event if self.wraps_in_maps else list(event.values()) for event in events]
        if self.wraps_in_maps:
            return pack({"ts": time.time(), "events": written, "data_parallel_rank": 0})
        return pack([time.time(), written, 0])


class Vllm(Engine):
    """One event for the new blocks of a step; names are 32 bytes; fields were added at the end, and more may be."""

    def name(self, tokens: tuple[int, ...]) -> bytes:
        return struct.pack(">q", hash(("vllm", tokens))) * 4

    def stored(self, tokens: list[int], first: int = 0, **more: Any) -> Iterator[dict[str, Any]]:
        names = self.names(tokens)
        event = {
            "type": "BlockStored",
            "block_hashes": names[first:],
            "parent_block_hash": names[first - 1] if first else None,
            "token_ids": tokens[first * self.block_size : len(names) * self.block_size],
            "block_size": self.block_size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": None,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
            "kv_cache_spec_sliding_window": None,
            "block_offsets": None,
        }
        yield event | more


class VllmMaps(Vllm):
    """The same as vLLM writes them now: fields that have a default are left out where they have that."""

    wraps_in_maps = True

    def stored(self, tokens: list[int], first: int = 0, **more: Any) -> Iterator[dict[str, Any]]:
        for event in super().stored(tokens, first, **more):
            yield {name: value for at, (name, value) in enumerate(event.items()) if at < 8 or value is not None}


class Sglang(Engine):
    """An event for every page; names are signed integers; six fields, of which the last is newer."""

    block_size = 8

    def name(self, tokens: tuple[int, ...]) -> int:
        return hash(("sglang", tokens))

    def stored(self, tokens: list[int], first: int = 0, **more: Any) -> Iterator[dict[str, Any]]:
        names, size = self.names(tokens), self.block_size
        for at in range(first, len(names)):
            event = {
                "type": "BlockStored",
                "block_hashes": [names[at]],
                "parent_block_hash": names[at - 1] if at else None,
                "token_ids": tokens[at * size : (at + 1) * size],
                "block_size": size,
                "lora_id": None,
                "medium": "GPU",
            }
            yield event | more


class SglangMaps(Sglang):
    """The same as SGLang writes them now."""

    wraps_in_maps = True


CLEARED = {"type": "AllBlocksCleared"}


class Publisher:
    """Both sockets of one engine.

    Args:
        host: where they listen.
        kept: batches that the log keeps.
        has_log: whether there is one.
        ports: of PUB and ROUTER.
        life: what newer vLLM adds to every number.

    """

    def __init__(
        self,
        host: str,
        kept: int = 10_000,
        *,
        has_log: bool = True,
        ports: tuple[int, int] = (PORT, PORT + 1),
        life: bytes = b"",
    ):
        self.host = host
        self.log: list[tuple[int, bytes]] = []
        self.questions: list[int] = []
        self.next_seq = 0
        self._kept = kept
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.bind(f"tcp://{host}:{ports[0]}")
        self._life = life
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True) if has_log else None
        if self._thread:
            self._router = self._context.socket(zmq.ROUTER)
            self._router.bind(f"tcp://{host}:{ports[1]}")
            self._thread.start()

    def publish(self, payload: bytes, *, is_lost: bool = False) -> None:
        """Publish a batch; a lost one stands only in the log."""
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        self.log = [*self.log, (seq, payload)][-self._kept :]
        if not is_lost:
            self.send([b"kv@pod@m", seq.to_bytes(8, "big") + self._life, payload])

    def send(self, frames: Iterable[bytes]) -> None:
        """Send any message."""
        self._pub.send_multipart(list(frames))

    def close(self) -> None:
        """Die."""
        self._closed.set()
        if self._thread:
            self._thread.join()
            self._router.close(linger=0)
        self._pub.close(linger=0)
        self._context.term()

    def _answer(self) -> None:
        while not self._closed.is_set():
            if not self._router.poll(20):
                continue
            frames = self._router.recv_multipart()
            assert len(frames) == 3, "engines take only questions of an empty frame and a number"
            assert frames[1] == b""
            start = int.from_bytes(frames[2], "big")
            self.questions.append(start)
            wanted = [(seq, payload) for seq, payload in self.log if seq >= start]
            for seq, payload in wanted:
                self._router.send_multipart([frames[0], b"", seq.to_bytes(8, "big") + self._life, payload])
            self._router.send_multipart([frames[0], b"", (-1).to_bytes(8, "big", signed=True), b""])
