"""Copies between a device and the memory that the mover shares, as the connector makes them; alone and beside products.

States are one large block a layer, pages many small rows in frames. The same bytes go through memory that is not
pinned. Then copies run on their thread and stream while this thread has matrix products computed.
"""

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple

import torch
from benchmarks.device.cases import Case
from benchmarks.device.memory import shared_memory, synchronize
from benchmarks.report import Figure

from prfaas.wire.transfer import LayerGroup, TensorLayout
from prfaas_transfer.mover.shared import Slots
from prfaas_vllm.blocks import VllmGroup, frame_tokens, rank_cache, read_blocks, write_blocks
from prfaas_vllm.ranks import RankOf

PAGE_TOKENS = 16


class Size(NamedTuple):
    """A request's cache: states of 1.5 MB or so, and pages of 18 KB, in layers; how long and how often is measured."""

    state_layers: int
    state_bytes: tuple[int, int]
    row_layers: int
    pages: int
    page_bytes: int
    rounds: int
    seconds: float
    side: int  # of the products


SIZES = {
    "cpu": Size(2, (5_000, 145_000), 2, 40, 1_152, 3, 0.2, 128),
    "cuda": Size(32, (50_000, 1_450_000), 12, 222, 18_432, 20, 4.0, 4096),
}
STEP_SECONDS = 0.02


class Copies:
    """A request's blocks on a device, and one slot of host memory for the copies of one thread."""

    def __init__(self, kind: str, size: Size, device: torch.device, *, is_pinned: bool):
        self.group = _states(size, device) if kind == "states" else _pages(size, device)
        self._rank = rank_cache([self.group], RankOf())
        first = next(iter(self.group.tensors.values()))[0]
        blocks = list(range(1, first.shape[0]))
        each = 1 if kind == "states" else frame_tokens(self.group.layout) // PAGE_TOKENS
        self._frames = [blocks[at : at + each] for at in range(0, len(blocks), each)]
        slot_bytes = -(-each * self.group.layout.nbytes // 4096) * 4096
        self._slots = Slots(shared_memory(slot_bytes, device if is_pinned else None), slot_bytes, 1)
        self.count_bytes = len(blocks) * len(self.group.tensors) * self.group.layout.nbytes
        synchronize(device)

    def make(self, copy: Callable[..., None]) -> None:
        """Copy all blocks, frame after frame, in one direction: `read_blocks` or `write_blocks`."""
        for tensors in self.group.tensors.values():
            for frame in self._frames:
                with self._slots.take(len(frame) * self.group.layout.nbytes) as (_, room), self._rank.copies.used():
                    copy(tensors, frame, room)


def _group(layers: int, kind: str, sizes: tuple[int, ...], blocks: int, device: torch.device) -> VllmGroup:
    axes = ("element",) if kind == "linear" else ("page", "element")
    parts = tuple(TensorLayout(f"part{at}", axes, (size,), "uint8") for at, size in enumerate(sizes))
    row_tokens = 1 if kind == "linear" else PAGE_TOKENS
    tensors = {
        layer: [torch.randint(0, 256, (blocks, size), dtype=torch.uint8, device=device) for size in sizes]
        for layer in range(layers)
    }
    layout = LayerGroup(kind, tuple(range(layers)), parts, row_tokens, "bench")
    return VllmGroup(0, PAGE_TOKENS, layout, tensors, (), str)


def _states(size: Size, device: torch.device) -> VllmGroup:
    return _group(size.state_layers, "linear", size.state_bytes, 2, device)


def _pages(size: Size, device: torch.device) -> VllmGroup:
    return _group(size.row_layers, "attention", (size.page_bytes,), size.pages + 1, device)


@cache
def products_on(device: str) -> Callable[[], None]:
    """Return matrix products that take about STEP_SECONDS, as a step's."""
    where = torch.device(device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    side = torch.randn(SIZES[device].side, SIZES[device].side, device=where, dtype=dtype)
    out, count = torch.empty_like(side), 1

    def step() -> None:
        for _ in range(count):
            torch.mm(side, side, out=out)
        synchronize(where)

    step()
    while timed(step) < STEP_SECONDS:
        count *= 2
    return step


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def alone(kind: str, copy: Callable[..., None], device: str) -> Iterator[Figure]:
    """Measure copies in one direction, pinned and not."""
    size, where = SIZES[device], torch.device(device)
    gbps = {}
    for is_pinned in (True, False):
        copies = Copies(kind, size, where, is_pinned=is_pinned)
        copies.make(copy)
        seconds = statistics.median(timed(lambda made=copies: made.make(copy)) for _ in range(size.rounds))
        gbps[is_pinned] = copies.count_bytes / seconds / 1e9
    yield Figure(
        name=f"{_what(kind, copies, copy)}, pinned",
        value=gbps[True],
        unit="GB/s",
        better="higher",
        rival="not pinned",
        rival_value=gbps[False],
    )


def beside(kind: str, copy: Callable[..., None], device: str) -> Iterator[Figure]:
    """Measure copies and products while both run, each beside itself alone in the same run."""
    size = SIZES[device]
    copies, step = Copies(kind, size, torch.device(device), is_pinned=True), products_on(device)
    what = _what(kind, copies, copy)
    copies.make(copy)
    alone_seconds = statistics.median(timed(lambda: copies.make(copy)) for _ in range(size.rounds))
    steps_alone = _steps(step, size.seconds)
    over, made = threading.Event(), list[float]()

    def go_on() -> None:
        while not over.is_set():
            made.append(timed(lambda: copies.make(copy)))

    thread = threading.Thread(target=go_on)
    thread.start()
    steps_beside = _steps(step, size.seconds)
    over.set()
    thread.join()
    yield Figure(
        name=f"{what}, beside matrix products",
        value=copies.count_bytes / statistics.median(made) / 1e9,
        unit="GB/s",
        better="higher",
        rival="alone",
        rival_value=copies.count_bytes / alone_seconds / 1e9,
    )
    yield Figure(
        name=f"matrix products beside {what}",
        value=1e3 * statistics.median(steps_beside),
        unit="ms",
        rival="alone",
        rival_value=1e3 * statistics.median(steps_alone),
    )


def _steps(step: Callable[[], None], seconds: float) -> list[float]:
    end, taken = time.perf_counter() + seconds, list[float]()
    while time.perf_counter() < end:
        taken.append(timed(step))
    return taken


def _what(kind: str, copies: Copies, copy: Callable[..., None]) -> str:
    layers, each = len(copies.group.tensors), copies.group.layout.nbytes
    shape = f"{copies.count_bytes / 1e6:.3g} MB of {layers} {kind}"
    if kind == "pages":
        shape = f"{copies.count_bytes / 1e6:.3g} MB of pages of {each / 1e3:.3g} KB in {layers} layers"
    return f"{shape} {'into' if copy is read_blocks else 'out of'} shared memory"


def cases(device: str) -> list[Case]:
    """Return both shapes in both directions, alone, and beside products."""
    directions = {"out": read_blocks, "in": write_blocks}
    return [
        Case(f"{kind} {name}, {measure.__name__}", partial(measure, kind, copy, device))
        for measure in (alone, beside)
        for kind in ("states", "pages")
        for name, copy in directions.items()
    ]
