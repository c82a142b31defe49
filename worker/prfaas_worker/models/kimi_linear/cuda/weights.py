"""The tensors of each block as the kernels want them: joined where they are multiplied together, experts in one stack.

Everything is allocated on the device at its final size and filled tensor by tensor, so that neither the host nor the
device ever holds a second copy of the weights.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from prfaas_worker.models.kimi_linear.config import KimiLinearConfig
from prfaas_worker.models.kimi_linear.cuda.sources import Source
from prfaas_worker.models.kimi_linear.shapes import Shape, expected_shapes


class Loader:
    """Makes device tensors out of a source's tensors, seen from a prefix of their public names."""

    def __init__(
        self, source: Source, shapes: dict[str, Shape], place: tuple[torch.device, torch.dtype], prefix: str = ""
    ):
        self._source, self._shapes, self._place, self._prefix = source, shapes, place, prefix

    @classmethod
    def of(cls, source: Source, config: KimiLinearConfig, device: torch.device, dtype: torch.dtype) -> "Loader":
        """All tensors of a checkpoint with this config."""
        return cls(source, expected_shapes(config), (device, dtype))

    def under(self, name: str) -> "Loader":
        """The same tensors seen from a deeper prefix."""
        return Loader(self._source, self._shapes, self._place, f"{self._prefix}{name}.")

    def shape(self, name: str) -> Shape:
        """The public shape of a tensor."""
        return self._shapes[self._prefix + name]

    def one(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor, in its public shape."""
        return self.fill(name, self.empty(self.shape(name), dtype))

    def joined(self, *names: str) -> Tensor:
        """Tensors one after the other along their first axis."""
        lengths = [self.shape(name)[0] for name in names]
        out = self.empty((sum(lengths), *self.shape(names[0])[1:]))
        for name, part in zip(names, out.split(lengths), strict=True):
            self.fill(name, part)
        return out

    def empty(self, shape: Shape, dtype: torch.dtype | None = None) -> Tensor:
        """Room for weights."""
        device, usual = self._place
        return torch.empty(shape, device=device, dtype=dtype or usual)

    def fill(self, name: str, out: Tensor) -> Tensor:
        """Copy a tensor into `out`, which has its shape."""
        self._source.read(self._prefix + name, out)
        return out


class DeltaWeights(NamedTuple):
    """A KDA layer: D hidden, H heads of K (= V) channels."""

    inputs: Tensor
    """q, k, v, forget a, gate a, strength [3 H K + 2 K + H, D]."""
    taps: Tensor
    """[3 H K, taps], oldest first."""
    forget: Tensor
    """[H K, K]"""
    gate: Tensor
    """[H V, K]"""
    decay_log: Tensor
    """A_log, fp32 [H]."""
    decay_bias: Tensor
    """dt_bias, fp32 [H K]."""
    norm: Tensor
    """[V]"""
    norm_eps: float
    output: Tensor
    """[D, H V]"""

    @classmethod
    def load(cls, loader: Loader, config: KimiLinearConfig) -> "DeltaWeights":
        """Fill a layer's tensors, seen from `self_attn.`."""
        inputs = [f"{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "f_a_proj", "g_a_proj", "b_proj")]
        return cls(
            inputs=loader.joined(*inputs),
            taps=loader.joined(*(f"{name}_conv1d.weight" for name in "qkv")).squeeze(1),
            forget=loader.one("f_b_proj.weight"),
            gate=loader.one("g_b_proj.weight"),
            decay_log=loader.one("A_log", torch.float32).flatten(),
            decay_bias=loader.one("dt_bias", torch.float32),
            norm=loader.one("o_norm.weight"),
            norm_eps=config.rms_norm_eps,
            output=loader.one("o_proj.weight"),
        )


class LatentWeights(NamedTuple):
    """An MLA layer: H heads with keys of N + S, values of V, latents of L."""

    query: Tensor
    """[H (N + S), D]"""
    rows: Tensor
    """[L + S, D]"""
    norm: Tensor
    """[L]"""
    expand: Tensor
    """What each head makes of a latent, value before key: [H, V + N, L]."""
    output: Tensor
    """[D, H V]"""

    @classmethod
    def load(cls, loader: Loader, config: KimiLinearConfig) -> "LatentWeights":
        """Fill a layer's tensors, seen from `self_attn.`."""
        public = loader.one("kv_b_proj.weight").unflatten(0, (config.num_heads, config.nope_size + config.value_size))
        key, value = public.split([config.nope_size, config.value_size], dim=1)
        return cls(
            query=loader.one("q_proj.weight"),
            rows=loader.one("kv_a_proj_with_mqa.weight"),
            norm=loader.one("kv_a_layernorm.weight"),
            expand=torch.cat([value, key], dim=1),
            output=loader.one("o_proj.weight"),
        )


class MlpWeights(NamedTuple):
    """SwiGLU: gate before up [2 F, D], and down [D, F]."""

    gate_up: Tensor
    down: Tensor

    @classmethod
    def load(cls, loader: Loader) -> "MlpWeights":
        """Fill the tensors of an MLP."""
        return cls(loader.joined("gate_proj.weight", "up_proj.weight"), loader.one("down_proj.weight"))


class ExpertWeights(NamedTuple):
    """A mixture of E experts."""

    router: Tensor
    """[E, D]"""
    bias: Tensor
    """Correction of the scores by which experts are picked, fp32 [E]."""
    gate_up: Tensor
    """[E, 2 F, D]"""
    down: Tensor
    """[E, D, F]"""
    shared: MlpWeights

    @classmethod
    def load(cls, loader: Loader, config: KimiLinearConfig) -> "ExpertWeights":
        """Fill a mixture's tensors, seen from `block_sparse_moe.`."""
        count, size, hidden = config.num_experts, config.expert_size, config.hidden_size
        gate_up, down = loader.empty((count, 2 * size, hidden)), loader.empty((count, hidden, size))
        for expert in range(count):
            one = loader.under(f"experts.{expert}")
            one.fill("w1.weight", gate_up[expert, :size])
            one.fill("w3.weight", gate_up[expert, size:])
            one.fill("w2.weight", down[expert])
        return cls(
            router=loader.one("gate.weight"),
            bias=loader.one("gate.e_score_correction_bias", torch.float32),
            gate_up=gate_up,
            down=down,
            shared=MlpWeights.load(loader.under("shared_experts")),
        )
