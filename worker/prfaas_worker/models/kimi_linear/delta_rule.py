"""Computes the gated delta rule of Kimi Delta Attention, with one decay per channel: chunked, and token by token.

Per head, with state S [K, V]:  S <- diag(e^g) S;  S <- S + k (beta (v - k^T S))^T;  o = q^T S.

A chunk of C tokens is done at once. Let D_i be the sum of g from the chunk's middle to token i (counted back, and so
positive, before it), G_mid and G_end the sums from its start to its middle and from there to its end, k' = k e^(-D):
    L = strictly lower part of beta_i <k_i e^(D_i), k'_j>,   T = (I + L)^-1 diag(beta),   S~ = e^(G_mid) S,
    v' = T v - T (k e^D) S~,   o = (q e^D) S~ + lower(<q_i e^(D_i), k'_j>) v',   S <- e^(G_end) (S~ + k'^T v').
As every decay is taken from the middle, for the state too, only three scaled copies of q and k are made. A step from
chunk to chunk is three small products.

The hard part is e^(-D): with strong gates it overflows fp32. So the size of the chunks follows the gates: the largest
of which no half decays by more than e^-40. Gates below -20 are set to it first. e^-20 = 2e-9 of what was there is less
than fp32 can resolve beside values of the same size. Chunks of 4 tokens then always do. (To form pairs of a large chunk
by halves instead, each decay taken to the boundary between them, is slower. Many small tensors cost more than more
steps do.) Everything is plain torch and differentiable; S stays in fp32.

Plain torch runs on every device. On an NVIDIA GPU `choose_rule` takes fla-core's Triton kernels, where they are
installed and products are bf16. That path was checked against fla 0.6.0's signatures and a stand-in, not on a GPU.
"""

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from prfaas.errors import install_extra

log = logging.getLogger(__name__)

# Sizes of a chunk, each half of the one before.
_LARGEST_CHUNK, _SMALLEST_CHUNK = 32, 4
# The most that half a chunk may decay. Twice this must stay below 87, where e^x overflows; the error grows with it.
_HALF_CHUNK_DECAY = 40.0
_STRONGEST_GATE = -20.0
# Blocks of the triangular inverse that are substituted row by row; larger ones are put together from these.
_SUBSTITUTED = 8
# Tokens whose pairwise terms are formed together: more hides the overhead of small operations, fewer stay in caches.
_SEGMENT = 1024


class DeltaRule(NamedTuple):
    """One implementation of the rule: functions like `kda_chunked` and `kda_step`."""

    chunked: Callable[..., tuple[Tensor, Tensor]]
    step: Callable[..., Tensor]


class _Terms(NamedTuple):
    """The terms that the walk from chunk to chunk needs, for N chunks of C tokens."""

    values: Tensor  # T v [N, M, C, V]
    erased: Tensor  # T (k e^D) [N, M, C, K]
    queries: Tensor  # q e^D [N, M, C, K]
    keys: Tensor  # k' [N, M, C, K]
    products: Tensor  # lower(<q e^D, k'>) [N M, C, C]
    to_first_middle: Tensor  # e^(G_mid) of the first chunk [M, K, 1]
    to_next_middle: Tensor  # decay from each chunk's middle to that of the next, or to the end [N, M, K, 1]


def kda_chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run the rule over T tokens of M heads, counted over all sequences. Inputs may have any strides.

    q [M, T, K] is normalised and scaled, k [M, T, K] normalised, v [M, T, V]. g [M, T, K] holds log decays, none
    positive, beta [M, T] write strengths. `state` [M, K, V] is S before the first token; it is not changed. Returns
    outputs [M, T, V], token by token in memory, and S after the last token [M, K, V].
    """
    outputs = v.new_empty(v.shape[1], v.shape[0], v.shape[2]).transpose(0, 1)
    for start in range(0, q.shape[1], _SEGMENT):
        segment = [x[:, start : start + _SEGMENT] for x in (q, k, v, g, beta)]
        o, state = _segment(segment, state)
        outputs[:, start : start + _SEGMENT] = o
    return outputs, state


def kda_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Run the rule for one token: `kda_chunked` without the axis T. Return outputs [M, V]; S changes in place."""
    state.mul_(g.exp().unsqueeze(-1))
    error = torch.baddbmm(v.unsqueeze(1), k.unsqueeze(1), state, alpha=-1)
    state.baddbmm_(k.unsqueeze(2), error.mul_(beta.view(-1, 1, 1)))
    return torch.bmm(q.unsqueeze(1), state).squeeze(1)


