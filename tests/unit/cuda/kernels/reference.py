"""What the kernels should compute, written token by token in fp64."""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the name that torch's own documentation gives it


def convolved(x: Tensor, taps: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """silu of the causal convolution of x [T, C] behind `before` [C, taps - 1]; and what the next token has before
    it."""
    window = torch.cat([before.T, x]).double()
    count = taps.shape[1]
    mixed = sum(window[i : i + x.shape[0]] * taps[:, i].double() for i in range(count))
    return F.silu(mixed), window[window.shape[0] - count + 1 :].T


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:  # noqa: N803
    """q, k, v, g [T, H, K], beta [T, H], S [H, K, V] -> outputs [T, H, V] and the last S; q and k are not normed
    yet."""
    q, k, v, g, beta, S = (x.double() for x in (q, k, v, g, beta, S))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    outputs = []
    for t in range(q.shape[0]):
        S = g[t].exp()[:, :, None] * S
        error = beta[t, :, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], S))
        S = S + torch.einsum("hk,hv->hkv", k[t], error)
        outputs.append(torch.einsum("hk,hkv->hv", q[t] * q.shape[-1] ** -0.5, S))
    return torch.stack(outputs), S


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Queries [T, H, W] of the last T tokens over keys [n, H, W], values [n, H, V], causally: [T, H, V]."""
    score = torch.einsum("thw,nhw->htn", q.double(), k.double()) * scale
    tokens, rows = q.shape[0], k.shape[0]
    hidden = torch.ones(tokens, rows, device=q.device).triu(rows - tokens + 1).bool()
    return torch.einsum("htn,nhv->thv", score.masked_fill(hidden, -torch.inf).softmax(-1), v.double())


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is right."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()
