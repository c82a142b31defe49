"""What one worker does by itself, and two of them together: prefill, decode, the cache's size and its reuse."""

import statistics
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.worker.process import Worker, new_prompt

from prfaas.wire import headers

PREFILL_TOKENS = (256, 1024, 4096, 16384)
PREFILL_REPEATS = 3
DECODE_BATCHES = (1, 4, 16)
DECODE_TOKENS = 200
CACHE_TOKENS = (1024, 4096, 16384)
PREFIX_TOKENS = 4096
SUFFIX_TOKENS = 64
PREFIX_REPEATS = 3


class Reuse(NamedTuple):
    """Seconds to the first token of a prompt, of one that continues from it, and of the third behind one prefix."""

    first: float
    continued: float
    branched: float


def prefill_rates(worker: Worker) -> Iterator[tuple[int, float]]:
    """Length and tokens a second, by the worker's own clock."""
    worker.complete(new_prompt(PREFILL_TOKENS[0]), 1)
    for tokens in PREFILL_TOKENS:
        found = [worker.complete(new_prompt(tokens), 1) for _ in range(PREFILL_REPEATS)]
        yield tokens, tokens / statistics.median(answer.figure(headers.PREFILL_SECONDS) for answer in found)


def decode_rates(worker: Worker) -> Iterator[tuple[int, float]]:
    """Batch and tokens a second of all its streams together, from requests to whole answers."""
    for batch in DECODE_BATCHES:
        seconds, tokens = worker.complete_together([new_prompt(16) for _ in range(batch)], DECODE_TOKENS)
        yield batch, tokens / seconds


def cache_sizes(worker: Worker, prefill: Worker) -> Iterator[tuple[int, int]]:
    """Length and bytes of the cache that crossed the data port."""
    for tokens in CACHE_TOKENS:
        answer = worker.complete(new_prompt(tokens), 1, prefill.host)
        yield tokens, int(answer.figure(headers.KV_BYTES))


def prefix_reuse(worker: Worker) -> Reuse:
    """Medians over prefixes, each new to the worker."""
    return Reuse(*(statistics.median(seconds) for seconds in zip(*_reuses(worker), strict=True)))


def _reuses(worker: Worker) -> Iterator[Reuse]:
    for _ in range(PREFIX_REPEATS):
        prompt = new_prompt(PREFIX_TOKENS)
        first = worker.complete(prompt, 1).seconds
        continued = worker.complete(prompt + new_prompt(SUFFIX_TOKENS), 1).seconds
        shared = new_prompt(PREFIX_TOKENS)
        *_, branched = [worker.complete(shared + new_prompt(SUFFIX_TOKENS), 1).seconds for _ in range(3)]
        yield Reuse(first, continued, branched)
