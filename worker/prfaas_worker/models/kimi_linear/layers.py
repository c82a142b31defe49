"""The blocks of a Kimi Linear layer as functions of weights: KDA, MLA, MLP and mixture of experts.

A block is built from its tensors in the public layout (joining those that are multiplied together) and keeps nothing
else: state goes in and comes out, or is read from rows that the caller keeps. What tokens do by themselves
(projections, norms, feed-forward) takes any number of them in one call; where they meet, a chunk has one or more
sequences of equal length [B, T, ...], a step one token of each sequence [B, ...]. Gradients flow unless the caller
turns them off.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the name that torch's own documentation gives it

from prfaas_worker.models.kimi_linear.config import KimiLinearConfig
from prfaas_worker.models.kimi_linear.kda import kda_chunked, kda_step

# transformers and the authors' code use 1e-6 here, whatever rms_norm_eps says.
_LATENT_NORM_EPS = 1e-6
_L2_NORM_EPS = 1e-6
# Queries that attend together when rows precede them: bounds the mask to this many rows of floats.
_QUERY_BLOCK = 512


class Weights:
    """Tensors by public name, seen from one prefix: `weights["q_proj"]` is <prefix>q_proj.weight."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str = ""):
        self._tensors = tensors
        self._prefix = prefix

    def under(self, name: str) -> "Weights":
        """The same tensors seen from a deeper prefix."""
        return Weights(self._tensors, f"{self._prefix}{name}.")

    def raw(self, name: str) -> Tensor:
        """A tensor whose public name does not end in .weight."""
        return self._tensors[self._prefix + name]

    def __getitem__(self, name: str) -> Tensor:
        return self.raw(f"{name}.weight")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis."""
    return F.rms_norm(x, weight.shape, weight, eps)


class Projected(NamedTuple):
    """What a KDA layer makes of each token by itself: channels [..., 3 H K], and by head [..., H, K] or [..., H]."""

    qkv: Tensor
    log_decay: Tensor
    strength: Tensor
    gate: Tensor

    def of(self, tokens: slice) -> "Projected":
        """The part of these tokens, along the first axis."""
        return Projected(*(part[tokens] for part in self))


class DeltaAttention:
    """A KDA layer. Its state is (conv [B, 3 H K, kernel - 1], recurrent [B, H, K, V])."""

    def __init__(self, config: KimiLinearConfig, weights: Weights):
        self._heads, self._head_size = config.kda_heads, config.kda_head_size
        self._eps = config.rms_norm_eps
        self._input = torch.cat(
            [weights[f"{name}_proj"] for name in ("q", "k", "v")]
            + [weights[name] for name in ("f_a_proj", "g_a_proj", "b_proj")]
        )
        self._widths = [3 * config.kda_size, config.kda_head_size, config.kda_head_size, config.kda_heads]
        self._conv = torch.cat([weights[f"{name}_conv1d"] for name in ("q", "k", "v")]).squeeze(1)
        self._decay_rate = -weights.raw("A_log").exp().view(config.kda_heads, 1)
        self._dt_bias = weights.raw("dt_bias")
        self._f_b, self._g_b = weights["f_b_proj"], weights["g_b_proj"]
        self._o_norm, self._o_proj = weights["o_norm"], weights["o_proj"]

    def prefill(self, x: Tensor, conv: Tensor, recurrent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Append T tokens x [B, T, D]; returns outputs [B, T, D], conv, recurrent."""
        projected = self.project(x)
        o, conv, recurrent = self.mix_chunk(projected, conv, recurrent)
        return self.output(o, projected.gate), conv, recurrent

    def project(self, x: Tensor) -> Projected:
        """Everything that each token [..., D] contributes by itself."""
        qkv, forget, gate, strength = F.linear(x, self._input).split(self._widths, dim=-1)
        forget = F.softplus(F.linear(forget, self._f_b) + self._dt_bias)
        log_decay = self._decay_rate * forget.unflatten(-1, (self._heads, self._head_size))
        output_gate = F.linear(gate, self._g_b).unflatten(-1, (self._heads, self._head_size))
        return Projected(qkv, log_decay, strength.sigmoid(), output_gate)

    def mix_chunk(self, x: Projected, conv: Tensor, recurrent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Append T tokens to B sequences, x [B, T, ...]; returns outputs by head [B, T, H, V], conv, recurrent."""
        batch = x.qkv.shape[0]
        padded = torch.cat([conv.transpose(1, 2), x.qkv], dim=1)
        mixed = _causal_conv(padded, self._conv)
        parts = (*self._heads_of(mixed), x.log_decay, x.strength)
        q, k, v, g, beta = (part.transpose(1, 2).flatten(0, 1) for part in parts)
        o, state = kda_chunked(q, k, v, g, beta, recurrent.flatten(0, 1))
        o = o.unflatten(0, (batch, self._heads)).transpose(1, 2)
        return o, padded[:, -conv.shape[2] :].transpose(1, 2), state.view_as(recurrent)

    def mix_step(self, x: Projected, conv: Tensor, recurrent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Append one token to each of B sequences, x [B, ...]; returns outputs by head [B, H, V], conv, recurrent."""
        window = torch.cat([conv, x.qkv.unsqueeze(-1)], dim=-1)
        mixed = (window * self._conv).sum(-1)
        parts = (*self._heads_of(mixed), x.log_decay, x.strength)
        q, k, v, g, beta = (part.flatten(0, 1) for part in parts)
        o, state = kda_step(q, k, v, g, beta, recurrent.flatten(0, 1))
        return o.unflatten(0, (-1, self._heads)), window[..., 1:], state.view_as(recurrent)

    def output(self, o: Tensor, gate: Tensor) -> Tensor:
        """Norm and gate of each head's output [..., H, V], then the projection to [..., D]."""
        return F.linear((rms_norm(o, self._o_norm, self._eps) * gate.sigmoid()).flatten(-2), self._o_proj)

    def _heads_of(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convolved channels [..., 3 H K] -> normalised and scaled q, normalised k, v, each [..., H, K]."""
        q, k, v = F.silu(mixed).unflatten(-1, (3, self._heads, self._head_size)).unbind(-3)
        q = q * (self._head_size**-0.5 * (q.square().sum(-1, keepdim=True) + _L2_NORM_EPS).rsqrt())
        k = k * (k.square().sum(-1, keepdim=True) + _L2_NORM_EPS).rsqrt()
        return q, k, v


def _causal_conv(padded: Tensor, taps: Tensor) -> Tensor:
    """Depthwise convolution of [B, T + kernel - 1, C] with taps [C, kernel], oldest first: [B, T, C].

    As a sum over taps: several times quicker on a CPU than conv1d with as many groups as channels.
    """
    tokens = padded.shape[1] - taps.shape[1] + 1
    out = padded[:, :tokens] * taps[:, 0]
    for i in range(1, taps.shape[1]):
        out = torch.addcmul(out, padded[:, i : i + tokens], taps[:, i])
    return out


class LatentAttention:
    """An MLA layer without positions. Its cache row is the normed latent followed by the key part that heads share."""

    def __init__(self, config: KimiLinearConfig, weights: Weights):
        self._heads = config.num_heads
        self._latent, self._shared = config.latent_size, config.shared_key_size
        self._nope, self._value = config.nope_size, config.value_size
        self._scale = config.key_size**-0.5
        self._q_proj, self._kv_a, self._o_proj = weights["q_proj"], weights["kv_a_proj_with_mqa"], weights["o_proj"]
        self._latent_norm = weights["kv_a_layernorm"]
        # [H, nope + value, latent]: what each head makes of a latent.
        self._kv_b = weights["kv_b_proj"].unflatten(0, (self._heads, self._nope + self._value))

    def rows(self, x: Tensor) -> Tensor:
        """Cache rows [..., latent + shared] of tokens [..., D]."""
        latent, shared = F.linear(x, self._kv_a).split([self._latent, self._shared], dim=-1)
        return torch.cat([rms_norm(latent, self._latent_norm, _LATENT_NORM_EPS), shared], dim=-1)

    def queries(self, x: Tensor) -> Tensor:
        """Queries [..., H, key] of tokens [..., D]."""
        return F.linear(x, self._q_proj).unflatten(-1, (self._heads, self._nope + self._shared))

    def prefill(self, x: Tensor, rows: Tensor) -> Tensor:
        """Let tokens x [B, T, D] attend to rows [B, N, latent + shared], the last T of which are their own."""
        return self.output(self.attend_chunk(self.queries(x), rows))

    def attend_chunk(self, q: Tensor, rows: Tensor) -> Tensor:
        """Queries [B, T, H, key] attend to rows [B, N, latent + shared], the last T of which are their own.

        Returns values by head [B, T, H, value].
        """
        q = q.transpose(1, 2)
        k, v = self._keys_and_values(rows)
        start = rows.shape[1] - q.shape[2]
        if start == 0:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale)
        else:
            o = torch.cat([self._attend_after(block, k, v, start + i) for i, block in _query_blocks(q)], dim=2)
        return o[..., : self._value].transpose(1, 2)

    def attend_step(self, q: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
        """One query a sequence [B, H, key] attends to the first counts[b] of its rows [B, N, latent + shared].

        kv_b_proj is absorbed into the query and the output, so the rows are used as they are. Returns values by head
        [B, H, value].
        """
        nope, shared = q.split([self._nope, self._shared], dim=-1)
        k_part, v_part = self._kv_b.split([self._nope, self._value], dim=1)
        absorbed = torch.cat([torch.einsum("bhn,hnl->bhl", nope, k_part), shared], dim=-1) * self._scale
        scores = torch.bmm(absorbed, rows.transpose(1, 2))
        beyond = torch.arange(rows.shape[1], device=rows.device) >= counts.unsqueeze(1)
        shares = scores.masked_fill_(beyond.unsqueeze(1), -torch.inf).softmax(-1)
        mixed = torch.bmm(shares, rows[..., : self._latent])
        return torch.einsum("bhl,hvl->bhv", mixed, v_part)

    def output(self, o: Tensor) -> Tensor:
        """Project values by head [..., H, value] to [..., D]."""
        return F.linear(o.flatten(-2), self._o_proj)

    def _keys_and_values(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [B, N, latent + shared] -> keys and values [B, H, N, key]; values end in zeros.

        With one width for both, scaled_dot_product_attention takes its flash path, several times quicker on a CPU.
        """
        latent, shared = rows.split([self._latent, self._shared], dim=-1)
        expanded = F.linear(latent, self._kv_b.flatten(0, 1)).unflatten(-1, (self._heads, -1)).transpose(1, 2)
        k_nope, v = expanded.split([self._nope, self._value], dim=-1)
        k = torch.cat([k_nope, shared.unsqueeze(1).expand(-1, self._heads, -1, -1)], dim=-1)
        return k, F.pad(v, (0, max(0, k.shape[-1] - self._value)))

    def _attend_after(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        """Queries [B, H, T, key] of the tokens from `start` on attend to all keys up to their own."""
        end = start + q.shape[2]
        # Floats, because a boolean mask would be turned into them; only the square of the block's own tokens hides any.
        mask = q.new_zeros(q.shape[2], end)
        mask[:, start:] = q.new_full((q.shape[2], q.shape[2]), -torch.inf).triu(1)
        return F.scaled_dot_product_attention(q, k[:, :, :end], v[:, :, :end], attn_mask=mask, scale=self._scale)


def _query_blocks(q: Tensor) -> list[tuple[int, Tensor]]:
    """Queries [B, H, T, key] cut along T, each block with the index of its first."""
    return [(i, q[:, :, i : i + _QUERY_BLOCK]) for i in range(0, q.shape[2], _QUERY_BLOCK)]


class Mlp:
    """SwiGLU over the last axis."""

    def __init__(self, weights: Weights):
        self._gate_up = torch.cat([weights["gate_proj"], weights["up_proj"]])
        self._down = weights["down_proj"]

    def __call__(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return swiglu(x, self._gate_up, self._down)


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """down(silu(gate x) * up x), with gate and up joined along their outputs."""
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


class MixtureOfExperts:
    """Each token's best experts by sigmoid score, plus the shared experts.

    The correction bias balances which experts are picked; the weights come from the raw scores.
    """

    def __init__(self, config: KimiLinearConfig, weights: Weights):
        self._top = config.experts_per_token
        self._renormalise, self._scale = config.renormalise, config.routed_scale
        self._gate, self._bias = weights["gate"], weights.raw("gate.e_score_correction_bias")
        experts = [weights.under(f"experts.{e}") for e in range(config.num_experts)]
        self._gate_up = [torch.cat([expert["w1"], expert["w3"]]) for expert in experts]
        self._down = [expert["w2"] for expert in experts]
        self._shared = Mlp(weights.under("shared_experts"))

    def __call__(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        tokens = x.flatten(0, -2)
        picked, weights = self.route(tokens)
        routed = torch.einsum("nkd,nk->nd", self._run_experts(tokens, picked), weights)
        return routed.view_as(x) + self._shared(x)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [N, D] -> picked experts int64 [N, top] and their weights [N, top]."""
        scores = F.linear(tokens, self._gate).sigmoid()
        picked = (scores + self._bias).topk(self._top, dim=-1).indices
        weights = scores.gather(1, picked)
        if self._renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return picked, weights * self._scale

    def _run_experts(self, tokens: Tensor, picked: Tensor) -> Tensor:
        """Outputs [N, top, D] of each token's experts; tokens are sorted by expert, so each expert multiplies once."""
        order = picked.flatten().argsort(stable=True)
        counts = picked.flatten().bincount(minlength=len(self._down)).tolist()
        groups = tokens[order // self._top].split(counts)
        outputs = [swiglu(group, self._gate_up[e], self._down[e]) for e, group in enumerate(groups) if group.shape[0]]
        return torch.cat(outputs)[order.argsort()].view(*picked.shape, -1)
