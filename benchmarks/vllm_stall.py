"""What the end of a prefill costs vLLM's step: how long the connector holds it up, and a step while the states leave.

    prfaas bench vllm_stall [--device cuda] [-o json]

The worker's side of the connector is the real one, with its mover, and no vLLM: blocks of a hybrid's shape, 180 MB of
states a request, and matrix products for a model. Another process takes the caches, with a mover of its own. On a GPU
the copies run on a stream of theirs, into memory that is pinned; on a CPU on another thread.
"""

import multiprocessing
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
from benchmarks.device.cases import Case
from benchmarks.device.copies import products_on, timed
from benchmarks.report import Figure, run, say

from prfaas.wire.transfer import LayerGroup, TensorLayout
from prfaas_transfer.mover.client import MoverClient
from prfaas_transfer.mover.messages import CopyPart, FetchCache, MoverOptions
from prfaas_vllm.blocks import VllmGroup, read_blocks
from prfaas_vllm.scheduling import LegParams, SourceStart, SourceStep, StepPlan
from prfaas_vllm.transfers import RankTransfers

ROUNDS = 12
PAGE_TOKENS, PAGES = 256, 8
GOAL = PAGE_TOKENS * PAGES
STATE_LAYERS, STATE_BYTES, CONV_BYTES = 36, 4_900_000, 100_000
ROW_LAYERS, PAGE_BYTES = 12, 512 << 10
STATE_MB = STATE_LAYERS * (STATE_BYTES + CONV_BYTES) / 1e6
STALL_REACH_MS, BESIDE_REACH = 10.0, 1.1
BLOCKS = ([1], list(range(1, PAGES + 1)))


def groups_on(device: torch.device) -> tuple[VllmGroup, ...]:
    """Return a rank's cache: states in one block a request, and rows in pages."""

    def group(number: int, layout: LayerGroup, blocks: int, sizes: tuple[int, ...]) -> VllmGroup:
        made = lambda size: torch.randint(0, 256, (blocks, size), dtype=torch.uint8, device=device)  # noqa: E731
        tensors = {layer: [made(size) for size in sizes] for layer in layout.layers}
        return VllmGroup(number, PAGE_TOKENS, layout, tensors, (), str)

    layers = range(STATE_LAYERS + ROW_LAYERS)
    parts = CONV_BYTES, STATE_BYTES
    states = tuple(TensorLayout(f"part{at}", ("element",), (size,), "uint8") for at, size in enumerate(parts))
    page = (TensorLayout("part0", ("page", "element"), (PAGE_BYTES,), "uint8"),)
    linear = LayerGroup("linear", tuple(layers[:STATE_LAYERS]), states, 1, "bench")
    attention = LayerGroup("attention", tuple(layers[STATE_LAYERS:]), page, PAGE_TOKENS, "bench")
    return group(0, linear, 2, parts), group(1, attention, PAGES + 1, (PAGE_BYTES,))


