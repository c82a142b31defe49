"""transformers' delta rule in plain torch, and inputs in both layouts."""

import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the name that torch's own documentation gives it

HEADS, SIZE = 8, 64


def _imported() -> Callable[..., tuple[Tensor, Tensor]]:
    # With these packages installed, transformers takes their GPU kernels even where there is no GPU.
    sys.modules["fla"] = sys.modules["causal_conv1d"] = None  # type: ignore[assignment]
    from transformers.models.kimi_linear import modeling_kimi_linear

    return modeling_kimi_linear.chunk_kimi_delta_attention


def inputs(tokens: int, gate_scale: float) -> tuple[list[Tensor], list[Tensor]]:
    """Return the rule's arguments as a layer of ours makes them, and as transformers takes them."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(tokens, HEADS, SIZE) for _ in range(3))
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    g = -gate_scale * F.softplus(torch.randn(tokens, HEADS, SIZE))
    beta, state = torch.rand(tokens, HEADS), torch.zeros(HEADS, SIZE, SIZE)
    ours = [x.transpose(0, 1) for x in (q * SIZE**-0.5, k, v, g, beta)]
    return [*ours, state], [x.unsqueeze(0) for x in (q, k, v, g, beta)]


_RULE = _imported()


def transformers_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Run the rival, which scales queries itself."""
    return _RULE(q, k, v, g, beta, output_final_state=True)
