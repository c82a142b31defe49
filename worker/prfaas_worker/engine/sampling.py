"""Draws tokens from logits, so that a sequence's text depends only on its own logits, seed and position.

A draw's random number belongs to (seed, choice, position): not to a batch, instance or history. A request that
continues elsewhere from the same tokens draws the same text. Philox is a counter-based generator: the seed and the
choice are its key, the position its counter. A counter yields four numbers, of which a position takes the first.

A `Sampler` is one answer's state, a function of (request, choice, tokens generated). Made anew from these, here or on
another instance, it continues as the old one would have. It holds no cache, so a preempted request keeps its sampler.

`sample` makes one step's draws. It computes for the whole batch what every row needs, and the rest only for the rows
that ask for it. An error in one row (no token that may be drawn, logits that are not numbers) is that row's result.
The batch continues.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from prfaas.errors import InternalError, PrfaasError, RequestError
from prfaas.wire.engine import Generate, TokenLogprob
from prfaas_worker.engine.logit_edits import LogitTable, apply_bans, apply_tables, needs_table
from prfaas_worker.engine.top_k_top_p import BLOCK, RowDraw, draw_rows, largest, pad_to_blocks

_AHEAD: Final = 64
_WIDE: Final = 4096


class Outputs(NamedTuple):
    """A model's outputs: the logits' width, and the tokens that end an answer."""

    vocab_size: int
    eos_ids: tuple[int, ...]


class Sampler:
    """The state of one choice of a request, whose tokens `check_tokens` has checked."""

    __slots__ = ("ends", "generated", "greedy", "hold_back", "logprobs", "random", "sampling", "table")

    def __init__(self, generate: Generate, choice: int, outputs: Outputs, generated: Sequence[int] = ()):
        sampling = generate.sampling
        self.sampling = sampling
        self.greedy = sampling.temperature == 0 or sampling.top_k == 1
        self.logprobs = generate.logprobs
        eos_ids = () if generate.ignore_eos else outputs.eos_ids
        self.ends = frozenset(eos_ids) | frozenset(generate.stop_token_ids)
        self.hold_back = generate.min_tokens - len(generated) if self.ends else 0
        self.generated = len(generated)
        self.table = LogitTable(sampling, generate.token_ids) if needs_table(sampling) else None
        if self.table is not None:
            for token in generated:
                self.table.count(token)
        position = len(generate.token_ids) + len(generated)
        self.random = None if self.greedy else RandomNumbers(sampling.seed, choice, position)

    def accept(self, token: int) -> None:
        """Advance over a drawn token."""
        self.generated += 1
        self.hold_back -= 1
        if self.table is not None:
            self.table.count(token)


def check_tokens(generate: Generate, vocab_size: int) -> None:
    for name, tokens in (
        ("logit_bias", [token for token, _ in generate.sampling.logit_bias]),
        ("stop_token_ids", generate.stop_token_ids),
    ):
        if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
            raise RequestError(f"{name}: token {wrong[0]} is none of the model's {vocab_size}", param=name)


class Drawn(NamedTuple):
    """The token and its requested log probability; or token -1 and the error that ends the request."""

    token: int
    logprob: TokenLogprob | None
    error: PrfaasError | None = None


def sample(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[Drawn]:
    """Draw one token for each row of `logits`, fp32 [B, vocab_size], and advance its sampler. May change `logits`. Log
    probabilities are the model's, before any edit, temperature and truncation."""
    logprob_rows = _logprob_rows(logits, samplers)
    edited = [row for row, sampler in enumerate(samplers) if sampler.table or sampler.hold_back > 0]
    if edited:  # choices of one prompt may all look at one row
        logits = logits.contiguous()
        _edit(logits, samplers, edited)
    tops, peaks = _peaks(logits)
    errors = {row: _undrawable(top, samplers[row]) for row, top in enumerate(tops.tolist()) if not math.isfinite(top)}
    tokens = peaks.tolist()
    drawn = [row for row, sampler in enumerate(samplers) if not sampler.greedy and row not in errors]
    if drawn:
        draws = [_row_draw(row, samplers[row]) for row in drawn]
        for row, token in zip(drawn, draw_rows(logits, tops, draws), strict=True):
            tokens[row] = token
    logprobs = _logprobs(logprob_rows, samplers, tokens) if logprob_rows else {}
    return [_finish(sampler, tokens[row], logprobs.get(row), errors.get(row)) for row, sampler in enumerate(samplers)]