def options_of(groups: tuple[VllmGroup, ...]) -> MoverOptions:
    layouts = tuple(group.layout for group in groups)
    largest = max(4 << 20, *(layout.nbytes for layout in layouts))
    slot_bytes = -(-largest // 4096) * 4096
    return MoverOptions(
        host="127.0.0.1", data_port=0, fingerprint="bench", groups=layouts, slot_bytes=slot_bytes, wire_codec="none"
    )


class Nothing:
    """The memory of an engine that forgets what comes."""

    def load(self, _key: str, _part: CopyPart, _room: memoryview) -> None:
        raise AssertionError("a destination gives nothing")

    def land(self, _key: str, _part: CopyPart, _received: memoryview) -> None:
        """Forget it."""


def take(end: Connection, options: bytes) -> None:
    """Be the other process: fetch each cache that is named, and say how it ended."""
    decoded = msgspec.json.decode(options, type=MoverOptions)
    mover = MoverClient(decoded, Nothing(), lambda _key: None, lambda ended: end.send(ended.reason))
    end.send("ready")
    while (message := end.recv()) is not None:
        mover.fetch(FetchCache(*message))
    mover.close()


class Source:
    """One rank's transfers, and the process that takes its caches."""

    def __init__(self, device: torch.device):
        self.groups = groups_on(device)
        self._over: set[str] = set()
        options = options_of(self.groups)
        self.transfers = RankTransfers(self.groups, options, list)
        self._end, theirs = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        self._taker = spawn.Process(target=take, args=(theirs, msgspec.json.encode(options)), daemon=True)
        self._taker.start()
        assert self._end.recv() == "ready"

    def step(self, plan: StepPlan, model: Callable[[], object]) -> float:
        """Make a step as vLLM's worker does; return the seconds that the connector took of it."""
        began = time.perf_counter()
        self.transfers.revoke(plan)
        self.transfers.begin(plan)
        before = time.perf_counter()
        model()
        ended = time.perf_counter()
        self.transfers.fetch(plan)
        self.transfers.end_step(plan)
        self.transfers.results(self._over)
        return before - began + time.perf_counter() - ended

    def prefill(self, model: Callable[[], object]) -> float:
        """Have a request prefilled whose destination waits for it; return how long its last step is held up."""
        leg: dict[str, Any] = {
            "transfer_id": secrets.token_hex(16),
            "epoch": secrets.randbits(48),
            "token": secrets.token_hex(8),
        }
        request_id = f"r-{leg['transfer_id']}"
        self._over.add(request_id)
        start = SourceStart(request_id, LegParams(role="source", **leg), GOAL)
        self.step(StepPlan(starts=[start]), model)
        port = self.transfers.mover.data_port
        self._end.send((request_id, leg["transfer_id"], leg["epoch"], leg["token"], "127.0.0.1", port, "", 0, GOAL))
        self.step(StepPlan(steps=[SourceStep(request_id, 0, GOAL - PAGE_TOKENS, BLOCKS)]), model)
        return self.step(StepPlan(steps=[SourceStep(request_id, GOAL - PAGE_TOKENS, GOAL, BLOCKS)]), model)

    @property
    def has_come(self) -> bool:
        return self._end.poll()

    def require_whole(self) -> None:
        if reason := self._end.recv():
            raise AssertionError(f"the cache did not come: {reason}")

    def close(self) -> None:
        self._end.send(None)
        self._taker.join(10)
        self.transfers.mover.close()


def copy_states(source: Source) -> None:
    """Copy all states of a request into plain memory, as a step would that kept them so."""
    group = source.groups[0]
    for tensors in group.tensors.values():
        read_blocks(tensors, BLOCKS[0], memoryview(bytearray(group.layout.nbytes)))


def figures(device: str = "cpu") -> Iterator[Figure]:
    """Measure both."""
    torch.set_num_threads(1)
    where = torch.device(device)
    model, source = products_on(device), Source(where)
    stalls, copied, alone, beside = list[float](), list[float](), list[float](), list[float]()
    for number in range(ROUNDS + 1):
        alone.append(timed(model))
        copied.append(timed(lambda: copy_states(source)))
        stalls.append(source.prefill(model))
        while not source.has_come:
            beside.append(timed(model))
        source.require_whole()
        if not number:  # warms up
            stalls, copied, alone, beside = [], [], [], []
    source.close()
    say(f"stalls: {', '.join(f'{1e3 * one:.2f}' for one in stalls)} ms; {len(beside)} steps beside")
    yield Figure(
        name=f"the last step of a prefill is held up, {STATE_MB:.0f} MB of states on {device}",
        value=1e3 * statistics.median(stalls),
        unit="ms",
        reach=STALL_REACH_MS,
        rival="states copied in the step",
        rival_value=1e3 * statistics.median(copied),
    )
    yield Figure(name="the same, the longest", value=1e3 * max(stalls), unit="ms", reach=STALL_REACH_MS)
    yield Figure(
        name=f"a step on {device} while they leave",
        value=1e3 * statistics.median(beside or [float("nan")]),
        unit="ms",
        reach=BESIDE_REACH * 1e3 * statistics.median(alone),
        rival="a step alone",
        rival_value=1e3 * statistics.median(alone),
    )


def cases(device: str) -> list[Case]:
    """Return the whole benchmark as a case of `prfaas bench device`; CPUs run it by itself."""
    return [] if device == "cpu" else [Case("stall", partial(figures, device), is_must=False)]


if __name__ == "__main__":
    run("vllm_stall", __doc__, figures)
