"""MLA for one token of every decoding sequence, over pages, with the key expansion absorbed into the query.

With kv_b_proj absorbed all heads of a sequence attend to the same rows, which are keys and, without their shared part,
values: a row is loaded once for all heads, and the bound is reading the rows. One sequence alone would keep one
processor busy, so its rows are split among programs; each leaves a normalised part and the logarithm (base 2) of its
softmax's sum, and a second kernel joins the parts of a sequence.

Lengths are read on the device, and how many programs there are follows from the number of sequences alone: a captured
graph is right for any lengths. Programs without rows return at once.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from prfaas_worker.models.base import Decodes
from prfaas_worker.models.kimi_linear.cuda.launch import launch

_HEADS = 32  # at most so many heads share a load
_ROWS = 32  # loaded at once
_MOST_PARTS, _FEWEST_PARTS = 128, 8
# Parts for each processor: sequences differ in length, and short ones must not leave it idle.
_PARTS_PER_PROCESSOR = 8
_LOG2_E = 1.4426950408889634


class Queries(NamedTuple):
    """B absorbed queries: what meets the latent [H, B, L], and what meets the shared key [B, H, S]."""

    latent: Tensor
    shared: Tensor
    scale: float


class Split(NamedTuple):
    """How a sequence's rows are cut: into `parts` at most, none but the last of fewer than `least_rows`."""

    parts: int
    least_rows: int