TORCH_RULE = DeltaRule(kda_chunked, kda_step)


def choose_rule(device: torch.device, products: torch.dtype) -> DeltaRule:
    """Take fla's kernels on an NVIDIA GPU if they can be imported, else plain torch. fla multiplies in bf16 or tf32: a
    model with fp32 products needs exactness, and gets torch."""
    if device.type != "cuda" or products != torch.bfloat16:
        return TORCH_RULE
    try:
        from fla.ops.kda import chunk_kda, fused_recurrent_kda  # pyright: ignore[reportMissingImports] (an extra)
    except Exception as error:  # triton raises more than ImportError where it lacks a driver or a compiler
        log.info("the delta rule runs in plain torch; for quicker kernels %s: %s", install_extra("cuda"), error)
        return TORCH_RULE
    return fla_rule(chunk_kda, fused_recurrent_kda)


def fla_rule(chunk_kda: Callable, fused_recurrent_kda: Callable) -> DeltaRule:
    """Put fla's two kernels behind our arguments: M heads of one sequence, token before head, products in bf16."""

    def run(kernel: Callable, inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = (x.transpose(0, 1).unsqueeze(0).contiguous() for x in inputs)
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
        o, after = kernel(
            q, k, v, g, beta, scale=1.0, initial_state=state.unsqueeze(0).contiguous(), output_final_state=True
        )
        return o[0].transpose(0, 1).float(), after[0]

    def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return run(chunk_kda, (q, k, v, g, beta), state)

    def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        inputs = tuple(x.unsqueeze(1) for x in (q, k, v, g, beta))
        o, after = run(fused_recurrent_kda, inputs, state)
        state.copy_(after)
        return o.squeeze(1)

    return DeltaRule(chunked, step)


def _segment(segment: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """`kda_chunked` for one segment: pairwise terms of all chunks together, then the states chunk by chunk."""
    tokens = segment[0].shape[1]
    chunk, segment = _padded(segment)
    terms = _pairwise_terms([_to_chunks(x, chunk) for x in segment])
    state = state * terms.to_first_middle
    learns = any(x.requires_grad for x in (terms.values, terms.queries, state))
    walk = _walk_for_gradients if learns else _walk
    new_values, inherited, state = walk(terms, state)
    o = torch.baddbmm(inherited, terms.products, new_values)
    return o.unflatten(0, terms.values.shape[:2]).transpose(0, 1).flatten(1, 2)[:, :tokens], state


def _walk(terms: _Terms, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Process chunk after chunk, with values and state changed in place. Returns v' and (q e^D) S~, each [N M, C, V],
    and S after the last token."""
    inherited = torch.empty_like(terms.values)
    for new, erased, queries, keys, decay, read in zip(*_by_chunk(terms), inherited.unbind(0), strict=True):
        new.baddbmm_(erased, state, alpha=-1)
        torch.bmm(queries, state, out=read)
        state.baddbmm_(keys.mT, new).mul_(decay)
    return terms.values.flatten(0, 1), inherited.flatten(0, 1), state


def _walk_for_gradients(terms: _Terms, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`_walk` with all results kept, as gradients need them."""
    new_values, inherited = [], []
    for values, erased, queries, keys, decay in zip(*_by_chunk(terms), strict=True):
        new_values.append(torch.baddbmm(values, erased, state, alpha=-1))
        inherited.append(torch.bmm(queries, state))
        state = torch.baddbmm(state, keys.mT, new_values[-1]) * decay
    return torch.cat(new_values), torch.cat(inherited), state


def _by_chunk(terms: _Terms) -> list[tuple[Tensor, ...]]:
    return [x.unbind(0) for x in (terms.values, terms.erased, terms.queries, terms.keys, terms.to_next_middle)]


def _padded(segment: list[Tensor]) -> tuple[int, list[Tensor]]:
    """Return the chunk size, and the segment [M, T, ...] padded to its multiple; zeros neither decay nor write."""
    tokens, chunk = segment[0].shape[1], _LARGEST_CHUNK
    while chunk > _SMALLEST_CHUNK and chunk // 2 >= tokens:
        chunk //= 2
    if missing := -tokens % chunk:
        segment = [torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], dim=1) for x in segment]
    q, k, v, g, beta = segment
    if _half_decay(g, chunk) > _HALF_CHUNK_DECAY:
        g = g.clamp(min=_STRONGEST_GATE)
        while chunk > _SMALLEST_CHUNK and _half_decay(g, chunk) > _HALF_CHUNK_DECAY:
            chunk //= 2
    return chunk, [q, k, v, g, beta]


def _half_decay(g: Tensor, chunk: int) -> Tensor:
    """The most that half a chunk decays, as a positive exponent, of gates [M, T, K]."""
    return -g.unflatten(1, (-1, chunk // 2)).sum(2).min()


def _to_chunks(x: Tensor, chunk: int) -> Tensor:
    """[M, T, ...] -> [N, M, C, ...]."""
    return x.unflatten(1, (-1, chunk)).transpose(0, 1)


def _pairwise_terms(chunks: list[Tensor]) -> _Terms:
    """All terms of a segment that do not depend on the state, from q, k, v, g, beta in chunks [N, M, C, ...]."""
    q, k, v, g, beta = chunks
    count, rows, size = beta.shape
    strength = beta.reshape(-1, size)
    g = g.reshape(-1, size, g.shape[-1])
    from_middle = torch.bmm(_middle_sums(g, size), g)
    to_middle = (g - from_middle)[:, 0].unflatten(0, (count, rows))
    to_end = from_middle[:, -1].unflatten(0, (count, rows))
    to_next = torch.cat([to_end[:-1] + to_middle[1:], to_end[-1:]])

    # The factor is first: it is contiguous, and so is the product.
    growth = from_middle.exp().view_as(k)
    keys = (growth.reciprocal() * k).flatten(0, 1)
    own_keys, queries = (growth * k).flatten(0, 1), (growth * q).flatten(0, 1)
    inverse = _unit_lower_inverse(torch.bmm(own_keys, keys.mT).tril(-1) * strength.unsqueeze(-1))
    writes = inverse * strength.unsqueeze(1)

    def by_chunk(x: Tensor) -> Tensor:
        return x.unflatten(0, (count, rows))

    return _Terms(
        values=by_chunk(torch.bmm(writes, v.reshape(-1, size, v.shape[-1]))),
        erased=by_chunk(torch.bmm(writes, own_keys)),
        queries=by_chunk(queries),
        keys=by_chunk(keys),
        products=torch.bmm(queries, keys.mT).tril(),
        to_first_middle=to_middle[0].exp().unsqueeze(-1),
        to_next_middle=to_next.exp().unsqueeze(-1),
    )


def _middle_sums(g: Tensor, size: int) -> Tensor:
    """The matrix [.., C, C] that sums gates [.., C, K] from the middle of a chunk to each of its tokens. As a product
    each sum has at most C / 2 terms; a difference of running sums would lose digits."""
    sums = g.new_ones(size, size).tril()
    return (sums - sums[size // 2 - 1]).expand(g.shape[0], size, size)


def _unit_lower_inverse(strictly_lower: Tensor) -> Tensor:
    """(I + L)^-1 for L [B, C, C]: far quicker here than a triangular solve."""
    return _BlockInverse.apply(strictly_lower)  # pyright: ignore[reportReturnType] (apply is untyped)


class _BlockInverse(torch.autograd.Function):
    """(I + L)^-1 by forward substitution, which is exact for any L, in blocks that products combine."""

    @staticmethod
    def forward(ctx, strictly_lower: Tensor) -> Tensor:
        inverse = _inverse(strictly_lower)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grads[0] @ inverse.mT).tril(-1)


def _inverse(strictly_lower: Tensor) -> Tensor:
    """[[A, 0], [X, B]]^-1 = [[A^-1, 0], [-B^-1 X A^-1, B^-1]], down to blocks that are substituted."""
    batch, size, _ = strictly_lower.shape
    if size <= _SUBSTITUTED:
        return _substituted(strictly_lower)
    half = size // 2
    first, second = strictly_lower[:, :half, :half], strictly_lower[:, half:, half:]
    first, second = _inverse(torch.cat([first, second])).split(batch)
    inverse = strictly_lower.new_zeros(batch, size, size)
    inverse[:, :half, :half], inverse[:, half:, half:] = first, second
    torch.neg(second @ strictly_lower[:, half:, :half] @ first, out=inverse[:, half:, :half])
    return inverse


def _substituted(strictly_lower: Tensor) -> Tensor:
    """(I + L)^-1 of small blocks, row by row; the batch axis is last, so that rows are long and contiguous."""
    rows = strictly_lower.permute(1, 2, 0).neg().contiguous()
    for i in range(1, rows.shape[0]):
        rows[i, :i] += (rows[i, :i].unsqueeze(1) * rows[:i, :i]).sum(0)
    rows.diagonal(dim1=0, dim2=1).fill_(1.0)
    return rows.permute(2, 0, 1).contiguous()
