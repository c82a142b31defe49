"""Norms and activations that stand between the matrix products, each read and written once.

The residual stream is fp32, what enters a product is not: so adding an attention's output to the stream, norming the
sum and rounding it is one kernel. All sums are taken in fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from prfaas_worker.models.kimi_linear.cuda.launch import launch

_ROWS = 16
_ACTIVATION_BLOCK = 1024


def add_rms_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Add `delta` [N, D] to the residual stream, fp32 [N, D], in place; returns the sum's RMSNorm in `dtype`."""
    out = torch.empty(residual.shape, dtype=dtype, device=residual.device)
    rows, size = residual.shape
    launch(
        _add_norm_kernel,
        (rows,),
        residual,
        residual if delta is None else delta,
        weight,
        out,
        eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        HAS_DELTA=delta is not None,
        num_warps=8 if size > 1024 else 4,
    )
    return out


def gated_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """out [P, H V] = RMSNorm over V of o [P, H, V], times sigmoid(gate [P, H V])."""
    tokens, heads, size = o.shape
    launch(
        _gated_norm_kernel,
        (triton.cdiv(tokens * heads, _ROWS),),
        o,
        gate,
        weight,
        out,
        tokens * heads,
        eps,
        gate.stride(0),
        HEADS=heads,
        SIZE=size,
        ROWS=_ROWS,
    )


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [M, 2 F], gate first: [M, F]."""
    rows, width = gate_up.shape
    out = gate_up.new_empty(rows, width // 2)
    if rows:
        grid = (rows, triton.cdiv(width // 2, _ACTIVATION_BLOCK))
        launch(_silu_mul_kernel, grid, gate_up, out, WIDTH=width // 2, BLOCK=_ACTIVATION_BLOCK)
    return out


@triton.jit
def _add_norm_kernel(  # noqa: PLR0913, PLR0917, a kernel's arguments are its pointers and sizes
    residual, delta, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_DELTA: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    x = tl.load(residual + row + column, mask=inside, other=0.0)
    if HAS_DELTA:
        x += tl.load(delta + row + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + row + column, x, mask=inside)
    scale = tl.rsqrt(tl.sum(x * x) / SIZE + eps)
    normed = x * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_norm_kernel(  # noqa: PLR0913, PLR0917
    o, gate, weight, out, rows, eps, gate_stride, HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE)
    inside = (row < rows)[:, None]
    at = row[:, None] * SIZE + column[None, :]
    gate_at = (row // HEADS)[:, None] * gate_stride + (row % HEADS)[:, None] * SIZE + column[None, :]
    x = tl.load(o + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)
    normed = x * scale[:, None] * tl.load(weight + column).to(tl.float32)[None, :]
    opened = tl.sigmoid(tl.load(gate + gate_at, mask=inside, other=0.0).to(tl.float32))
    tl.store(out + at, (normed * opened).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)
