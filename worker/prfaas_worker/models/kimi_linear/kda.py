"""Kimi Delta Attention: the gated delta rule with one decay per channel, in chunked and in recurrent form.

Per head, with state S [K, V]:  S <- diag(e^g) S;  S <- S + k (beta (v - k^T S))^T;  o = q^T S.

A chunk of C tokens is done at once. With G the running sum of g inside the chunk,
    L = strictly lower part of beta_i <k_i e^(G_i), k_j e^(-G_j)>,   [U | W] = (I + L)^-1 beta [v | k e^G],
    v' = U - W S,   o = (q e^G) S + lower(<q_i e^(G_i), k_j e^(-G_j)>) v',   S <- e^(G_C) S + (k e^(G_C - G))^T v'.

The hard part is e^(-G): with strong gates it overflows fp32 inside one chunk. Decays are therefore taken relative to
the start of a sub-block of 16 tokens, and where even that could overflow, the differences G_i - G_j (never positive
where they count) are formed before the exponential. Everything is plain torch and differentiable; S stays in fp32.
"""

import torch
from torch import Tensor

_CHUNK = 32
_SUB = 16
# Tokens whose pairwise terms are formed together: more hides the overhead of small operations, fewer stay in caches.
_SEGMENT = 1024
# e^84 is the largest factor that keeps products of ordinary keys below fp32's 3.4e38, and e^-84 above its subnormals.
_MAX_DECAY = 84.0


def kda_chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run the rule over T tokens.

    Args:
        q: queries [M, T, K], normalised and scaled; M counts heads of all sequences.
        k: keys [M, T, K], normalised.
        v: values [M, T, V].
        g: log decays [M, T, K], none positive.
        beta: write strengths [M, T].
        state: S before the first token [M, K, V].

    Returns:
        Outputs [M, T, V] and S after the last token [M, K, V].

    """
    outputs = []
    for start in range(0, q.shape[1], _SEGMENT):
        segment = [x[:, start : start + _SEGMENT] for x in (q, k, v, g, beta)]
        o, state = _segment(segment, state)
        outputs.append(o)
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), state


def kda_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run the rule for one token: `kda_chunked` without the axis T. Returns outputs [M, V] and the new S [M, K, V]."""
    decayed = state * g.exp().unsqueeze(-1)
    error = v - torch.bmm(k.unsqueeze(1), decayed).squeeze(1)
    state = torch.baddbmm(decayed, k.unsqueeze(2), (beta.unsqueeze(-1) * error).unsqueeze(1))
    return torch.bmm(q.unsqueeze(1), state).squeeze(1), state


def _segment(segment: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """`kda_chunked` for one segment: pairwise terms of all chunks together, then the states chunk by chunk."""
    tokens = segment[0].shape[1]
    q, k, v, g, beta = (_to_chunks(x) for x in segment)
    decay = g.cumsum(dim=2)
    qk, kk = _pairwise(q, k, g)
    inverse = _unit_lower_inverse(beta.unsqueeze(-1) * kk)

    from_start = decay.exp()
    to_end = (decay[:, :, -1:] - decay).exp()
    written = beta.unsqueeze(-1) * torch.cat([v, k * from_start], dim=-1)
    u, w = (inverse @ written).split([v.shape[-1], k.shape[-1]], dim=-1)
    reads = torch.cat([w, q * from_start], dim=2)
    k_to_end = (k * to_end).transpose(2, 3)
    chunk_decay = from_start[:, :, -1].unsqueeze(-1)

    new_values, inherited = [], []
    for u_n, reads_n, decay_n, k_n in zip(*(x.unbind(1) for x in (u, reads, chunk_decay, k_to_end)), strict=True):
        seen, carried = torch.bmm(reads_n, state).split(_CHUNK, dim=1)
        new = u_n - seen
        state = torch.baddbmm(state * decay_n, k_n, new)
        new_values.append(new)
        inherited.append(carried)
    o = torch.stack(inherited, dim=1) + qk @ torch.stack(new_values, dim=1)
    return o.flatten(1, 2)[:, :tokens], state


def _to_chunks(x: Tensor) -> Tensor:
    """[M, T, ...] -> [M, N, C, ...]. The padding of zeros neither decays (g) nor writes (beta)."""
    missing = -x.shape[1] % _CHUNK
    if missing:
        x = torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], dim=1)
    return x.reshape(x.shape[0], -1, _CHUNK, *x.shape[2:])


