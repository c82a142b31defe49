"""Draws tokens from logits, so that a sequence's text depends only on its own logits, seed and position.

A draw's random number belongs to (seed, choice, position): not to a batch, instance or history. A request that
continues elsewhere from the same tokens draws the same text. Philox is a counter-based generator: the seed and the
choice are its key, the position its counter. A counter yields four numbers, of which a position takes the first.

`sample` makes one step's draws. An error in one row (no token that may be drawn, logits that are not numbers) is that
row's result. The batch continues.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import torch

from prfaas.errors import InternalError, PrfaasError, RequestError
from prfaas.wire.engine import Sampling, TokenLogprob
from prfaas_worker.engine.logit_edits import edit_logits
from prfaas_worker.engine.sequences import Sampler
from prfaas_worker.engine.steps import Drawn

# A row's weights add up to about this: below 2^53, so a float64 holds every sum exactly.
_ONE: Final = 2.0**52
# A float32 holds it. A temperature that rounds to 0 there would divide by it.
_COLDEST: Final = 1e-30
_NUMBERS_AT_ONCE: Final = 1 << 19  # bounds the memory of a draw


def sample(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[Drawn]:
    """Draw one token for each row of `logits`, fp32 [B, vocab_size], and advance its sampler. May change `logits`. Log
    probabilities are the model's, before any edit, temperature and truncation."""
    logprobs = {row: torch.log_softmax(logits[row], dim=-1) for row, one in enumerate(samplers) if one.logprobs >= 0}
    edited = [row for row, sampler in enumerate(samplers) if sampler.counts is not None or sampler.hold_back > 0]
    if edited:  # choices of one prompt may all look at one row
        logits = logits.contiguous()
    for row in edited:
        _edit(logits[row], samplers[row])
    tops, likeliest = logits.max(-1)
    errors = {row: _undrawable(top, samplers[row]) for row, top in enumerate(tops.tolist()) if not math.isfinite(top)}
    tokens = likeliest.tolist()
    random = [row for row, sampler in enumerate(samplers) if not sampler.greedy and row not in errors]
    at_once = max(1, _NUMBERS_AT_ONCE // logits.shape[1])
    for rows in (random[start : start + at_once] for start in range(0, len(random), at_once)):
        drawing = [samplers[row] for row in rows]
        numbers = [uniform(one.sampling.seed, one.choice, one.position) for one in drawing]
        for row, token in zip(rows, draw(logits[rows], [one.sampling for one in drawing], numbers), strict=True):
            tokens[row] = token
    drawn = []
    for row, sampler in enumerate(samplers):
        if row in errors:
            drawn.append(Drawn(-1, None, errors[row]))
            continue
        sampler.accept(tokens[row])
        logprob = _logprob(logprobs[row], tokens[row], sampler.logprobs) if row in logprobs else None
        drawn.append(Drawn(tokens[row], logprob))
    return drawn


def _edit(logits: torch.Tensor, sampler: Sampler) -> None:
    if sampler.counts is not None:
        edit_logits(logits, sampler.sampling, sampler.prompt, sampler.counts)
    if sampler.hold_back > 0:
        logits[list(sampler.ends)] = -torch.inf


def _undrawable(top: float, sampler: Sampler) -> PrfaasError:
    if top == -math.inf and (sampler.counts is not None or sampler.hold_back > 0):
        return RequestError("no token is left to draw: min_tokens and logit_bias together rule out every one")
    return InternalError(f"the model's largest logit is {top}: no token can be drawn")


def _logprob(logprobs: torch.Tensor, token: int, count: int) -> TokenLogprob:
    """Return the log probability of a token, and the `count` likeliest; of equal ones those with lower ids."""
    top: list[tuple[int, float]] = []
    if count > 0:
        values, ids = logprobs.sort(descending=True, stable=True)
        top = list(zip(ids[:count].tolist(), values[:count].tolist(), strict=True))
    return TokenLogprob(float(logprobs[token]), top)


def draw(logits: torch.Tensor, samplings: Sequence[Sampling], numbers: Sequence[float]) -> list[int]:
    """Draw a token from each row of `logits`, fp32 [R, vocab_size] with finite maxima, by a random number of [0, 1).

    Each filter applies to what the one before left (the order of vLLM): temperature, min_p, top_k, top_p. The token is
    found by inverting the distribution function over what is left, in the order of ids. A last bit that differs in the
    logits then moves a bound by as little. In the order of likelihood it could swap two tokens.

    No row may depend on which others share its batch, but sums of floats depend on their order, and that on shapes. So
    probabilities become whole numbers of 2^-52.
    """

    def column(values: Iterable[float]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.float64, device=logits.device)[:, None]

    temperatures = column(max(one.temperature, _COLDEST) for one in samplings)
    # The maximum first: then nothing overflows at a tiny temperature.
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperatures.float()
    weights = torch.softmax(scaled, dim=-1).mul_(_ONE).long()
    if any(one.min_p for one in samplings):
        weights[weights < weights.amax(-1, keepdim=True) * column(one.min_p for one in samplings)] = 0
    if any(one.top_k or one.top_p < 1 for one in samplings):
        top_k = column(one.top_k or math.inf for one in samplings)
        weights = _likeliest(weights, top_k, column(one.top_p for one in samplings))
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    # Rounding must not reach the total, above which there is no token.
    targets = torch.minimum((column(numbers) * total).long(), total - 1)
    return torch.searchsorted(cumulative, targets, right=True)[:, 0].tolist()


def _likeliest(weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Leave the weights of the likeliest tokens by top_k and top_p; of equal ones the lower id is the likelier."""
    values, ids = weights.sort(dim=-1, descending=True, stable=True)
    values.masked_fill_(torch.arange(values.shape[1], device=values.device) >= top_k, 0)
    cumulative = values.cumsum(-1)
    # top_p keeps every token before which less than top_p has gathered, and always the first.
    left_out = cumulative - values >= cumulative[:, -1:] * top_p
    left_out[:, 0] = False
    return weights.scatter(1, ids, values.masked_fill(left_out, 0))


def uniform(seed: int, choice: int, position: int) -> float:
    """Return the random number of a position, in [0, 1)."""
    key = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF, choice], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=position)).random())