def _finish(sampler: Sampler, token: int, logprob: TokenLogprob | None, error: PrfaasError | None) -> Drawn:
    if error is not None:
        return Drawn(-1, None, error)
    sampler.accept(token)
    return Drawn(token, logprob)


def _row_draw(row: int, sampler: Sampler) -> RowDraw:
    sampling, random = sampler.sampling, sampler.random
    assert random is not None  # noqa: S101 - it has one unless it is greedy
    return RowDraw(row, sampling.temperature, sampling.min_p, sampling.top_k, sampling.top_p, random.next())


def _edit(logits: torch.Tensor, samplers: Sequence[Sampler], rows: Sequence[int]) -> None:
    """Apply these rows' samplers in place."""
    tables = [(row, table) for row in rows if (table := samplers[row].table)]
    bans = [(row, samplers[row].ends) for row in rows if samplers[row].hold_back > 0]
    if tables:
        apply_tables(logits, tables)
    if bans:
        apply_bans(logits, bans)


def _undrawable(top: float, sampler: Sampler) -> PrfaasError:
    if top == -math.inf and (sampler.table is not None or sampler.hold_back > 0):
        return RequestError("no token is left to draw: min_tokens and logit_bias together rule out every one")
    return InternalError(f"the model's largest logit is {top}: no token can be drawn")


def _peaks(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's maximum, and the first token with it: [B] each."""
    width = logits.shape[1]
    if width < _WIDE or logits.device.type != "cpu":
        tops, tokens = logits.max(-1)
        return tops, tokens
    # A processor finds maxima with vector instructions, but places one by one: so first the block, then the place.
    whole = width // BLOCK * BLOCK
    peaks = logits[:, :whole].unflatten(1, (-1, BLOCK)).amax(-1)
    if whole < width:
        peaks = torch.cat([peaks, logits[:, whole:].amax(-1, keepdim=True)], dim=1)
    block = peaks.argmax(-1, keepdim=True)
    places = (block * BLOCK + torch.arange(BLOCK)).clamp_(max=width - 1)
    tops, offset = logits.gather(1, places).max(-1, keepdim=True)
    return tops[:, 0], places.gather(1, offset)[:, 0]


class _LogprobRows(NamedTuple):
    """Rows that need log probabilities, and those of the whole vocabulary, fp32 [rows, vocab_size]."""

    rows: list[int]
    logprobs: torch.Tensor


def _logprob_rows(logits: torch.Tensor, samplers: Sequence[Sampler]) -> _LogprobRows | None:
    rows = [row for row, sampler in enumerate(samplers) if sampler.logprobs >= 0]
    if not rows:
        return None
    asked = logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=logits.device)]
    return _LogprobRows(rows, torch.log_softmax(asked, dim=-1))


def _logprobs(
    logprob_rows: _LogprobRows, samplers: Sequence[Sampler], tokens: Sequence[int]
) -> dict[int, TokenLogprob]:
    most = max(samplers[row].logprobs for row in logprob_rows.rows)
    width = logprob_rows.logprobs.shape[1]
    top_values, top_tokens = largest(pad_to_blocks(logprob_rows.logprobs, -math.inf), min(max(most, 1), width))
    drawn = torch.tensor([[tokens[row]] for row in logprob_rows.rows], device=logprob_rows.logprobs.device)
    columns = logprob_rows.logprobs.gather(1, drawn)[:, 0].tolist(), top_tokens.tolist(), top_values.tolist()
    found = {}
    for row, own, ids, values in zip(logprob_rows.rows, *columns, strict=True):
        count = samplers[row].logprobs
        found[row] = TokenLogprob(own, list(zip(ids[:count], values[:count], strict=True)))
    return found


def uniform(seed: int, choice: int, position: int) -> float:
    key = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF, choice], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=position)).random())


class RandomNumbers:
    """The numbers of one choice at `position` and after it, made in bulk."""

    def __init__(self, seed: int, choice: int, position: int):
        key = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF, choice], dtype=np.uint64)
        self._bits = np.random.Philox(key=key, counter=position)
        self._ahead: list[float] = []

    def next(self) -> float:
        if not self._ahead:
            # As numpy's Generator makes a double of 64 bits.
            numbers = (self._bits.random_raw(4 * _AHEAD)[::4] >> np.uint64(11)) * 2.0**-53
            self._ahead = numbers.tolist()[::-1]
        return self._ahead.pop()
