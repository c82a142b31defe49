"""One step's draws: what every row has in common is computed for the batch, what few rows ask for those rows alone.

A row's result depends on its own logits and sampler, never on the other rows. What goes wrong in one row (a grammar
that no token fits, logits that are not numbers) is that row's result: the batch goes on.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from prfaas.errors import InternalError, PrfaasError, RequestError
from prfaas.wire.engine import TokenLogprob
from prfaas_worker.engine.sampling.cuts import Cut, draw_rows
from prfaas_worker.engine.sampling.edits import Mask, apply_bans, apply_masks, apply_tables
from prfaas_worker.engine.sampling.largest import BLOCK, largest, padded
from prfaas_worker.engine.sampling.sampler import Sampler

_WIDE: Final = 4096


class Drawn(NamedTuple):
    """The token, and its log probability if it was asked for; or with token -1 why this row's request is over."""

    token: int
    logprob: TokenLogprob | None
    error: PrfaasError | None = None


def sample(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[Drawn]:
    """Draw one token for each row of `logits`, fp32 [B, vocab_size], and have its sampler go on over it.

    May change `logits`. Log probabilities are those of the model, before biases, penalties, temperature and cuts.
    """
    reports = _report_rows(logits, samplers)
    edited = [row for row, sampler in enumerate(samplers) if sampler.table or sampler.matcher or sampler.hold_back > 0]
    if edited:  # choices of one prompt may all look at one row
        logits = logits.contiguous()
    errors = _edit(logits, samplers, edited) if edited else {}
    tops, peaks = _peaks(logits)
    for row, top in enumerate(tops.tolist()):
        if not math.isfinite(top):
            errors.setdefault(row, _undrawable(top, samplers[row]))
    tokens = peaks.tolist()
    random = [row for row, sampler in enumerate(samplers) if not sampler.greedy and row not in errors]
    if random:
        cuts = [_cut(row, samplers[row]) for row in random]
        for row, token in zip(random, draw_rows(logits, tops, cuts), strict=True):
            tokens[row] = token
    logprobs = _logprobs(reports, samplers, tokens) if reports else {}
    return [_finish(sampler, tokens[row], logprobs.get(row), errors.get(row)) for row, sampler in enumerate(samplers)]


def _finish(sampler: Sampler, token: int, logprob: TokenLogprob | None, error: PrfaasError | None) -> Drawn:
    if error is None:
        try:
            sampler.accept(token)
        except RequestError as refused:
            error = refused
    return Drawn(token, logprob) if error is None else Drawn(-1, None, error)


def _cut(row: int, sampler: Sampler) -> Cut:
    sampling, stream = sampler.sampling, sampler.stream
    assert stream is not None  # noqa: S101 - it has one unless it is greedy
    return Cut(row, sampling.temperature, sampling.min_p, sampling.top_k, sampling.top_p, stream.next())


def _edit(logits: torch.Tensor, samplers: Sequence[Sampler], rows: Sequence[int]) -> dict[int, PrfaasError]:
    """Apply what these rows' samplers ask for, in place; return the rows that a grammar refuses."""
    errors: dict[int, PrfaasError] = {}
    masks: list[Mask] = []
    tables = [(row, table) for row in rows if (table := samplers[row].table)]
    bans = []
    for row in rows:
        sampler = samplers[row]
        if sampler.matcher is not None:
            words = np.empty(-(-logits.shape[1] // 32), dtype=np.int32)
            try:
                sampler.matcher.fill(words, sampler.ends, hold_back=sampler.hold_back > 0)
                masks.append(Mask(row, words))
            except RequestError as refused:
                errors[row] = refused
        elif sampler.hold_back > 0:
            bans.append((row, sampler.ends))
    if tables:
        apply_tables(logits, tables)
    if masks:
        apply_masks(logits, masks)
    if bans:
        apply_bans(logits, bans)
    return errors


def _undrawable(top: float, sampler: Sampler) -> PrfaasError:
    if top == -math.inf and (sampler.matcher is not None or sampler.table is not None or sampler.hold_back > 0):
        return RequestError("no token is left to draw: grammar, min_tokens and logit_bias together rule out every one")
    return InternalError(f"the model's largest logit is {top}: no token can be drawn")


def _peaks(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's maximum, and the first token that has it: [B] each."""
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


class _Reports(NamedTuple):
    """Rows that want log probabilities, and those of the whole vocabulary, fp32 [rows, vocab_size]."""

    rows: list[int]
    logprobs: torch.Tensor


def _report_rows(logits: torch.Tensor, samplers: Sequence[Sampler]) -> _Reports | None:
    rows = [row for row, sampler in enumerate(samplers) if sampler.logprobs >= 0]
    if not rows:
        return None
    asked = logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=logits.device)]
    return _Reports(rows, torch.log_softmax(asked, dim=-1))


def _logprobs(reports: _Reports, samplers: Sequence[Sampler], tokens: Sequence[int]) -> dict[int, TokenLogprob]:
    most = max(samplers[row].logprobs for row in reports.rows)
    width = reports.logprobs.shape[1]
    top_values, top_tokens = largest(padded(reports.logprobs, -math.inf), min(max(most, 1), width))
    drawn = torch.tensor([[tokens[row]] for row in reports.rows], device=reports.logprobs.device)
    columns = reports.logprobs.gather(1, drawn)[:, 0].tolist(), top_tokens.tolist(), top_values.tolist()
    found = {}
    for row, own, ids, values in zip(reports.rows, *columns, strict=True):
        count = samplers[row].logprobs
        found[row] = TokenLogprob(own, list(zip(ids[:count], values[:count], strict=True)))
    return found
