"""Edits logits before a draw: biases and penalties.

As OpenAI defines them and in vLLM's order. First the bias is added. Then the repetition penalty divides positive and
multiplies negative logits of tokens in prompt or answer. Then the frequency penalty is subtracted as often as the
answer has the token, and the presence penalty once.
"""

from collections import Counter
from collections.abc import Set
from typing import Final

import torch

from prfaas.wire.engine import Sampling

_LARGEST: Final = torch.finfo(torch.float32).max
"""A tiny penalty would make a logit infinite, of which no token can be drawn."""


def edit_logits(logits: torch.Tensor, sampling: Sampling, prompt: Set[int], counts: Counter[int]) -> None:
    """Add biases and penalties in place to fp32 [vocab_size]. `counts` are the answer's tokens, `prompt` those of the
    prompt, if there is a repetition penalty."""
    device = logits.device
    if sampling.logit_bias:
        tokens, biases = zip(*sampling.logit_bias, strict=True)
        biases = torch.tensor(biases, dtype=torch.float32, device=device)
        logits.index_add_(0, torch.tensor(tokens, device=device), biases)
    if sampling.repetition_penalty != 1 and (seen := prompt | counts.keys()):
        tokens = torch.tensor(list(seen), device=device)
        values = logits[tokens]
        penalty = sampling.repetition_penalty
        edited = torch.where(values > 0, values / penalty, values * penalty)
        logits[tokens] = edited.clamp_(-_LARGEST, _LARGEST)
    if counts and (sampling.frequency_penalty or sampling.presence_penalty):
        amounts = torch.tensor(list(counts.values()), device=device)
        penalties = sampling.frequency_penalty * amounts + sampling.presence_penalty
        logits[torch.tensor(list(counts), device=device)] -= penalties
