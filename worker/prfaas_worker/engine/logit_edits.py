"""Edits logits before a draw: biases, penalties, and forbidden tokens.

As OpenAI defines them and in vLLM's order. First the bias is added. Then the repetition penalty divides positive and
multiplies negative logits of tokens in prompt or answer. Then the frequency penalty is subtracted as often as the
answer has the token, and the presence penalty once. Only the tokens concerned are touched, few beside the vocabulary.
"""

from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
import torch

from prfaas.wire.engine import Sampling

_FIRST_ROOM: Final = 256
_NO_PENALTIES: Final = (1.0, 0.0, 0.0)


class LogitTable:
    """The tokens of one choice with a bias or an occurrence, and the change to the logit of each."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int]):
        self._repetition, self._frequency, self._presence = _penalties(sampling)
        self._counted = _penalties(sampling) != _NO_PENALTIES
        self._slots: dict[int, int] = {}
        self._counts: list[int] = []
        self._tokens = np.zeros(_FIRST_ROOM, dtype=np.int64)
        self._changes = np.zeros((3, _FIRST_ROOM), dtype=np.float32)
        for token, bias in sampling.logit_bias:
            slot = self._slot(token)  # first: it may exchange the array
            self._changes[0, slot] += bias
        for token in sorted(set(prompt)) if self._repetition != 1 else ():
            slot = self._slot(token)
            self._changes[1, slot] = self._repetition

    @property
    def tokens(self) -> np.ndarray:
        return self._tokens[: len(self._slots)]

    @property
    def changes(self) -> np.ndarray:
        """For each token the bias, the repetition penalty, and the sum of the other penalties: fp32 [3, n]."""
        return self._changes[:, : len(self._slots)]

    def count(self, token: int) -> None:
        if not self._counted:
            return
        slot = self._slot(token)
        self._counts[slot] += 1
        self._changes[1, slot] = self._repetition
        self._changes[2, slot] = self._frequency * self._counts[slot] + self._presence

    def _slot(self, token: int) -> int:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            self._counts.append(0)
            if slot == len(self._tokens):
                self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
                self._changes = np.concatenate([self._changes, np.zeros_like(self._changes)], axis=1)
            self._tokens[slot] = token
            self._changes[1, slot] = 1
        return slot


def _penalties(sampling: Sampling) -> tuple[float, float, float]:
    return sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty


def needs_table(sampling: Sampling) -> bool:
    return bool(sampling.logit_bias) or _penalties(sampling) != _NO_PENALTIES


def apply_tables(logits: torch.Tensor, tables: Sequence[tuple[int, LogitTable]]) -> None:
    """Add biases and penalties to the rows that have them, in place in contiguous fp32 [B, vocab_size]."""
    width = logits.shape[1]
    places = torch.from_numpy(np.concatenate([table.tokens + row * width for row, table in tables])).to(logits.device)
    changes = torch.from_numpy(np.concatenate([table.changes for _, table in tables], axis=1)).to(logits.device)
    bias, factor, less = changes
    values = logits.view(-1).index_select(0, places).add_(bias)
    values = torch.where(values > 0, values / factor, values * factor).sub_(less)
    logits.view(-1).scatter_(0, places, values)


def apply_bans(logits: torch.Tensor, bans: Sequence[tuple[int, Collection[int]]]) -> None:
    pairs = [(row, token) for row, tokens in bans for token in tokens]
    rows, tokens = torch.tensor(pairs, device=logits.device).T
    logits[rows, tokens] = -torch.inf
