"""The demo's choices, as pure functions of facts: how narrow the link becomes, and when a process is killed.

A machine may be slow or busy. So no choice depends on time, only on what has crossed.
"""

import itertools
from collections.abc import Iterator
from typing import Literal, NamedTuple

from prfaas_sandbox.demo.records import KILLED, RequestRecord

MOST_NARROW_MBPS, USUAL_NARROW_MBPS, LEAST_NARROW_MBPS = 5, 2, 1
"""On the narrowest link the member's metrics hardly come through beside the caches, so it is the last choice."""
LOAD_TOKENS, MOST_LOAD_TOKENS = 6_000, 24_000
KILL_BYTES = 250_000
"""The prefill worker is killed once so much of a cache has arrived."""
LATEST_SHARE = 0.6
"""More of a cache than that has perhaps arrived whole before the kill."""


class DrillChoice(NamedTuple):
    """A prompt whose cache crosses while its prefill worker is killed, and the rate of the link meanwhile."""

    tokens: int
    mbps: int


KILL_CHOICES = (
    *(DrillChoice(tokens, USUAL_NARROW_MBPS) for tokens in (8_000, 16_000, 24_000)),
    *itertools.repeat(DrillChoice(24_000, LEAST_NARROW_MBPS), 3),
)
"""Each one crosses for longer than the one before. The next is taken if a transfer was too quick."""
STREAM_CHOICES = (300, 600, 1_200, 2_400)
"""Likewise the tokens of a stream whose decode instance is killed."""


def narrower(mbps: int) -> Iterator[int]:
    """Yield a rate and ever lower ones, for a machine whose prefills do not fill it."""
    while mbps > LEAST_NARROW_MBPS:
        yield mbps
        mbps = max(LEAST_NARROW_MBPS, mbps // 2)
    yield LEAST_NARROW_MBPS


def load_tokens(threshold_tokens: int) -> int:
    """Return the length of prompts that are still offloaded when the threshold has doubled."""
    return min(MOST_LOAD_TOKENS, max(LOAD_TOKENS, 3 * threshold_tokens))


def cache_bytes(records: list[RequestRecord], tokens: int) -> float:
    """Return how large a prompt's cache is by those that have crossed; infinite if none has.

    On a busy machine some have crossed only in part. So the largest counts.
    """
    served = [r for r in records if r.act != KILLED and r.outcome == "ok" and r.tokens]
    return tokens * max((r.kv_bytes / r.tokens for r in served), default=0.0) or float("inf")


def kill_moment(arrived_bytes: float, whole_bytes: float, *, is_answered: bool) -> Literal["wait", "now", "late"]:
    """Return whether the worker that sends a cache is killed now, later, or not while it sends this one."""
    if is_answered or arrived_bytes > LATEST_SHARE * whole_bytes:
        return "late"
    return "now" if arrived_bytes >= KILL_BYTES else "wait"
