"""Kimi Delta Attention: the gated delta rule with one decay per channel, in chunked and in recurrent form.

Per head, with state S [K, V]:  S <- diag(e^g) S;  S <- S + k (beta (v - k^T S))^T;  o = q^T S.

A chunk of C tokens is done at once. With G the running sum of g inside the chunk,
    L = strictly lower part of beta_i <k_i e^(G_i), k_j e^(-G_j)>,   [U | W] = (I + L)^-1 beta [v | k e^G],
    v' = U - W S,   o = (q e^G) S + lower(<q_i e^(G_i), k_j e^(-G_j)>) v',   S <- e^(G_C) S + (k e^(G_C - G))^T v'.

The hard part is e^(-G): with strong gates it overflows fp32 inside one chunk. So the pairwise terms are formed by
halves: for a query in the second half of a block and a key in the first, both decays are taken to the boundary between
them, and neither is above 1. That leaves blocks of 8 tokens, which are taken relative to their middle: 4 tokens on
either side of it cannot overflow once g >= -20. Gates stronger than that are set to it: e^-20 = 2e-9 of what was there
is less than fp32 can tell from nothing beside values of the same size. Everything is plain torch and differentiable;
S stays in fp32.
"""

import torch
from torch import Tensor

_CHUNK = 32
# The largest block that is one product: half of it times the strongest gate must stay below 87, where e^x overflows.
_LEAF = 8
_STRONGEST_GATE = -20.0
# The triangular inverse is formed from blocks of half a chunk.
_HALF = _CHUNK // 2
# Tokens whose pairwise terms are formed together: more hides the overhead of small operations, fewer stay in caches.
_SEGMENT = 1024


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
    g = g.clamp(min=_STRONGEST_GATE)
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
    qk, kk = _decayed_products(torch.stack([q, k], dim=2), k, g).unbind(2)
    inverse = _unit_lower_inverse(beta.unsqueeze(-1) * kk.tril(-1))

    from_start = _decay_from_start(g)
    written = beta.unsqueeze(-1) * torch.cat([v, k * from_start], dim=-1)
    u, w = (inverse @ written).split([v.shape[-1], k.shape[-1]], dim=-1)
    reads = torch.cat([w, q * from_start], dim=2)
    k_to_end = (k * _decay_to_end(g)).transpose(2, 3)
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


def _decayed_products(rows: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """<r_i, k_j> with the decay between j and i <= S, zero above the diagonal: see the module's "hard part".

    Args:
        rows: r [..., R, S, K], R kinds of rows (queries and keys) at the same S tokens.
        k: keys [..., S, K].
        g: log decays [..., S, K].

    Returns:
        Products [..., R, S, S].

    """
    kinds, size = rows.shape[-3:-1]
    if size == _LEAF:
        decay = g.cumsum(-2)
        decay = decay - decay[..., size // 2 - 1 : size // 2, :]
        products = (rows * decay.exp().unsqueeze(-3)).flatten(-3, -2) @ (k * (-decay).exp()).mT
        return products.unflatten(-2, (kinds, size)).tril()
    halves = (2, size // 2)
    rows, k, g = rows.unflatten(-2, halves).transpose(-4, -3), k.unflatten(-2, halves), g.unflatten(-2, halves)
    first, second = _decayed_products(rows, k, g).unbind(-4)
    late_rows = rows.select(-4, 1) * _decay_from_start(g.select(-3, 1)).unsqueeze(-3)
    early_keys = k.select(-3, 0) * _decay_to_end(g.select(-3, 0))
    below = (late_rows.flatten(-3, -2) @ early_keys.mT).unflatten(-2, (kinds, size // 2))
    return _block_lower(first, below, second)


def _decay_from_start(g: Tensor) -> Tensor:
    """Share of the state before a block [..., S, K] that is left after each of its tokens."""
    return g.cumsum(-2).exp()


def _decay_to_end(g: Tensor) -> Tensor:
    """Share of what each token of a block [..., S, K] wrote that is left at its end.

    Summed from the end: as a difference of sums from the start it would lose digits behind strong gates.
    """
    return (g.flip(-2).cumsum(-2).flip(-2) - g).exp()


def _block_lower(first: Tensor, below: Tensor, second: Tensor) -> Tensor:
    """[[first, 0], [below, second]] of square blocks [..., S, S]."""
    return torch.cat([torch.cat([first, torch.zeros_like(first)], -1), torch.cat([below, second], -1)], -2)


def _unit_lower_inverse(strictly_lower: Tensor) -> Tensor:
    """(I + L)^-1 for L [M, N, C, C], by its four blocks: far quicker here than a triangular solve."""
    blocks = torch.stack([strictly_lower[..., :_HALF, :_HALF], strictly_lower[..., _HALF:, _HALF:]])
    inverse: Tensor = _BlockInverse.apply(blocks)  # pyright: ignore[reportAssignmentType] (apply is untyped)
    first, second = inverse.unbind(0)
    return _block_lower(first, -second @ strictly_lower[..., _HALF:, :_HALF] @ first, second)


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
