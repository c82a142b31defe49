"""One token of KDA for every decoding sequence: a kernel that does all of a head's work between the projections.

The bound is S, fp32 [K, V] a head: it is read once and written once, in place, in the slot of its sequence. Everything
else of the head (convolution with its state, norms, gates, output norm) is small, and is done while S is on its way.
One program does a head, its S in blocks of columns: sums over K stay inside a block, and only the output's norm needs
all.
"""

import triton
import triton.language as tl
from torch import Tensor

from prfaas_worker.models.kimi_linear.cuda.launch import launch
from prfaas_worker.models.kimi_linear.cuda.weights import DeltaWeights

_L2_NORM_EPS = 1e-6
# Columns of S that a program holds at once. With 8 warps 16 registers a thread, and as many for the next block: two
# programs fit a processor of Hopper, and 64 KB of S are on their way to it.
_BLOCK = 32
_WARPS = 8


class DeltaInputs:
    """The projections of B decoding tokens, rows may stand apart.

    Attributes:
        qkv: q, k, v before the convolution [B, 3 H K].
        forget: before the bias and softplus [B, H K].
        strength: before the sigmoid [B, H].
        gate: before the sigmoid [B, H V].

    """

    def __init__(self, qkv: Tensor, forget: Tensor, strength: Tensor, gate: Tensor):
        self.qkv, self.forget, self.strength, self.gate = qkv, forget, strength, gate

    def rows(self, span: slice) -> "DeltaInputs":
        """Some of the tokens."""
        return DeltaInputs(self.qkv[span], self.forget[span], self.strength[span], self.gate[span])


def delta_step(
    inputs: DeltaInputs, weights: DeltaWeights, states: dict[str, Tensor], slots: Tensor, out: Tensor
) -> None:
    """Append one token to each of B sequences.

    Args:
        inputs: the tokens' projections.
        weights: of the layer.
        states: "conv" [slots, 3 H K, taps - 1] and "recurrent" fp32 [slots, H, K, V], both changed in place.
        slots: int64 [B]; where it is PADDING no state is touched and the output is 0.
        out: normed and gated outputs [B, H V], contiguous.

    """
    conv, recurrent = states["conv"], states["recurrent"]
    heads, size = recurrent.shape[1:3]
    parts = (inputs.qkv, inputs.forget, inputs.strength, inputs.gate)
    launch(
        _delta_step_kernel,
        (heads, slots.shape[0]),
        *parts,
        weights.taps,
        weights.decay_log,
        weights.decay_bias,
        weights.norm,
        conv,
        recurrent,
        slots,
        out,
        *(part.stride(0) for part in parts),
        conv.stride(0),
        recurrent.stride(0),
        size**-0.5,
        _L2_NORM_EPS,
        weights.norm_eps,
        HEADS=heads,
        SIZE=size,
        TAPS=weights.taps.shape[1],
        WINDOW=triton.next_power_of_2(weights.taps.shape[1]),
        BLOCK=min(_BLOCK, size),
        num_warps=_WARPS,
    )


@triton.jit
def _delta_step_kernel(  # noqa: PLR0913, PLR0917, a kernel's arguments are its pointers and sizes
    qkv,
    forget,
    strength,
    gate,
    taps,
    decay_log,
    decay_bias,
    norm,
    conv,
    recurrent,
    slots,
    out,
    qkv_stride,
    forget_stride,
    strength_stride,
    gate_stride,
    conv_stride,
    recurrent_stride,
    scale,
    l2_eps,
    norm_eps,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    channel = tl.arange(0, SIZE)
    own = head * SIZE + channel
    if slot < 0:
        tl.store(out + row * HEADS * SIZE + own, tl.zeros((SIZE,), out.dtype.element_ty))
        return
    # Columns of S do not meet, so they are taken in blocks; the next one is on its way while one is worked on.
    value, block = tl.arange(0, BLOCK), tl.arange(0, SIZE // BLOCK)
    place = recurrent + slot * recurrent_stride + head * SIZE * SIZE + channel[:, None] * SIZE + value[None, :]
    following = tl.load(place)

    x, before = qkv + row * qkv_stride, conv + slot * conv_stride
    q = _conv_step(x, taps, before, own, TAPS, WINDOW)
    k = _conv_step(x, taps, before, HEADS * SIZE + own, TAPS, WINDOW)
    q *= scale * tl.rsqrt(tl.sum(q * q, 0) + l2_eps)
    k *= tl.rsqrt(tl.sum(k * k, 0) + l2_eps)
    f = tl.load(forget + row * forget_stride + own).to(tl.float32) + tl.load(decay_bias + own)
    softplus = tl.maximum(f, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(f)))
    decay = tl.exp(-tl.exp(tl.load(decay_log + head)) * softplus)
    beta = tl.sigmoid(tl.load(strength + row * strength_stride + head).to(tl.float32))

    o = tl.zeros((SIZE // BLOCK, BLOCK), tl.float32)
    for i in tl.static_range(SIZE // BLOCK):  # pyright: ignore[reportGeneralTypeIssues]
        S = following * decay[:, None]
        if i + 1 < SIZE // BLOCK:
            following = tl.load(place + (i + 1) * BLOCK)
        v = _conv_step(x, taps, before, (2 * HEADS + head) * SIZE + i * BLOCK + value, TAPS, WINDOW)
        S += k[:, None] * (beta * (v - tl.sum(S * k[:, None], 0)))[None, :]
        tl.store(place + i * BLOCK, S)
        given = tl.sum(S * q[:, None], 0)
        o = tl.where((block == i)[:, None], given[None, :], o)  # pyright: ignore[reportArgumentType]

    at = block[:, None] * BLOCK + value[None, :]
    o *= tl.rsqrt(tl.sum(o * o) / SIZE + norm_eps) * tl.load(norm + at).to(tl.float32)
    o *= tl.sigmoid(tl.load(gate + row * gate_stride + head * SIZE + at).to(tl.float32))
    tl.store(out + (row * HEADS + head) * SIZE + at, o.to(out.dtype.element_ty))


@triton.jit
def _conv_step(x, taps, state, channels, TAPS: tl.constexpr, WINDOW: tl.constexpr):
    """silu of the convolution at one token; the state of these channels moves on by it."""
    tap = tl.arange(0, WINDOW)
    at = channels[:, None] * (TAPS - 1) + tap[None, :]
    kept = tl.load(state + at, mask=(tap < TAPS - 1)[None, :], other=0.0)
    window = tl.where((tap == TAPS - 1)[None, :], tl.load(x + channels)[:, None], kept)
    weight = tl.load(taps + channels[:, None] * TAPS + tap[None, :], mask=(tap < TAPS)[None, :], other=0.0)
    mixed = tl.sum(window.to(tl.float32) * weight.to(tl.float32), 1)
    # A thread must not overwrite what another has yet to read.
    tl.debug_barrier()
    tl.store(state + at - 1, window, mask=((tap >= 1) & (tap < TAPS))[None, :])
    return mixed * tl.sigmoid(mixed)
