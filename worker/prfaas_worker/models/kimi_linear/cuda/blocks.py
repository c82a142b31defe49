"""The blocks of a layer over a step's tokens: projections and experts for all at once, attention by kind of work."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the name that torch's own documentation gives it

from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.models.base import Decodes
from prfaas_worker.models.kimi_linear.config import KimiLinearConfig
from prfaas_worker.models.kimi_linear.cuda.causal import EarlierRows, Expansion, attend_chunk
from prfaas_worker.models.kimi_linear.cuda.chunked import ChunkRule
from prfaas_worker.models.kimi_linear.cuda.conv import conv_chunks
from prfaas_worker.models.kimi_linear.cuda.delta import DeltaInputs, delta_step
from prfaas_worker.models.kimi_linear.cuda.grouped import grouped_linear
from prfaas_worker.models.kimi_linear.cuda.norms import gated_norm, silu_mul
from prfaas_worker.models.kimi_linear.cuda.paged import Queries, attend_pages, split_for
from prfaas_worker.models.kimi_linear.cuda.routing import Rule, combine, route
from prfaas_worker.models.kimi_linear.cuda.rows import write_rows
from prfaas_worker.models.kimi_linear.cuda.step import Step
from prfaas_worker.models.kimi_linear.cuda.weights import DeltaWeights, ExpertWeights, LatentWeights, MlpWeights

# Of a machine without a GPU, where kernels run one program at a time.
_NO_PROCESSORS = 4


class Place(NamedTuple):
    """A layer's part of the cache memory."""

    memory: CacheMemory
    layer: int


class DeltaAttention:
    """KDA. Tokens of chunks go through `rule`, decoding ones through one kernel."""

    def __init__(self, weights: DeltaWeights, config: KimiLinearConfig, rule: ChunkRule):
        self._weights, self._rule = weights, rule
        size = config.kda_head_size
        self._widths = [3 * config.kda_size, size, size, config.kda_heads]

    def __call__(self, x: Tensor, step: Step, place: Place) -> Tensor:
        """Normed tokens [N, D] -> [N, D]; states move on in their slots."""
        weights, states = self._weights, place.memory.states(place.layer)
        qkv, forget, gate, strength = F.linear(x, weights.inputs).split(self._widths, dim=-1)
        inputs = DeltaInputs(qkv, F.linear(forget, weights.forget), strength, F.linear(gate, weights.gate))
        mixed = x.new_empty(x.shape[0], weights.output.shape[1])
        cut = step.prefilled
        if step.chunks:
            self._chunks(inputs.rows(slice(cut)), step, states, mixed[:cut])
        if step.decodes is not None:
            delta_step(inputs.rows(slice(cut, None)), weights, states, step.decodes.slots, mixed[cut:])
        return F.linear(mixed, weights.output)

    def _chunks(self, inputs: DeltaInputs, step: Step, states: dict[str, Tensor], out: Tensor) -> None:
        weights, recurrent = self._weights, states["recurrent"]
        convolved = conv_chunks(inputs.qkv, weights.taps, states["conv"], step)
        o, after = self._rule(convolved, inputs, weights, recurrent[step.chunk_slots], step)
        recurrent[step.chunk_slots] = after
        gated_norm(o, inputs.gate, weights.norm, weights.norm_eps, out)


class LatentAttention:
    """MLA without positions. Rows are written first, so a token finds its own among the others."""

    def __init__(self, weights: LatentWeights, config: KimiLinearConfig):
        self._weights = weights
        self._heads, self._value = config.num_heads, config.value_size
        self._query_parts = [config.nope_size, config.shared_key_size]
        self._expand = Expansion(weights.expand, config.value_size, config.key_size)
        device = weights.expand.device
        is_gpu = device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else _NO_PROCESSORS

    def __call__(self, x: Tensor, step: Step, place: Place) -> Tensor:
        """Normed tokens [N, D] -> [N, D]; their rows stand in the pages afterwards."""
        weights, memory = self._weights, place.memory
        pages = memory.rows(place.layer)["latent"]
        rows = write_rows(F.linear(x, weights.rows), weights.norm, pages, memory.table, step)
        q = F.linear(x, weights.query).unflatten(-1, (self._heads, -1))
        mixed = q.new_empty(x.shape[0], self._heads, self._value)
        begin = 0
        for chunk in step.chunks:
            end = begin + chunk.tokens
            earlier = EarlierRows(pages, memory.table[chunk.slot], chunk.start)
            mixed[begin:end] = attend_chunk(q[begin:end], rows[begin:end], earlier, self._expand)
            begin = end
        if step.decodes is not None:
            latents = self._decode(q[begin:], pages, memory.table, step.decodes)
            mixed[begin:] = torch.bmm(latents, weights.expand[:, : self._value].mT).transpose(0, 1)
        return F.linear(mixed.flatten(1), weights.output)

    def _decode(self, q: Tensor, pages: Tensor, table: Tensor, decodes: Decodes) -> Tensor:
        """Queries [B, H, N + S] -> mixed latents [H, B, L]."""
        nope, shared = q.split(self._query_parts, dim=-1)
        absorbed = torch.bmm(nope.transpose(0, 1), self._weights.expand[:, self._value :])
        split = split_for(q.shape[0], self._processors)
        return attend_pages(Queries(absorbed, shared, self._expand.key**-0.5), pages, table, decodes, split)


class Mlp:
    """SwiGLU, added to the residual stream."""

    def __init__(self, weights: MlpWeights):
        self._weights = weights

    def __call__(self, x: Tensor, residual: Tensor) -> None:
        """Normed tokens [N, D]; residual fp32 [N, D], changed in place."""
        residual.add_(swiglu(x, self._weights))


class MixtureOfExperts:
    """Each token's best experts by sigmoid score and the shared experts, added to the residual stream."""

    def __init__(self, weights: ExpertWeights, config: KimiLinearConfig):
        self._weights = weights
        self._rule = Rule(weights.bias, config.experts_per_token, config.renormalise, config.routed_scale)

    def __call__(self, x: Tensor, residual: Tensor) -> None:
        """Normed tokens [N, D]; residual fp32 [N, D], changed in place."""
        weights = self._weights
        routing = route(x, linear_fp32(x, weights.router), self._rule)
        hidden = silu_mul(grouped_linear(routing.rows, weights.gate_up, routing.ends))
        outputs = grouped_linear(hidden, weights.down, routing.ends)
        combine(outputs, routing, swiglu(x, weights.shared), residual)


def swiglu(x: Tensor, weights: MlpWeights) -> Tensor:
    """down(silu(gate x) * up x)."""
    return F.linear(silu_mul(F.linear(x, weights.gate_up)), weights.down)


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, K] times weight [M, K], summed and returned in fp32: [N, M]. Products of bf16 are exact in fp32."""
    if x.dtype == torch.float32:
        return F.linear(x, weight)
    if x.is_cuda:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())