def split_for(rows: int, processors: int) -> Split:
    """Cut so that `rows` sequences fill every processor, and joining the parts stays cheap beside reading the rows."""
    parts = min(_MOST_PARTS, max(_FEWEST_PARTS, _PARTS_PER_PROCESSOR * processors // rows))
    return Split(parts, 128 if _FEWEST_PARTS * rows <= processors else 512)


def attend_pages(queries: Queries, pages: Tensor, table: Tensor, decodes: Decodes, split: Split) -> Tensor:
    """Let one token of each sequence attend to the rows up to its own, which stands in the pages already.

    Args:
        queries: of the B tokens.
        pages: the layer's rows [pages, page tokens, L + S]; pages may stand apart.
        table: pages of each slot, int64 [slots, columns].
        decodes: slots (PADDING: the output is 0) and the tokens before this one.
        split: see `split_for`.

    Returns:
        Mixed latents [H, B, L].

    """
    heads, count, latent = queries.latent.shape
    partial = torch.empty(count, split.parts, heads, latent, dtype=torch.float32, device=pages.device)
    sums = torch.empty(count, split.parts, heads, dtype=torch.float32, device=pages.device)
    out = torch.empty_like(queries.latent, memory_format=torch.contiguous_format)
    block_heads = min(_HEADS, max(16, triton.next_power_of_2(heads)))
    sizes = {"HEADS": heads, "LATENT": latent, "PARTS": split.parts, "LEAST_ROWS": split.least_rows, "ROWS": _ROWS}
    launch(
        _attend_kernel,
        (triton.cdiv(heads, block_heads), split.parts, count),
        queries.latent,
        queries.shared,
        pages,
        table,
        decodes.slots,
        decodes.lengths,
        partial,
        sums,
        queries.scale * _LOG2_E,
        queries.latent.stride(0),
        queries.latent.stride(1),
        queries.shared.stride(0),
        queries.shared.stride(1),
        pages.stride(0),
        table.stride(0),
        SHARED=queries.shared.shape[2],
        PAGE_TOKENS=pages.shape[1],
        BLOCK_HEADS=block_heads,
        num_warps=8,
        num_stages=3,
        **sizes,
    )
    launch(
        _join_kernel,
        (heads, count),
        partial,
        sums,
        decodes.slots,
        decodes.lengths,
        out,
        out.stride(0),
        num_warps=4,
        **sizes,
    )
    return out


@triton.jit
def _span(slots, lengths, row, PARTS: tl.constexpr, LEAST_ROWS: tl.constexpr, ROWS: tl.constexpr):
    """The slot of a sequence, its rows, and how many of them each part has."""
    slot = tl.load(slots + row)
    length = tl.where(slot < 0, 0, tl.load(lengths + row) + 1)
    share = (length + PARTS - 1) // PARTS
    return slot, length, tl.maximum((share + ROWS - 1) // ROWS * ROWS, LEAST_ROWS)


@triton.jit
def _attend_kernel(  # noqa: PLR0913, PLR0917, a kernel's arguments are its pointers and sizes
    q_latent,
    q_shared,
    pages,
    table,
    slots,
    lengths,
    partial,
    sums,
    scale,
    latent_head_stride,
    latent_row_stride,
    shared_row_stride,
    shared_head_stride,
    page_stride,
    table_stride,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    SHARED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    LEAST_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    part = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    slot, length, span = _span(slots, lengths, row, PARTS, LEAST_ROWS, ROWS)
    begin = part * span
    end = tl.minimum(begin + span, length)
    if begin >= end:
        return
    head = tl.program_id(0) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_head = (head < HEADS)[:, None]
    of_latent, of_shared = tl.arange(0, LATENT), tl.arange(0, SHARED)
    ql_at = head[:, None] * latent_head_stride + row * latent_row_stride + of_latent[None, :]
    ql = tl.load(q_latent + ql_at, mask=is_head, other=0.0)
    qs_at = row * shared_row_stride + head[:, None] * shared_head_stride + of_shared[None, :]
    qs = tl.load(q_shared + qs_at, mask=is_head, other=0.0)

    largest = tl.full((BLOCK_HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_HEADS,), tl.float32)
    mixed = tl.zeros((BLOCK_HEADS, LATENT), tl.float32)
    for first in range(begin, end, ROWS):
        # A block of rows never leaves its page: both begin at multiples of ROWS.
        page = tl.load(table + slot * table_stride + first // PAGE_TOKENS)
        at = first + tl.arange(0, ROWS)
        place = pages + page * page_stride + (at % PAGE_TOKENS)[:, None] * (LATENT + SHARED)
        is_row = at < end
        latent = tl.load(place + of_latent[None, :], mask=is_row[:, None], other=0.0)
        shared = tl.load(place + LATENT + of_shared[None, :], mask=is_row[:, None], other=0.0)
        score = tl.dot(ql, tl.trans(latent), input_precision="ieee")
        score = tl.dot(qs, tl.trans(shared), score, input_precision="ieee") * scale
        score = tl.where(is_row[None, :], score, float("-inf"))
        raised = tl.maximum(largest, tl.max(score, 1))
        kept = tl.exp2(largest - raised)
        weight = tl.exp2(score - raised[:, None])
        total = total * kept + tl.sum(weight, 1)
        mixed = tl.dot(weight.to(latent.dtype), latent, mixed * kept[:, None], input_precision="ieee")
        largest = raised
    at_part = (row * PARTS + part) * HEADS + head
    tl.store(partial + at_part[:, None] * LATENT + of_latent[None, :], mixed / total[:, None], mask=is_head)
    tl.store(sums + at_part, largest + tl.log2(total), mask=head < HEADS)


@triton.jit
def _join_kernel(  # noqa: PLR0913, PLR0917
    partial,
    sums,
    slots,
    lengths,
    out,
    head_stride,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    PARTS: tl.constexpr,
    LEAST_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    of_latent = tl.arange(0, LATENT)
    _, length, span = _span(slots, lengths, row, PARTS, LEAST_ROWS, ROWS)
    # What is certain to be below any sum, yet makes no NaN where there is nothing to join.
    largest, total = tl.full((), -1.0e30, tl.float32), tl.full((), 0.0, tl.float32)
    mixed = tl.zeros((LATENT,), tl.float32)
    for part in range(0, (length + span - 1) // span):
        at_part = (row * PARTS + part) * HEADS + head
        given = tl.load(sums + at_part)
        raised = tl.maximum(largest, given)
        kept, weight = tl.exp2(largest - raised), tl.exp2(given - raised)
        mixed = mixed * kept + weight * tl.load(partial + at_part * LATENT + of_latent)
        total = total * kept + weight
        largest = raised
    place = out + head * head_stride + row * LATENT + of_latent
    tl.store(place, (mixed / tl.maximum(total, 1e-30)).to(out.dtype.element_ty))
