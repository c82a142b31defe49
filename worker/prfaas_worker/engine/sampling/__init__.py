"""Drawing tokens from logits, so that a sequence's text depends on nothing but its own logits, seed and place.

The random number of a draw is keyed by (seed, choice, position): not by batch, instance or history. A request that
goes on elsewhere from the same tokens draws the same text. A `Sampler` is one answer's state, `sample` a step's draws.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from prfaas.wire.engine import Sampling, TokenLogprob
from prfaas_worker.engine.sampling.batch import Drawn, sample
from prfaas_worker.engine.sampling.chance import uniform
from prfaas_worker.engine.sampling.sampler import Outputs, Sampler

__all__ = ["Draw", "Drawn", "Outputs", "Sampler", "draw", "sample", "uniform"]


class Draw(NamedTuple):
    """One row's question: parameters, choice index, position of the token to draw, alternatives to report (-1 none)."""

    sampling: Sampling
    choice: int
    position: int
    logprobs: int


def draw(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    """Draw one token for each row of `logits`, fp32 [B, vocab_size]."""
    greedy = torch.argmax(logits, dim=-1).tolist()
    drawn = []
    for row, question in enumerate(draws):
        greedily = question.sampling.temperature == 0
        token = greedy[row] if greedily else _draw_token(logits[row], question)
        logprob = _logprob(logits[row], token, question.logprobs) if question.logprobs >= 0 else None
        drawn.append(Drawn(token, logprob))
    return drawn


def _draw_token(logits: torch.Tensor, question: Draw) -> int:
    """Draw by inverting the distribution function over the most likely tokens that top_k and top_p leave."""
    sampling = question.sampling
    # Divide before the softmax in float64: a tiny temperature overflows float32.
    scaled = (logits.double() - logits.max()) / sampling.temperature
    probabilities, tokens = torch.softmax(scaled, dim=-1).sort(descending=True, stable=True)
    cumulative = probabilities.cumsum(dim=-1)
    # top_p keeps every token before which less than top_p has gathered: the first always stays.
    kept = int(((cumulative - probabilities) < sampling.top_p).sum())
    if sampling.top_k:
        kept = min(kept, sampling.top_k)
    target = uniform(sampling.seed, question.choice, question.position) * cumulative[kept - 1]
    index = int(torch.searchsorted(cumulative[:kept], target, right=True))
    return int(tokens[min(index, kept - 1)])


def _logprob(logits: torch.Tensor, token: int, alternatives: int) -> TokenLogprob:
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    values, tokens = logprobs.topk(alternatives)
    return TokenLogprob(float(logprobs[token]), list(zip(tokens.tolist(), values.tolist(), strict=True)))
