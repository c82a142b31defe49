"""How the kernels' figures are taken: contenders in turns, so that whatever else the machine does meets all of them."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

# Large enough for the peak, small enough to be repeated often.
GEMM_SIZE = 2048


def in_turns(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return each contender's median seconds over rounds in which all run once, after one that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, work in contenders.items():
            started = time.perf_counter()
            work()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def gemm() -> Callable[[], object]:
    """Return a square matrix product, the yardstick of what the processor can do."""
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def gflops(flops: float, seconds: float) -> float:
    """Return 10^9 floating point operations a second."""
    return flops / seconds / 1e9


GEMM_FLOPS = 2.0 * GEMM_SIZE**3
