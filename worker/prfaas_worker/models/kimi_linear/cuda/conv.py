"""The short causal convolution of a KDA layer over the chunks of a step, with the inputs before each chunk in its slot.

The state of a slot is the last `taps - 1` inputs of every channel, oldest first. Outputs and new states are two
kernels: the first reads the old states, so the second may only write them once every output is done.
"""

import triton
import triton.language as tl
from torch import Tensor

from prfaas_worker.models.kimi_linear.cuda.launch import launch
from prfaas_worker.models.kimi_linear.cuda.step import Step

_BLOCK_TOKENS = 16
_BLOCK_CHANNELS = 128


def conv_chunks(x: Tensor, taps: Tensor, state: Tensor, step: Step) -> Tensor:
    """Convolve the tokens of a step's chunks, apply silu, and move the states on.

    Args:
        x: inputs [P, 3 C], rows may stand apart; q, k, v one after the other.
        taps: [3 C, taps], oldest first.
        state: [slots, 3 C, taps - 1], changed in place for the chunks' slots.
        step: says which tokens belong to which slot.

    Returns:
        [3, P, C], contiguous.

    """
    tokens, channels = x.shape
    out = x.new_empty(3, tokens, channels // 3)
    blocks = triton.cdiv(channels, _BLOCK_CHANNELS)
    sizes = {"CHANNELS": channels, "TAPS": taps.shape[1], "BLOCK_C": _BLOCK_CHANNELS}
    strides = (x.stride(0), state.stride(0))
    launch(
        _conv_kernel,
        (triton.cdiv(tokens, _BLOCK_TOKENS), blocks),
        x,
        taps,
        state,
        step.slots,
        step.offsets,
        out,
        tokens,
        *strides,
        BLOCK_T=_BLOCK_TOKENS,
        **sizes,
    )
    launch(
        _state_kernel,
        (len(step.chunks), blocks),
        x,
        state,
        step.chunk_slots,
        step.ends,
        *strides,
        WINDOW=triton.next_power_of_2(taps.shape[1]),
        **sizes,
    )
    return out


@triton.jit
def _conv_kernel(  # noqa: PLR0913, PLR0917, a kernel's arguments are its pointers and sizes
    x,
    taps,
    state,
    slots,
    offsets,
    out,
    tokens,
    x_stride,
    state_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    slot = tl.load(slots + t, mask=t < tokens, other=0)
    offset = tl.load(offsets + t, mask=t < tokens, other=0)
    inside = (t < tokens)[:, None] & (c < CHANNELS)[None, :]
    mixed = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for tap in tl.static_range(TAPS):  # pyright: ignore[reportGeneralTypeIssues]
        back = TAPS - 1 - tap
        here = (offset >= back)[:, None]
        fresh = tl.load(x + (t - back)[:, None] * x_stride + c[None, :], mask=inside & here, other=0.0)
        # Before the chunk's first token stand the slot's inputs, the newest last.
        old = slot[:, None] * state_stride + c[None, :] * (TAPS - 1) + (TAPS - 1 + offset - back)[:, None]
        kept = tl.load(state + old, mask=inside & (offset < back)[:, None], other=0.0)
        weight = tl.load(taps + c * TAPS + tap, mask=c < CHANNELS, other=0.0).to(tl.float32)
        mixed += weight[None, :] * (fresh.to(tl.float32) + kept.to(tl.float32))
    part: tl.constexpr = CHANNELS // 3
    at = (c // part)[None, :].to(tl.int64) * tokens * part + t[:, None] * part + (c % part)[None, :]
    tl.store(out + at, (mixed * tl.sigmoid(mixed)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _state_kernel(  # noqa: PLR0913, PLR0917
    x,
    state,
    slots,
    ends,
    x_stride,
    state_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    chunk = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    tap = tl.arange(0, WINDOW)
    begin = tl.load(ends + chunk)
    source = tl.load(ends + chunk + 1) - begin - (TAPS - 1) + tap
    inside = (c < CHANNELS)[:, None] & (tap < TAPS - 1)[None, :]
    place = state + tl.load(slots + chunk) * state_stride + c[:, None] * (TAPS - 1)
    fresh = tl.load(
        x + (begin + source)[None, :] * x_stride + c[:, None], mask=inside & (source >= 0)[None, :], other=0.0
    )
    kept = tl.load(place + (TAPS - 1 + source)[None, :], mask=inside & (source < 0)[None, :], other=0.0)
    # A thread must not overwrite what another has yet to read.
    tl.debug_barrier()
    tl.store(place + tap[None, :], tl.where((source >= 0)[None, :], fresh, kept), mask=inside)
