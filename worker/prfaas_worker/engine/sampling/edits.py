"""What changes logits before a draw: biases, penalties, and tokens that may not come.

As OpenAI defines them and in vLLM's order: first the bias is added, then the repetition penalty divides positive and
multiplies negative logits of what stands in prompt or answer, then the frequency penalty takes its value as often as
the answer has the token, and the presence penalty once. Only tokens that are concerned are touched: their number grows
with the text and is nothing beside the vocabulary.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from prfaas.wire.engine import Sampling

_FIRST_ROOM: Final = 256


class Table:
    """The tokens of one choice that have a bias or have been seen, and what there is to know of each."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int]):
        self.rates = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        self._counts = self.rates != (1.0, 0.0, 0.0)
        biases: dict[int, float] = {}
        for token, bias in sampling.logit_bias:
            biases[token] = biases.get(token, 0.0) + bias
        prompted = set(prompt) if sampling.repetition_penalty != 1 else set()
        tokens = [*biases, *(prompted - biases.keys())]
        self._slots = {token: slot for slot, token in enumerate(tokens)}
        self._columns = np.zeros((4, len(tokens) + _FIRST_ROOM))
        self._columns[0, : len(tokens)] = tokens
        self._columns[1, : len(biases)] = list(biases.values())
        self._columns[2, : len(tokens)] = [token in prompted for token in tokens]

    @property
    def columns(self) -> np.ndarray:
        """Float64 [4, tokens]: token, bias, 1 where the prompt counts it, and how often the answer has it."""
        return self._columns[:, : len(self._slots)]

    def count(self, token: int) -> None:
        """Note a token of the answer."""
        if not self._counts:
            return
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
        self._columns[0, slot] = token
        self._columns[3, slot] += 1


def needs_table(sampling: Sampling) -> bool:
    """Whether anything of a request's parameters is kept in a table."""
    penalties = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
    return bool(sampling.logit_bias) or penalties != (1.0, 0.0, 0.0)


def apply_tables(logits: torch.Tensor, tables: Sequence[tuple[int, Table]]) -> None:
    """Add biases and penalties to the rows that have them, in place in fp32 [B, vocab_size]."""
    columns = [table.columns for _, table in tables]
    lengths = [found.shape[1] for found in columns]
    rows = np.repeat([row for row, _ in tables], lengths)
    rates = np.repeat(np.array([table.rates for _, table in tables]).T, lengths, axis=1)
    # One copy to the device: indices below 2^53 are exact in float64.
    everything = torch.from_numpy(np.concatenate([rows[None], *(np.concatenate(columns, axis=1), rates)]))
    everything = everything.to(logits.device)
    (rows_at, tokens), (bias, prompted, count) = everything[:2].long(), everything[2:5]
    repetition, frequency, presence = everything[5:]
    values = logits[rows_at, tokens].double() + bias
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where((prompted > 0) | (count > 0), repeated, values)
    values -= frequency * count + presence * (count > 0)
    logits[rows_at, tokens] = values.float()


class Mask(NamedTuple):
    """Tokens that one row may draw, a bit each: int32 [ceil(vocab_size / 32)]."""

    row: int
    words: np.ndarray


def apply_masks(logits: torch.Tensor, masks: Sequence[Mask]) -> None:
    """Rule out, in place, every token whose bit is 0."""
    banned = np.stack([mask.words for mask in masks])
    np.invert(banned, out=banned)
    # Little-endian words: bit i of the mask is bit i % 8 of byte i // 8.
    bits = np.unpackbits(banned.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    where = torch.from_numpy(bits).view(torch.bool).to(logits.device)
    rows = [mask.row for mask in masks]
    if len(rows) == len(logits):
        logits.masked_fill_(where, -torch.inf)
    else:
        index = torch.tensor(rows, device=logits.device)
        logits[index] = logits[index].masked_fill_(where, -torch.inf)


def apply_bans(logits: torch.Tensor, bans: Sequence[tuple[int, Sequence[int]]]) -> None:
    """Rule out, in place, a few tokens of some rows."""
    pairs = [(row, token) for row, tokens in bans for token in tokens]
    rows, tokens = torch.tensor(pairs, device=logits.device).T
    logits[rows, tokens] = -torch.inf
