"""The gated delta rule over the chunks of a step: fla's kernels on a GPU, the plain form of `kda` elsewhere.

Both take the projections as they are; norms of q and k, gates and write strengths belong to the rule.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the name that torch's own documentation gives it

from prfaas.errors import ConfigError
from prfaas_worker.models.kimi_linear.cuda.delta import DeltaInputs
from prfaas_worker.models.kimi_linear.cuda.step import Step
from prfaas_worker.models.kimi_linear.cuda.weights import DeltaWeights
from prfaas_worker.models.kimi_linear.kda import kda_chunked

ChunkRule = Callable[[Tensor, DeltaInputs, DeltaWeights, Tensor, Step], tuple[Tensor, Tensor]]
"""(convolved q, k, v [3, P, H K]; the tokens' other projections; the layer's weights; S before each chunk, fp32
[C, H, K, V]; the step) -> (outputs [P, H, V], S after each chunk, fp32 [C, H, K, V])."""

_L2_NORM_EPS = 1e-6


def chunk_rule(device: torch.device) -> ChunkRule:
    """Choose the rule for a device.

    Raises:
        ConfigError: the device is a GPU and its kernels are not installed.

    """
    if device.type != "cuda":
        return _plain_rule
    try:
        from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports] (an extra)
    except ImportError as error:
        raise ConfigError(
            f"Kimi Linear on a GPU needs the kernels of fla-core, install prfaas[worker,cuda]: {error}"
        ) from error
    return _FlaRule(chunk_kda)


class _FlaRule:
    """fla's chunk kernels, all chunks of a step in one launch."""

    def __init__(self, chunk_kda: Callable[..., tuple[Tensor, Tensor]]):
        self._chunk_kda = chunk_kda

    def __call__(
        self, mixed: Tensor, inputs: DeltaInputs, weights: DeltaWeights, before: Tensor, step: Step
    ) -> tuple[Tensor, Tensor]:
        heads, size = before.shape[1:3]
        by_head = (1, -1, heads, size)
        q, k, v = (part.view(by_head) for part in mixed)
        o, after = self._chunk_kda(
            q,
            k,
            v,
            inputs.forget.reshape(by_head),
            inputs.strength.contiguous().unsqueeze(0),
            initial_state=before,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            cu_seqlens=step.ends,
            cu_seqlens_cpu=step.ends_host,
            A_log=weights.decay_log,
            dt_bias=weights.decay_bias,
        )
        return o[0], after


def _plain_rule(
    mixed: Tensor, inputs: DeltaInputs, weights: DeltaWeights, before: Tensor, step: Step
) -> tuple[Tensor, Tensor]:
    """The same in plain torch, chunk after chunk."""
    heads, size = before.shape[1:3]
    q, k, v = mixed.float().unflatten(-1, (heads, size)).transpose(1, 2)
    q, k = (x * (x.square().sum(-1, keepdim=True) + _L2_NORM_EPS).rsqrt() for x in (q, k))
    forget = F.softplus(inputs.forget.float() + weights.decay_bias).unflatten(-1, (heads, size)).transpose(0, 1)
    g = -weights.decay_log.exp()[:, None, None] * forget
    beta = inputs.strength.float().sigmoid().T
    outputs, after = [], []
    ends = step.ends_host.tolist()
    for i, (begin, end) in enumerate(pairwise(ends)):
        q_i, k_i, v_i, g_i, beta_i = (x[:, begin:end] for x in (q * size**-0.5, k, v, g, beta))
        o, state = kda_chunked(q_i, k_i, v_i, g_i, beta_i, before[i])
        outputs.append(o.transpose(0, 1))
        after.append(state)
    return torch.cat(outputs).to(mixed.dtype), torch.stack(after)
