"""What is emulated: engines with deep models, and how the emulated worker is started that serves as each does."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks import profile_measure
from benchmarks.emulation.models import deepened
from benchmarks.report import children_of
from benchmarks.worker.process import running

from prfaas.measure.answers import CacheBytes
from prfaas.schedule import Budgets, role_budgets
from prfaas.wire.engine import Role

ROLE: Final[Role] = "mixed"
STEP_TOKENS: Final = 512
BATCH: Final = 8
CONTEXT: Final = 2048
WORKER_DEPTH: Final = 12
"""Times as many layers as the model that ships: a decode step takes 20 ms on a core."""
VLLM_DEPTH: Final = 5
VLLM_CACHE_BYTES: Final = VLLM_DEPTH * (64 << 20)


class Engine(NamedTuple):
    """A running server, and the process that has started all of its processes."""

    url: str
    process: int


class Kind(NamedTuple):
    """An engine to emulate, whose model has `depth` times its layers. `cache` has the sizes that decide where the
    emulated worker cuts prompts to keep a state, and `flags` go to it alone."""

    start: Callable[[Path], AbstractContextManager[Engine]]
    depth: int
    in_order: bool
    reach_percent: float
    cache: CacheBytes
    flags: tuple[str, ...] = ()

    @property
    def budgets(self) -> dict[Role, Budgets]:
        return role_budgets(STEP_TOKENS, in_order=self.in_order)


@contextmanager
def worker(*flags: str) -> Iterator[Engine]:
    """Start a worker, emulated or not, that serves as all of this benchmark do."""
    common = ("--role", ROLE, "--max-running", str(BATCH), "--step-tokens", str(STEP_TOKENS))
    with running("--max-context", str(CONTEXT), *common, *flags) as one:
        yield Engine(one.url, one.front_pid)


@contextmanager
def our_worker(folder: Path) -> Iterator[Engine]:
    with worker("--model-source", str(deepened("kimi-linear-tiny", WORKER_DEPTH, folder))) as engine:
        yield engine


@contextmanager
def vllm(folder: Path) -> Iterator[Engine]:
    """Start vLLM. It caches no prefixes: else it would cut prompts at its pages, whose size is that of a state."""
    model = deepened("qwen3-next-tiny", VLLM_DEPTH, folder)
    with profile_measure.vllm(
        str(model), "--no-enable-prefix-caching", "--kv-cache-memory-bytes", str(VLLM_CACHE_BYTES)
    ) as url:
        yield Engine(url, children_of(os.getpid())[-1])  # which has forked all of vLLM's


KINDS: Final = {
    "worker": Kind(our_worker, WORKER_DEPTH, False, 5.0, CacheBytes(62_976, 256, "the tiny model")),
    # A state larger than any prompt's rows is not kept, so the emulated worker cuts no prompts.
    "vllm": Kind(vllm, VLLM_DEPTH, True, 10.0, CacheBytes(1 << 20, 1, "nothing"), ("--cache-mib", "32")),
}
