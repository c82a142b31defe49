"""The cache rows of an MLA layer: norms each token's latent and puts it, with the shared key, into the token's page."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from prfaas_worker.models.kimi_linear.cuda.launch import launch
from prfaas_worker.models.kimi_linear.cuda.step import Step

# transformers and the authors' code use 1e-6 here, whatever rms_norm_eps says.
_LATENT_NORM_EPS = 1e-6


def write_rows(x: Tensor, norm: Tensor, pages: Tensor, table: Tensor, step: Step) -> Tensor:
    """Make the rows of a step's tokens and put them where the page table says.

    Args:
        x: latent, then shared key, as projected [N, L + S].
        norm: weight of the latent's norm [L].
        pages: the layer's rows [pages, page tokens, L + S]; pages may stand apart.
        table: pages of each slot, int64 [slots, columns].
        step: slots and positions of the tokens; those of slot PADDING are written nowhere.

    Returns:
        The rows once more, [N, L + S], contiguous.

    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    tokens, width = x.shape
    latent = norm.shape[0]
    launch(
        _rows_kernel,
        (tokens,),
        x,
        norm,
        out,
        pages,
        table,
        step.slots,
        step.positions,
        x.stride(0),
        pages.stride(0),
        table.stride(0),
        _LATENT_NORM_EPS,
        LATENT=latent,
        WIDTH=width,
        PAGE_TOKENS=pages.shape[1],
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )
    return out


@triton.jit
def _rows_kernel(  # noqa: PLR0913, PLR0917, a kernel's arguments are its pointers and sizes
    x,
    norm,
    out,
    pages,
    table,
    slots,
    positions,
    x_stride,
    page_stride,
    table_stride,
    eps,
    LATENT: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside, is_latent = column < WIDTH, column < LATENT
    given = tl.load(x + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    latent = tl.where(is_latent, given, 0.0)
    scale = tl.rsqrt(tl.sum(latent * latent, 0) / LATENT + eps)
    normed = latent * scale * tl.load(norm + column, mask=is_latent, other=0.0).to(tl.float32)
    row = tl.where(is_latent, normed, given).to(out.dtype.element_ty)
    tl.store(out + token * WIDTH + column, row, mask=inside)
    slot = tl.load(slots + token)
    if slot >= 0:
        position = tl.load(positions + token)
        page = tl.load(table + slot * table_stride + position // PAGE_TOKENS)
        tl.store(pages + page * page_stride + (position % PAGE_TOKENS) * WIDTH + column, row, mask=inside)
