"""How far two answers to one prompt are apart, by the log probabilities of their tokens.

Equal answers differ by rounding, where the end of a prompt is computed in another batch or by another kernel. A lost or
stale state moves log probabilities by several nats, while the text still reads well. So answers are compared by their
scores, and two tokens that are nearly as likely may take each other's place.
"""

import math
from collections.abc import Iterable
from typing import Any, Final

NOISE_NATS: Final = 1.5
"""vLLM's own project holds its connectors to this (tests/v1/kv_connector/nixl_integration, Apache-2.0)."""
COMPARED_TOKENS: Final = 4
LEAST_NATS: Final = 0.1
"""Engines that answer alike to the last bit may still be so far apart: what is lost is worth more."""
_TIMES_NOISE: Final = 8.0
"""The most of a dozen answers: the next hundred may be a few times as far apart."""


def difference(found: dict[str, Any], wanted: dict[str, Any], compared_tokens: int = COMPARED_TOKENS) -> float:
    """Return by how many nats the scores of two choices differ, until their tokens do: then by how much less likely the
    one found was in the answer that is wanted."""
    names = "tokens", "token_logprobs"
    columns = [*(one[name] for one in (found, wanted) for name in names), wanted["top_logprobs"]]
    worst = 0.0 if len({len(column) for column in columns}) == 1 else math.inf
    for mine, value, theirs, best, tops in list(zip(*columns, strict=False))[:compared_tokens]:
        worst = max(worst, abs(value - best), best - tops.get(mine, -math.inf))
        if mine != theirs:
            break
    return worst


def limit_of(noise: Iterable[float]) -> float:
    """Return up to how many nats answers count as equal, by how far answers of single engines are apart. More than
    vLLM's own bound is never allowed."""
    return min(NOISE_NATS, max(LEAST_NATS, _TIMES_NOISE * max(noise, default=0.0)))