def _pairwise(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Decayed products inside each chunk, two [M, N, C, C]: q with k (lower part), k with k (strictly lower part)."""
    q, k, g = (x.unflatten(2, (_CHUNK // _SUB, _SUB)) for x in (q, k, g))
    decay = g.cumsum(dim=3)
    from_start = decay.exp()
    rows = torch.cat([q * from_start, k * from_start], dim=3)
    if decay.detach()[..., -1, :].amin() > -_MAX_DECAY:
        diagonal = rows @ (k * (-decay).exp()).transpose(3, 4)
    else:
        diagonal = torch.cat([_exact_products(q, k, decay), _exact_products(k, k, decay)], dim=3)
    to_end = (decay[:, :, 0, -1:] - decay[:, :, 0]).exp()
    below = rows[:, :, 1] @ (k[:, :, 0] * to_end).transpose(2, 3)
    qk_diagonal, kk_diagonal = diagonal.split(_SUB, dim=3)
    qk_below, kk_below = below.split(_SUB, dim=2)
    return _assemble(qk_diagonal.tril(), qk_below), _assemble(kk_diagonal.tril(-1), kk_below)


def _exact_products(a: Tensor, b: Tensor, decay: Tensor) -> Tensor:
    """<a_i e^(G_i), b_j e^(-G_j)> for i >= j without ever forming e^(-G): [..., S, K] -> [..., S, S]. Slow."""
    lower = torch.ones(_SUB, _SUB, dtype=torch.bool, device=a.device).tril().unsqueeze(-1)
    difference = decay.unsqueeze(-2) - decay.unsqueeze(-3)
    factor = difference.masked_fill(~lower, -torch.inf).exp()
    return torch.einsum("...ik,...jk,...ijk->...ij", a, b, factor)


def _assemble(diagonal: Tensor, below: Tensor) -> Tensor:
    """Block lower matrix [M, N, C, C] of its diagonal blocks [M, N, 2, S, S] and the one below them [M, N, S, S]."""
    top = torch.cat([diagonal[:, :, 0], torch.zeros_like(below)], dim=-1)
    return torch.cat([top, torch.cat([below, diagonal[:, :, 1]], dim=-1)], dim=-2)


def _unit_lower_inverse(strictly_lower: Tensor) -> Tensor:
    """(I + L)^-1 for L [M, N, C, C], by its 16 x 16 blocks: far quicker here than a triangular solve."""
    first, second = strictly_lower[..., :_SUB, :_SUB], strictly_lower[..., _SUB:, _SUB:]
    diagonal: Tensor = _BlockInverse.apply(torch.stack([first, second], dim=2))  # pyright: ignore[reportAssignmentType]
    below = -diagonal[:, :, 1] @ strictly_lower[..., _SUB:, :_SUB] @ diagonal[:, :, 0]
    return _assemble(diagonal, below)


class _BlockInverse(torch.autograd.Function):
    """(I + L)^-1 of small strictly lower L [..., S, S] by forward substitution, which is exact whatever L holds."""

    @staticmethod
    def forward(ctx, strictly_lower: Tensor) -> Tensor:
        size = strictly_lower.shape[-1]
        # The batch is moved last, so that each of the S steps works on long contiguous rows.
        rows = (-strictly_lower).flatten(0, -3).permute(1, 2, 0).contiguous()
        for i in range(1, size):
            rows[i, :i] += (rows[i, :i].unsqueeze(1) * rows[:i, :i]).sum(0)
        inverse = rows.permute(2, 0, 1).reshape(strictly_lower.shape)
        inverse = inverse + torch.eye(size, dtype=inverse.dtype, device=inverse.device)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grads[0] @ transposed).tril(-1)
