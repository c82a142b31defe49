"""vLLM's own division of a prompt into steps, of any version, without vLLM.

`Scheduler._mamba_block_aligned_split` and the helpers for checkpoints within a step are cut out of vLLM's sources, and
called with stand-ins that have the few attributes which they read. The loop around them is `Scheduler.schedule`'s: a
step has at most what the request has left, and at most the budget that other requests leave.
"""

import ast
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Split = Callable[..., int]


@dataclass(frozen=True)
class Mode:
    """What an instance is started with, as far as it changes steps."""

    block: int
    budget: int = 8192
    drops_block: bool = False  # MTP and EAGLE do.
    lookahead: int = 0
    alignment: int | None = None  # Of the kernel's checkpoints within a step; None if it makes none.
    unit: int = 0  # --prefix-match-unit; 0: the block.
    threshold: int = 0  # --long-prefill-token-threshold.
    keeps_junctions: bool = False

    @property
    def hit_unit(self) -> int:
        return self.unit or self.block


@dataclass
class Prompt:
    """What the split reads of vLLM's Request."""

    num_tokens: int
    num_computed_tokens: int = 0
    shared_prefix_boundary: int = 0
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_tokens


def split_of(sources: Path) -> Split:
    """Return the split of the vLLM whose package lies in a folder."""
    scope: dict[str, Any] = {"cdiv": lambda a, b: -(-a // b)}
    for one in ast.parse((sources / "vllm/v1/kv_cache_interface.py").read_text()).body:
        if isinstance(one, ast.FunctionDef) and "prefill_checkpoint" in one.name:
            _define(one, scope)
    scheduler = ast.parse((sources / "vllm/v1/core/sched/scheduler.py").read_text()).body
    (of_class,) = (one.body for one in scheduler if isinstance(one, ast.ClassDef) and one.name == "Scheduler")
    name = "_mamba_block_aligned_split"
    _define(next(one for one in of_class if isinstance(one, ast.FunctionDef) and one.name == name), scope)
    return scope[name]


def _define(function: ast.FunctionDef, scope: dict[str, Any]) -> None:
    function.returns = None
    for argument in function.args.args:
        argument.annotation = None
    exec(compile(ast.Module([function], []), function.name, "exec"), scope)


def modes() -> Iterator[Mode]:
    """Yield what Hopper brings: checkpoints of FlashInfer and FlashKDA, drafts, finer hits, small and large budgets."""
    blocks, budgets = (256, 528, 768, 1600, 1856), (512, 8192)
    for block, budget, drops, alignment in product(blocks, budgets, (False, True), (None, 1, 16, 64)):
        for unit in (0, 64, 16):
            if block % (unit or 1) == 0 and (not alignment or unit % alignment == 0):
                yield Mode(block, budget, drops, alignment=alignment, unit=unit)
    for block, drops, alignment in product(blocks, (False, True), (None, 16)):
        yield Mode(block, drops_block=drops, alignment=alignment, threshold=1000)
        yield Mode(block, drops_block=drops, alignment=alignment, lookahead=2)
        yield Mode(block, drops_block=drops, alignment=alignment, unit=16, keeps_junctions=True)


def steps(split: Split, mode: Mode, prompt: Prompt, seed: str = "") -> list[int]:
    """Return the token counts between which vLLM computes a prompt, the first of which it has cached. Other requests
    leave it some of the budget in each step; without a seed all of it."""
    scheduler = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=mode.block),
        block_size=mode.block,
        hash_block_size=mode.hit_unit,
        mamba_partial_cache_hit=mode.hit_unit < mode.block,
        use_eagle_block_drop=mode.drops_block,
        num_hash_lookahead_tokens=mode.lookahead,
        mamba_has_prefill_checkpoint_blocks=mode.alignment is not None,
        mamba_prefill_checkpoint_alignment=mode.alignment,
        max_num_scheduled_tokens=mode.budget,
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=mode.threshold),
        mamba_shared_prefix_checkpoint=mode.keeps_junctions,
    )
    choose = random.Random(seed)
    found, most = [prompt.num_computed_tokens], min(mode.budget, mode.threshold or mode.budget)
    while found[-1] < prompt.num_tokens:
        left = prompt.num_tokens - found[-1]
        tokens = split(scheduler, prompt, min(left, choose.randint(1, most) if seed else most))
        tokens = tokens or split(scheduler, prompt, min(left, most))  # what is too little waits for more
        if tokens < 1:
            raise AssertionError(f"{prompt} gets no step: {mode}")
        prompt.num_computed_tokens += tokens
        found.append(prompt.num_computed_tokens)
    return found
