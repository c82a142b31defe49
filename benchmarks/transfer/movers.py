"""The two ends of a transfer between vLLM instances: a mover each, and an engine that only copies.

A cache has the shape that vLLM gives a hybrid's: every layer has pages of one size, and a linear layer's state is as
large as a page. An engine's memory is its own, and the mover reaches it by copies alone, as the connector has it.
"""

import queue
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from benchmarks.report import cpu_seconds
from benchmarks.transfer.ends import FINGERPRINT, MEMORY_LIMIT_MIB, PORT, Plan

from prfaas.errors import PeerError
from prfaas.wire.transfer import LayerGroup, TensorLayout
from prfaas_transfer.mover.client import MoverClient
from prfaas_transfer.mover.messages import AnnounceCache, CopyPart, EndedFetch, FetchCache, MoverOptions

PAGE_TOKENS = 256
FRAME_BYTES = 4 << 20
"""What the connector puts into a frame of pages at most."""
TAKE_SECONDS = 120.0


class PagedShape(NamedTuple):
    """A hybrid's cache in vLLM: 12 attention layers of `pages` pages, and 36 linear layers with a state each."""

    page_bytes: int
    pages: int

    @property
    def tokens(self) -> int:
        return self.pages * PAGE_TOKENS

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        page = TensorLayout("part0", ("page", "byte"), (self.page_bytes,), "uint8")
        state = TensorLayout("part0", ("byte",), (self.page_bytes,), "uint8")
        layers = range(48)
        attention = LayerGroup("attention", tuple(layers[3::4]), (page,), PAGE_TOKENS, "bench")
        linear = LayerGroup("linear", tuple(at for at in layers if at % 4 != 3), (state,), PAGE_TOKENS, "bench")
        return attention, linear

    @property
    def parts(self) -> Iterator[CopyPart]:
        """All parts that cross, in frames as the connector makes them."""
        attention, linear = self.groups
        step = max(1, FRAME_BYTES // self.page_bytes)
        for first in range(0, self.pages, step):
            tokens = min(step, self.pages - first) * PAGE_TOKENS
            yield from (CopyPart(0, layer, first * PAGE_TOKENS, tokens) for layer in attention.layers)
        yield from (CopyPart(1, layer) for layer in linear.layers)


PAGED = {"vllm, pages of 256 KiB": PagedShape(256 << 10, 32), "vllm, pages of 2 MiB": PagedShape(2 << 20, 4)}


class PagedCache:
    """The memory of an engine with room for one cache: of each layer its bytes."""

    def __init__(self, shape: PagedShape):
        self.shape = shape
        pages = dict.fromkeys(shape.groups[0].layers, shape.pages) | dict.fromkeys(shape.groups[1].layers, 1)
        self.layers = {layer: np.ones(count * shape.page_bytes, np.uint8) for layer, count in sorted(pages.items())}

    def randomise(self) -> None:
        generator = np.random.default_rng(1)
        for layer, room in self.layers.items():
            self.layers[layer] = generator.integers(0, 256, len(room), np.uint8)

    def digest(self, copy: int) -> str:
        """Digest of the one cache."""
        made = xxhash.xxh3_64()
        for room in self.layers.values():
            made.update(memoryview(room))
        return made.hexdigest() if copy == 0 else ""

    def of(self, part: CopyPart) -> np.ndarray:
        first, pages = part.start_token // PAGE_TOKENS, max(1, part.tokens // PAGE_TOKENS)
        return self.layers[part.layer][first * self.shape.page_bytes : (first + pages) * self.shape.page_bytes]

    def load(self, _key: str, part: CopyPart, room: memoryview) -> None:
        np.copyto(np.frombuffer(room, np.uint8), self.of(part))

    def land(self, _key: str, part: CopyPart, received: memoryview) -> None:
        np.copyto(self.of(part), np.frombuffer(received, np.uint8))


class _Engine:
    """An engine with a mover at an address."""

    def __init__(self, host: str, plan: Plan, cluster: str):
        self.caches = PagedCache(PAGED[plan.shape])
        shape = self.caches.shape
        options = MoverOptions(
            host=host,
            data_port=PORT,
            fingerprint=FINGERPRINT,
            groups=shape.groups,
            slot_bytes=max(FRAME_BYTES, shape.page_bytes),
            cluster=cluster,
            tls_dir=str(Path(plan.tls) / cluster) if plan.tls else "",
            transfer_memory_mib=MEMORY_LIMIT_MIB or 256,
            wire_codec="none",
        )
        self.fetched: queue.SimpleQueue[EndedFetch] = queue.SimpleQueue()
        self.mover = MoverClient(options, self.caches, lambda _transfer: None, self.fetched.put)

    @property
    def mover_cpu(self) -> float:
        """CPU seconds of the mover's process."""
        process = self.mover._process
        return cpu_seconds(process.pid) if process else 0.0


class MoverSource(_Engine):
    """Gives one cache as often as it is asked to."""

    def __init__(self, host: str, plan: Plan):
        super().__init__(host, plan, "source")
        self.caches.randomise()
        self.prefill_ended = 0.0

    def offer(self, tokens: int, prefill_seconds: float) -> dict[str, Any]:
        """Compute a cache, which takes so long, and return what a destination must know of it."""
        made = AnnounceCache(secrets.token_hex(16), secrets.randbits(48), secrets.token_urlsafe(8), "bench", tokens)
        self.mover.announce(made)
        if prefill_seconds:
            threading.Thread(target=self._prefill, args=(made.transfer_id, prefill_seconds), daemon=True).start()
        else:
            self._prefill(made.transfer_id, 0.0)
        return {"transfer_id": made.transfer_id, "epoch": made.epoch, "token": made.token}

    def _prefill(self, transfer_id: str, seconds: float) -> None:
        parts = list(self.caches.shape.parts)
        due, step = time.monotonic(), seconds / len(parts)
        for part in parts:
            due += step
            time.sleep(max(0.0, due - time.monotonic()))
            self.mover.put(transfer_id, [part])
        self.prefill_ended = time.monotonic()
        self.mover.finish(transfer_id, seconds)


class MoverDestination(_Engine):
    """Takes caches into its own."""

    def __init__(self, host: str, plan: Plan):
        super().__init__("127.0.0.1", plan, "destination")
        self._source, self._cluster = host, "source" if plan.tls else ""

    def take(self, grant: dict[str, Any], copy: int) -> int:
        """Take one cache, and return its bytes.

        Raises:
            PeerError: it did not arrive whole.

        """
        tokens = self.caches.shape.tokens
        where = {"host": self._source, "port": PORT, "cluster": self._cluster, "start_token": 0, "end_token": tokens}
        self.mover.fetch(FetchCache(f"bench-{copy}", **grant, **where))
        ended = self.fetched.get(timeout=TAKE_SECONDS)
        if ended.fetched is None:
            raise PeerError(ended.reason)
        return ended.fetched.received_bytes
