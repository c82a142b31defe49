"""Computes a KDA layer: projections, a short convolution, the gated delta rule, and a gated norm of its outputs.

Work that tokens do by themselves (`project`, `output`) takes any number of them in one call. Where they meet,
`mix_chunk` takes sequences of equal length [B, T, ...], `mix_step` one token of each sequence [B, ...].
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the name that torch's own documentation gives it

from prfaas_worker.models.kimi_linear.checkpoint import Weights
from prfaas_worker.models.kimi_linear.config import KimiLinearConfig
from prfaas_worker.models.kimi_linear.delta_rule import DeltaRule
from prfaas_worker.models.kimi_linear.layers import least_norm, linear, norm_scale, unit_rms

_L2_NORM_EPS = 1e-6


class Projected(NamedTuple):
    """Results that each token contributes by itself."""

    qkv: Tensor  # channels of q, k and v before the convolution [..., 3 H K]
    log_decay: Tensor  # [..., H, K]
    strength: Tensor  # [..., H]
    gate: Tensor  # before the sigmoid [..., H V]

    def of(self, tokens: slice) -> "Projected":
        return Projected(*(part[tokens] for part in self))


class DeltaAttention:
    """A KDA layer over tokens that `unit_rms` has normed. Its state: conv [B, 3 H K, kernel - 1], recurrent [B, H, K,
    V]."""

    def __init__(self, config: KimiLinearConfig, weights: Weights, norm: Tensor, rule: DeltaRule):
        self._heads, self._head_size, self._taps = config.kda_heads, config.kda_head_size, config.conv_kernel
        self.rule = rule
        self._least = least_norm(config.rms_norm_eps, config.kda_head_size, weights.device)
        self._qk_least = torch.tensor(_L2_NORM_EPS**0.5, device=weights.device)
        self._qkv = weights.product(["q_proj", "k_proj", "v_proj"], columns=norm)
        self._gates = weights.joined(["f_a_proj", "g_a_proj", "b_proj"], columns=norm)
        self._widths = [config.kda_head_size, config.kda_head_size, config.kda_heads]
        # [kernel, 3 H K], oldest first.
        self._conv = weights.joined(["q_conv1d", "k_conv1d", "v_conv1d"]).squeeze(1).T.contiguous()
        self._decay_rate = -weights.raw("A_log").exp().view(config.kda_heads, 1)
        self._dt_bias = weights.raw("dt_bias")
        self._f_b, self._g_b = weights["f_b_proj"], weights["g_b_proj"]
        self._o_proj = weights.product(["o_proj"], columns=norm_scale(weights["o_norm"]).repeat(config.kda_heads))
        # Norms of q and k are divided out; q takes the scale of the scores too.
        self._qk_scale = torch.tensor([self._head_size**0.5, 1.0], device=weights.device).view(2, 1, 1)

    def prefill(self, x: Tensor) -> Tensor:
        """Sequences [B, T, D] without a past -> outputs [B, T, D]."""
        projected, batch = self.project(x), x.shape[0]
        conv = x.new_zeros(batch, self._conv.shape[1], self._taps - 1)
        recurrent = x.new_zeros(batch, self._heads, self._head_size, self._head_size)
        return self.output(self.mix_chunk(projected, conv, recurrent)[0], projected.gate)

    def project(self, x: Tensor) -> Projected:
        """Compute what each token [..., D] contributes by itself."""
        forget, gate, strength = torch.split_with_sizes(F.linear(x, self._gates), self._widths, dim=-1)
        forget = F.softplus(F.linear(forget, self._f_b, self._dt_bias)).unflatten(-1, (self._heads, self._head_size))
        return Projected(linear(x, self._qkv), forget * self._decay_rate, strength.sigmoid(), F.linear(gate, self._g_b))

    def mix_chunk(self, x: Projected, conv: Tensor, recurrent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Append T tokens to B sequences, x [B, T, ...]; return outputs by head [B, T, H, V], conv, recurrent."""
        padded = torch.cat([conv.transpose(1, 2), x.qkv], dim=1)
        qk, v = self._heads_of(_causal_conv(padded, self._conv))
        parts = (qk[..., 0, :, :], qk[..., 1, :, :], v, x.log_decay, x.strength)
        q, k, v, g, beta = (part.transpose(1, 2).flatten(0, 1) for part in parts)
        o, state = self.rule.chunked(q, k, v, g, beta, recurrent.flatten(0, 1))
        o = o.unflatten(0, (x.qkv.shape[0], self._heads)).transpose(1, 2)
        return o, padded[:, 1 - self._taps :].transpose(1, 2), state.view_as(recurrent)

    def mix_step(self, x: Projected, conv: Tensor, recurrent: Tensor) -> Tensor:
        """Append one token to each of B sequences, x [B, ...], and change their states in place. Returns outputs by
        head [B, H, V]. `recurrent` is contiguous except in its first axis if B is 1."""
        mixed = x.qkv * self._conv[-1]
        # Column by column: the taps are side by side in memory, where anything on whole rows is slow.
        columns = [*conv.unbind(-1), x.qkv]
        for column, following, taps in zip(columns, columns[1:], self._conv.unbind(0), strict=False):
            mixed.addcmul_(column, taps)
            column.copy_(following)
        qk, v = self._heads_of(mixed)
        q, k = qk.unbind(1)
        q, k, v, g, beta = (part.flatten(0, 1) for part in (q, k, v, x.log_decay, x.strength))
        o = self.rule.step(q, k, v, g, beta, recurrent.flatten(0, 1))
        return o.view(-1, self._heads, self._head_size)

    def output(self, o: Tensor, gate: Tensor) -> Tensor:
        """Norm and gate each head's output [..., H, V], then project to [..., D]."""
        return linear(unit_rms(o, self._least).flatten(-2) * gate.sigmoid(), self._o_proj)

    def _heads_of(self, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Convolved channels [..., 3 H K] -> normalised and scaled q and k together [..., 2, H, K], v [..., H, K]."""
        heads = F.silu(mixed).unflatten(-1, (3, self._heads, self._head_size))
        qk = heads[..., :2, :, :]
        norm = torch.hypot(torch.linalg.vector_norm(qk, dim=-1, keepdim=True), self._qk_least)
        return qk / (norm * self._qk_scale), heads[..., 2, :, :]


def _causal_conv(padded: Tensor, taps: Tensor) -> Tensor:
    """Depthwise convolution of [B, T + kernel - 1, C] with taps [kernel, C], oldest first: [B, T, C]. A sum over taps
    is several times quicker on a CPU than conv1d with as many groups as channels."""
    tokens = padded.shape[1] - taps.shape[0] + 1
    out = padded[:, :tokens] * taps[0]
    for i in range(1, taps.shape[0]):
        out.addcmul_(padded[:, i : i + tokens], taps[i])
    return out
