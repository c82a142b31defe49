"""How much of a conversation trace the prefix cache saves: the worker's own bookkeeping, at the 48B model's sizes.

    prfaas bench prefix_cache

Prompts of the trace go one after the other through `prfaas_worker.cache.blocks`, which knows no torch: match, pages,
checkpoints, publish, close. The figure is the tokens found cached with a state, over those that attention alone would
find in an unlimited cache. Rivals are the same cache with a checkpoint every so many tokens, at prompt ends alone, and
without letting outlived checkpoints go first (plain LRU).

The trace names prompts in pieces of 512 tokens, so a prompt's end counts at the last whole piece: what a later prompt
shares within a piece cannot be told. Answers are not in the trace. PRFAAS_TRACE names its file, which is expected at
../shared/traces/mooncake_conversation.jsonl otherwise.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from benchmarks.report import Figure, run

from prfaas_worker.cache.blocks import Blocks, Lease, checkpoint_blocks

PAGE_TOKENS = 64
PAGE_BYTES = PAGE_TOKENS * 8_064
STATE_BYTES = 43_417_600
PAGES_PER_STATE = -(-STATE_BYTES // PAGE_BYTES)
PIECE_TOKENS = 512
PIECE_BLOCKS = PIECE_TOKENS // PAGE_TOKENS
BUDGETS = {"128 GB": 128 * 10**9, "512 GB": 512 * 10**9, "2 TB": 2 * 10**12}
REACH = 0.9  # of the unlimited match, at 512 GB
TRACE = "../shared/traces/mooncake_conversation.jsonl"

Places = Callable[[int, int, int], tuple[int, ...]]
"""From attention blocks, state blocks and the last block a repetition could start from to where states are kept."""


class Line(msgspec.Struct):
    input_length: int
    hash_ids: list[int]


class Prompt(NamedTuple):
    """A prompt's tokens, its chain, and the last block that a repetition could start from."""

    tokens: int
    chain: list[int]
    last_block: int


class PlainLru(Blocks):
    """The same cache without its one rule beside least recently used."""

    def _retire(self, lease: Lease) -> None:
        pass


class Result(NamedTuple):
    hit_tokens: int
    prompts: int
    seconds: float


def trace_file() -> Path:
    path = Path(os.environ.get("PRFAAS_TRACE", Path(__file__).resolve().parents[1] / TRACE))
    if not path.is_file():
        sys.exit(f"there is no trace at {path}: put mooncake_conversation.jsonl there, or name it in PRFAAS_TRACE")
    return path


def read_lines(trace: Path) -> list[Line]:
    return msgspec.json.Decoder(Line).decode_lines(trace.read_bytes())


def read_trace() -> list[Prompt]:
    return [_prompt(line) for line in read_lines(trace_file())]


def _prompt(line: Line) -> Prompt:
    blocks = line.input_length // PAGE_TOKENS
    chain = [piece * PIECE_BLOCKS + block for piece in line.hash_ids for block in range(PIECE_BLOCKS)][:blocks]
    return Prompt(line.input_length, chain, (line.input_length - 1) // PIECE_TOKENS * PIECE_BLOCKS)


def unlimited_match(prompts: list[Prompt]) -> int:
    """Tokens that attention alone would find in a cache without bounds."""
    seen: set[int] = set()
    found = 0
    for prompt in prompts:
        most = prompt.chain[: prompt.last_block]
        found += next((i for i, key in enumerate(most) if key not in seen), len(most))
        seen.update(prompt.chain)
    return found * PAGE_TOKENS


def ours(attention: int, state: int, last: int) -> tuple[int, ...]:
    return checkpoint_blocks(attention, state, last, PAGE_TOKENS, PAGES_PER_STATE)


def at_end(_: int, state: int, last: int) -> tuple[int, ...]:
    return ours(state, state, last)


def every(tokens: int) -> Places:
    step = tokens // PAGE_TOKENS
    return lambda _, state, last: tuple(range((state // step + 1) * step, last + 1, step))


def at_least(tokens: int) -> Places:
    """Ours with a higher bar: what a state must save."""
    return lambda attention, state, last: checkpoint_blocks(attention, state, last, PAGE_TOKENS, tokens)


def simulate(prompts: list[Prompt], budget_bytes: int, places: Places, kind: type[Blocks] = Blocks) -> Result:
    blocks = kind(budget_bytes // PAGE_BYTES, PAGES_PER_STATE)
    hits = 0
    started = time.perf_counter()
    for prompt in prompts:
        match = blocks.match(prompt.chain, prompt.last_block)
        hits += match.state_blocks * PAGE_TOKENS
        start = prompt.chain[match.state_blocks - 1] if match.state_blocks else None
        lease = blocks.open(match.pages[: match.state_blocks], -(-prompt.tokens // PAGE_TOKENS), start)
        if lease is None:
            sys.exit(f"a prompt of {prompt.tokens} tokens does not fit into {budget_bytes} bytes")
        if len(match.pages) > match.state_blocks:
            lease.branch_blocks = len(match.pages)
        for place in places(len(match.pages), match.state_blocks, prompt.last_block):
            blocks.publish(lease, prompt.chain, place)
            blocks.checkpoint(lease, prompt.chain, place)
        blocks.publish(lease, prompt.chain, len(prompt.chain))
        blocks.close(lease)
    took = time.perf_counter() - started
    blocks.check_integrity()
    return Result(hits, len(prompts), took)


def figures() -> Iterator[Figure]:
    prompts = read_trace()
    most = unlimited_match(prompts)
    for name, budget in BUDGETS.items():
        own = simulate(prompts, budget, ours)
        rivals = {
            "plain LRU": simulate(prompts, budget, ours, PlainLru),
            "prompt ends only": simulate(prompts, budget, at_end),
            "a state must save 1,024 tokens": simulate(prompts, budget, at_least(1024)),
            "every 4K": simulate(prompts, budget, every(4096)),
            "every 1K": simulate(prompts, budget, every(1024)),
        }
        for rival, result in rivals.items():
            yield Figure(
                name=f"{name}, against {rival}",
                value=own.hit_tokens / most,
                unit="of the match",
                better="higher",
                reach=REACH if name == "512 GB" else None,
                rival="the policy named",
                rival_value=result.hit_tokens / most,
            )
        yield Figure(name=f"{name}, bookkeeping", value=own.seconds / own.prompts * 1e6, unit="us a prompt")


if __name__ == "__main__":
    run("prefix_cache", __doc__, figures)
