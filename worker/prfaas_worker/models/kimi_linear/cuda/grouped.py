"""One matrix product per expert over the rows that stand together for it, all in one launch.

torch's own grouped product serves bf16 on Hopper and later, and reads the groups' ends on the device. On other devices
it would fetch them to the host and loop, which no captured graph allows; there a kernel of ours takes its place. Each
of its programs finds its expert by counting the tiles of those before it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the name that torch's own documentation gives it

from prfaas_worker.models.kimi_linear.cuda.launch import launch

_BLOCK_COLUMNS = 64
_BLOCK_INNER = 64
_ROWS_PER_TILE = (16, 32, 64, 128)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows by its weight.

    Args:
        x: rows [M, K], expert after expert.
        weight: [E, N, K].
        ends: expert e has rows ends[e - 1] up to ends[e], int32 [E]; ends[-1] is M.

    Returns:
        [M, N].

    """
    if _torch_serves(x):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return grouped_linear_triton(x, weight, ends)


def grouped_linear_triton(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`grouped_linear` by our kernel, on any device that Triton serves."""
    rows, inner = x.shape
    experts, columns, _ = weight.shape
    out = x.new_empty(rows, columns)
    # A tile as high as an expert's usual share; most experts of a small batch have one row.
    share = rows // experts
    block_rows = next((size for size in _ROWS_PER_TILE if size >= share), _ROWS_PER_TILE[-1])
    # Every expert may end in the middle of a tile.
    tiles = triton.cdiv(rows, block_rows) + min(experts, rows)
    launch(
        _grouped_kernel,
        (tiles, triton.cdiv(columns, _BLOCK_COLUMNS)),
        x,
        weight,
        ends,
        out,
        COLUMNS=columns,
        INNER=inner,
        EXPERTS=experts,
        BLOCK_EXPERTS=triton.next_power_of_2(experts),
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=_BLOCK_COLUMNS,
        BLOCK_INNER=_BLOCK_INNER,
        num_warps=4,
        num_stages=3,
    )
    return out


def _torch_serves(x: Tensor) -> bool:
    return (
        x.is_cuda
        and x.dtype == torch.bfloat16
        and hasattr(F, "grouped_mm")
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
    )


@triton.jit
def _grouped_kernel(  # noqa: PLR0913, PLR0917, a kernel's arguments are its pointers and sizes
    x,
    weight,
    ends,
    out,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
):
    tile = tl.program_id(0)
    e = tl.arange(0, BLOCK_EXPERTS)
    end = tl.load(ends + e, mask=e < EXPERTS, other=0)
    begin = tl.load(ends + e - 1, mask=(e > 0) & (e < EXPERTS), other=0)
    tiles = (end - begin + BLOCK_ROWS - 1) // BLOCK_ROWS
    upto = tl.cumsum(tiles, 0)
    if tile >= tl.sum(tiles, 0):
        return
    expert = tl.sum((upto <= tile).to(tl.int32), 0)
    is_ours = e == expert
    first = tl.sum(tl.where(is_ours, begin + (tile - upto + tiles) * BLOCK_ROWS, 0), 0)
    row = first + tl.arange(0, BLOCK_ROWS)
    is_row = row < tl.sum(tl.where(is_ours, end, 0), 0)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    x_row = x + row.to(tl.int64)[:, None] * INNER
    w_column = weight + expert.to(tl.int64) * COLUMNS * INNER + column.to(tl.int64)[:, None] * INNER
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for at in range(0, INNER, BLOCK_INNER):
        inner = at + tl.arange(0, BLOCK_INNER)
        left = tl.load(x_row + inner[None, :], mask=is_row[:, None] & (inner < INNER)[None, :], other=0.0)
        right = tl.load(
            w_column + inner[None, :], mask=(column < COLUMNS)[:, None] & (inner < INNER)[None, :], other=0.0
        )
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    place = out + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_row[:, None] & (column < COLUMNS)[None, :])
