"""Runs a step's batch over the paged memory. It works out once what all layers of a kind need of pages and slots.

The arithmetic is in `kda` and `mla`. Long chunks go through a KDA layer in parts, from one state of their slot to the
next. So intermediate results stay in the processor's caches.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.models.base import Batch, Chunk, Decodes
from prfaas_worker.models.kimi_linear.kda import DeltaAttention, Projected
from prfaas_worker.models.kimi_linear.mla import LatentAttention, Merged

# Tokens that go through a layer at once: more hide what small operations cost, fewer stay in the processor's caches.
TOKENS_AT_ONCE = 1024
# Rows before a chunk that it attends to at once.
_ROWS_AT_ONCE = 4096
# Bytes of rows that decodes attend to at once.
_DECODE_BYTES = 64 << 20
# Added to scores where there is no row: far below any, and yet a number, for sequences that have none in a block.
_NO_ROW = -1e30


class _Part(NamedTuple):
    """Tokens of the batch: `span` of all, with pieces of prompts by slot; the decodes may follow them."""

    span: slice
    pieces: list[tuple[int, slice]]
    has_decodes: bool


class PagedBatch:
    def __init__(self, batch: Batch, memory: CacheMemory):
        self.chunks = batch.chunks
        self.decodes = None if batch.decodes is None else _PagedDecodes(batch.decodes, memory)
        self.parts = _parts(batch)
        self._memory = memory

    def delta(self, kda: DeltaAttention, states: Mapping[str, Tensor], x: Tensor, part: _Part) -> Tensor:
        """One part's tokens [N, D] through a KDA layer; states are changed in place."""
        projected, outputs = kda.project(x), []
        for slot, piece in part.pieces:
            one = Projected(*(values.unsqueeze(0) for values in projected.of(piece)))
            conv, recurrent = states["conv"][slot : slot + 1], states["recurrent"][slot : slot + 1]
            o, new_conv, new_recurrent = kda.mix_chunk(one, conv, recurrent)
            conv.copy_(new_conv)
            recurrent.copy_(new_recurrent)
            outputs.append(o[0])
        if part.has_decodes and self.decodes is not None:
            own = projected.of(slice(x.shape[0] - self.decodes.count, None))
            conv, recurrent = self.decodes.read(states["conv"]), self.decodes.read(states["recurrent"])
            outputs.append(kda.mix_step(own, conv, recurrent))
            self.decodes.write(states["conv"], conv)
            self.decodes.write(states["recurrent"], recurrent)
        return kda.output(outputs[0] if len(outputs) == 1 else torch.cat(outputs), projected.gate)

    def latent(self, mla: LatentAttention, pages: Tensor, x: Tensor) -> Tensor:
        """All tokens [N, D] through an MLA layer; new rows are written into pages [num_pages, page_tokens, width]."""
        if not self.chunks and self.decodes is not None:
            q, rows = mla.project_step(x)
            return mla.output_step(self.decodes.attend(mla, q, rows, pages))
        q, rows = mla.project(x)
        outputs, start = [], 0
        for chunk in self.chunks:
            own = slice(start, start + chunk.tokens)
            outputs.append(mla.attend_own(q[own], rows[own], self._rows_before(chunk, pages)))
            self._write(chunk, rows[own], pages)
            start += chunk.tokens
        if self.decodes is not None:
            latents = self.decodes.attend(mla, mla.absorb(q[start:]), rows[start:], pages)
            outputs.append(mla.values(latents))
        return mla.output(outputs[0] if len(outputs) == 1 else torch.cat(outputs))

    def _rows_before(self, chunk: Chunk, pages: Tensor) -> Iterator[Tensor]:
        page_tokens = pages.shape[1]
        for start in range(0, chunk.start, _ROWS_AT_ONCE):
            end = min(start + _ROWS_AT_ONCE, chunk.start)
            table = self._memory.table[chunk.slot, start // page_tokens : -(-end // page_tokens)]
            yield pages.index_select(0, table).flatten(0, 1)[: end - start]

    def _write(self, chunk: Chunk, rows: Tensor, pages: Tensor) -> None:
        at = torch.arange(chunk.start, chunk.end, device=rows.device)
        pages[self._memory.table[chunk.slot, at // pages.shape[1]], at % pages.shape[1]] = rows


class _PagedDecodes:
    """Gathers states and rows of a step's decodes, and attends to them."""

    def __init__(self, decodes: Decodes, memory: CacheMemory):
        self.count = decodes.slots.shape[0]
        self._slots = decodes.slots
        self._side_by_side = _side_by_side(decodes.slots)
        page_tokens = memory.geometry.page_tokens
        self._seen = decodes.max_length + 1
        self._table = memory.table[decodes.slots, : memory.geometry.pages_for(self._seen)]
        self._own = self._table.gather(1, (decodes.lengths // page_tokens).unsqueeze(1)).squeeze(1)
        self._offsets = decodes.lengths % page_tokens
        self._absent = self._beyond = None
        if self.count > 1:
            absent = torch.arange(self._seen, device=decodes.slots.device) > decodes.lengths.unsqueeze(1)
            self._absent = absent.unsqueeze(2)
            self._beyond = (absent * _NO_ROW).unsqueeze(1)

    def read(self, states: Tensor) -> Tensor:
        """The decodes' states of [slots, ...], contiguous; a view if possible."""
        if self._side_by_side is None:
            return states.index_select(0, self._slots)
        return states[self._side_by_side].contiguous()

    def write(self, states: Tensor, changed: Tensor) -> None:
        if self._side_by_side is None:
            states.index_copy_(0, self._slots, changed)
        elif changed.data_ptr() != (own := states[self._side_by_side]).data_ptr():
            own.copy_(changed)

    def attend(self, mla: LatentAttention, q: Tensor, rows: Tensor, pages: Tensor) -> Tensor:
        """Write the decodes' own rows, then attend with absorbed queries [B, H, width]: latents [B, H, latent]."""
        pages[self._own, self._offsets] = rows
        at_once = max(1, _DECODE_BYTES // (self.count * pages[0].nbytes)) * pages.shape[1]
        first, *rest = [slice(start, min(start + at_once, self._seen)) for start in range(0, self._seen, at_once)]
        scores, latents = self._attend_span(mla, q, pages, first)
        if not rest:
            return latents
        merged = Merged(latents, scores.logsumexp(-1))
        for span in rest:
            scores, latents = self._attend_span(mla, q, pages, span)
            merged.add(latents, scores.logsumexp(-1))
        return merged.output

    def _attend_span(self, mla: LatentAttention, q: Tensor, pages: Tensor, span: slice) -> tuple[Tensor, Tensor]:
        """Scores [B, H, n] of a span of rows, and their latents."""
        rows = self._rows(pages, span)
        scores = mla.scores(q, rows, None if self._beyond is None else self._beyond[..., span])
        return scores, mla.weighted(scores, rows)

    def _rows(self, pages: Tensor, span: slice) -> Tensor:
        """Every sequence's rows of a span that begins with a page [B, n, width]; zeros where it has none."""
        table = self._table[:, span.start // pages.shape[1] : -(-span.stop // pages.shape[1])]
        rows = pages.index_select(0, table.flatten()).view(self.count, -1, pages.shape[2])
        rows = rows[:, : span.stop - span.start]
        if self._absent is not None:
            # Bytes of a page where a sequence has no row may be NaN, and zero times NaN is NaN.
            rows.masked_fill_(self._absent[:, span], 0)
        return rows


def _side_by_side(slots: Tensor) -> slice | None:
    """The slots as a range if they are consecutive. Only on the CPU: an accelerator would have to be awaited."""
    if slots.device.type != "cpu":
        return None
    numbers = slots.tolist()
    first = numbers[0]
    return slice(first, first + len(numbers)) if numbers == list(range(first, first + len(numbers))) else None


def _parts(batch: Batch) -> list[_Part]:
    """Split the batch into parts of TOKENS_AT_ONCE tokens; the last one has the decodes."""
    prompt_tokens = sum(chunk.tokens for chunk in batch.chunks)
    total = batch.tokens.shape[0]
    parts = [
        _Part(slice(start, min(start + TOKENS_AT_ONCE, prompt_tokens)), [], False)
        for start in range(0, prompt_tokens, TOKENS_AT_ONCE)
    ]
    start = 0
    for chunk in batch.chunks:
        for part in parts:
            low, high = max(part.span.start, start), min(part.span.stop, start + chunk.tokens)
            if low < high:
                part.pieces.append((chunk.slot, slice(low - part.span.start, high - part.span.start)))
        start += chunk.tokens
    if total > prompt_tokens:
        last = parts.pop() if parts else _Part(slice(0, 0), [], False)
        parts.append(_Part(slice(last.span.start, total), last.pieces, True))
    return parts
