"""A small case whose runs the simulator makes, so that they are known to the last request."""

from functools import cache
from pathlib import Path
from random import Random

import msgspec

from prfaas.cli.plan import load
from prfaas.evaluate.case import Case
from prfaas.evaluate.expected import simulated_run
from prfaas.evaluate.record import MachineTiming, Run, RunKey
from prfaas.wire.trace import PARTS, UNKNOWN, Parts

PAPER = Path(__file__).parents[3] / "examples" / "paper.yaml"
CASE = Case(name="paper", file=load(PAPER), requests=400, stretch=4.0, cache_scale=128)
LIMIT_SECONDS = 11.5
SLOW = MachineTiming(mean_late=0.2, p99_late=0.5, busy_share=0.97)


@cache
def simulated(key: RunKey) -> Run:
    """Return the run as the simulator has it."""
    return simulated_run(CASE, key, Random)


@cache
def live(key: RunKey, seconds_more: float = 0.0) -> Run:
    """Return a run as a live one: like the simulated one, with parts, and with first tokens so much later."""
    run = simulated(key)
    answers = [
        msgspec.structs.replace(
            one,
            ttft_seconds=one.ttft_seconds + seconds_more,
            seconds=one.seconds + seconds_more,
            parts=_whole(one.parts, seconds_more),
        )
        for one in run.answers
    ]
    return msgspec.structs.replace(
        run,
        answers=tuple(answers),
        stretch=4.0,
        cache_scale=128,
        software="prfaas 0.1.0",
        began_at="2026-11-29T12:00:00",
    )


def _whole(parts: Parts, seconds_more: float) -> Parts:
    """Return all parts, where the simulator knows the prefill and its queue."""
    rest = (parts[UNKNOWN] + seconds_more) / 4
    return {"gateway_queue": 0.0} | {name: parts.get(name, rest) for name in PARTS[1:]}


def keys(policy: str, *loads: float, seeds: int = 1) -> list[RunKey]:
    return [RunKey(policy, one, seed) for one in loads for seed in range(1, seeds + 1)]


def invalid(run: Run) -> Run:
    """Return the run as of a machine that was too slow."""
    return msgspec.structs.replace(run, machine=SLOW)
