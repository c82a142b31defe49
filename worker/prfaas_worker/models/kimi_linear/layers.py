"""Computes the parts of a Kimi Linear layer that treat each token by itself: norms, MLP and mixture of experts.

Norms exclude their weight: it is multiplied into the matrices that follow, once, when a block is made. Everything takes
any number of tokens [..., D], and gradients flow unless the caller turns them off.
"""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the name that torch's own documentation gives it

from prfaas_worker.models.kimi_linear.checkpoint import Weights
from prfaas_worker.models.kimi_linear.config import KimiLinearConfig

# Up to so many tokens times experts every token may go through every expert, which needs five operations in all ...
_DENSE_PAIRS = 256
# ... where that reads no weights that are not needed anyway, or so few that reading them costs less than choosing.
_DENSE_BYTES = 1 << 20


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., D] times weight [E, D] in the weight's type, summed in fp32 by the device. Keeps x's type."""
    return F.linear(x.to(weight.dtype), weight).to(x.dtype)


def unit_rms(x: Tensor, least: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + D eps): RMSNorm without its weight (`norm_scale`); `least` is sqrt(D eps) (`least_norm`)."""
    return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), least)


def least_norm(eps: float, size: int, device: torch.device) -> Tensor:
    """Convert the epsilon of a mean of `size` squares for `unit_rms`."""
    return torch.tensor((eps * size) ** 0.5, device=device)


def norm_scale(weight: Tensor) -> Tensor:
    """Scale a norm's weight [D] so that `unit_rms` times it is RMSNorm; for the columns of the next matrix."""
    return weight * weight.shape[0] ** 0.5


class Mlp:
    """SwiGLU over the last axis, of tokens that `unit_rms` has normed."""

    def __init__(self, weights: Weights, norm: Tensor):
        self._gate_up = weights.product(["gate_proj", "up_proj"], columns=norm)
        self._down = weights.product(["down_proj"])

    def __call__(self, x: Tensor) -> Tensor:
        return linear(_swiglu(linear(x, self._gate_up)), self._down)


def _swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, which are side by side in the last axis."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class MixtureOfExperts:
    """Each token's best experts by sigmoid score, plus the shared experts, of tokens that `unit_rms` has normed.

    The correction bias balances which experts are selected; the weights use the raw scores. Shared experts are behind
    the others in the same tensors: gate and up [experts, 2 size, D], down transposed [experts, size, D].
    """

    def __init__(self, config: KimiLinearConfig, weights: Weights, norm: Tensor):
        self._top, self._experts, self._shared = config.experts_per_token, config.num_experts, config.shared_experts
        self._size = config.expert_size
        self._renormalise, self._scale = config.renormalise, config.routed_scale
        self._gate, self._bias = weights["gate"] * norm, weights.raw("gate.e_score_correction_bias")
        experts = [f"experts.{e}." for e in range(config.num_experts)]
        self._gate_up = weights.experts(
            [(f"{e}w1", f"{e}w3") for e in experts], ("shared_experts.gate_proj", "shared_experts.up_proj"), norm
        )
        self._down = weights.experts_transposed([f"{e}w2" for e in experts], "shared_experts.down_proj", self._size)

    def __call__(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        picked, weights = self.route(tokens)
        few = tokens.shape[0] * self._experts <= _DENSE_PAIRS
        needs_all = tokens.shape[0] * self._top >= self._experts or self._gate_up.nbytes <= _DENSE_BYTES
        run = self._run_all if few and needs_all else self._run_picked
        return run(tokens, picked, weights).view_as(x)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [N, D] -> selected experts int64 [N, top] and their weights [N, top]."""
        scores = F.linear(tokens, self._gate).sigmoid()
        picked = (scores + self._bias).topk(self._top, dim=-1).indices
        weights = scores.gather(1, picked)
        if self._renormalise:
            return picked, weights * (self._scale / (weights.sum(-1, keepdim=True) + 1e-20))
        return picked, weights * self._scale

    def _run_all(self, tokens: Tensor, picked: Tensor, weights: Tensor) -> Tensor:
        """Run every expert for every token, with weight zero if it is not selected."""
        unpicked = weights.new_zeros(len(tokens), self._experts)
        shares = torch.cat([unpicked.scatter(1, picked, weights), weights.new_ones(len(tokens), self._shared)], dim=1)
        gate_up = linear(tokens, self._gate_up.flatten(0, 1))
        hidden = _swiglu(gate_up.unflatten(1, (-1, 2 * self._size))) * shares.unsqueeze(-1)
        return linear(hidden.flatten(1), self._down.flatten(0, 1).T)

    def _run_picked(self, tokens: Tensor, picked: Tensor, weights: Tensor) -> Tensor:
        """Run each expert for its tokens only, sorted so that it multiplies once."""
        order = picked.flatten().argsort(stable=True)
        counts = picked.flatten().bincount(minlength=self._experts).tolist()
        groups = tokens.index_select(0, order // self._top).split(counts)
        outputs = torch.cat([self._run_expert(e, group) for e, group in enumerate(groups) if group.shape[0]])
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        # Gathers each token's outputs and sums them with their weights, in one pass.
        routed = F.embedding_bag(place.view_as(picked), outputs, mode="sum", per_sample_weights=weights)
        for expert in range(self._experts, self._experts + self._shared):
            routed = routed + self._run_expert(expert, tokens)
        return routed

    def _run_expert(self, expert: int, tokens: Tensor) -> Tensor:
        return linear(_swiglu(linear(tokens, self._gate_up[expert])), self._down[expert].T)
