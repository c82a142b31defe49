"""Edits logits before a draw: biases and penalties.

As OpenAI defines them and in vLLM's order. First the bias is added. Then the repetition penalty divides positive and
multiplies negative logits of tokens in prompt or answer. Then the frequency penalty is subtracted as often as the
answer has the token, and the presence penalty once.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import torch

from prfaas.wire.engine import Sampling

_LARGEST: Final = torch.finfo(torch.float32).max
"""A tiny penalty would make a logit infinite, of which no token can be drawn."""


class LogitEdits:
    """The changes to the logits of one choice."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int]):
        self._sampling = sampling
        self._prompt = frozenset(prompt if sampling.repetition_penalty != 1 else ())
        self._counts: Counter[int] = Counter()

    def count(self, token: int) -> None:
        """Advance over a token of the answer."""
        self._counts[token] += 1

    def apply(self, logits: torch.Tensor) -> None:
        """Add biases and penalties in place to fp32 [vocab_size]."""
        sampling, device = self._sampling, logits.device
        if sampling.logit_bias:
            tokens, biases = zip(*sampling.logit_bias, strict=True)
            biases = torch.tensor(biases, dtype=torch.float32, device=device)
            logits.index_add_(0, torch.tensor(tokens, device=device), biases)
        if sampling.repetition_penalty != 1 and (seen := self._prompt | self._counts.keys()):
            tokens = torch.tensor(list(seen), device=device)
            values = logits[tokens]
            penalty = sampling.repetition_penalty
            edited = torch.where(values > 0, values / penalty, values * penalty)
            logits[tokens] = edited.clamp_(-_LARGEST, _LARGEST)
        if self._counts and (sampling.frequency_penalty or sampling.presence_penalty):
            counts = torch.tensor(list(self._counts.values()), device=device)
            penalties = sampling.frequency_penalty * counts + sampling.presence_penalty
            logits[torch.tensor(list(self._counts), device=device)] -= penalties


def needs_edits(sampling: Sampling) -> bool:
    penalties = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
    return bool(sampling.logit_bias) or penalties != (1.0, 0.0, 0.0)
