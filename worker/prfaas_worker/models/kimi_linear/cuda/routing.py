"""Which experts a token goes to, and the way of its row to them and back.

Rows that go to one expert must stand together, for one matrix product each. Tokens are not sorted for that: picking an
expert draws the row's number within it from a counter, and a row's place follows from the counters' running sum. The
draw's order varies from run to run, which moves rows but changes no result: every row is multiplied by itself.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from prfaas_worker.models.kimi_linear.cuda.launch import launch


class Routing(NamedTuple):
    """Where N tokens' T picks go.

    Attributes:
        weights: what each pick's output counts, fp32 [N, T].
        places: row of each pick among all, int32 [N, T].
        ends: expert e has rows ends[e - 1] up to ends[e], int32 [E].
        rows: the tokens' rows in that order [N T, D].

    """

    weights: Tensor
    places: Tensor
    ends: Tensor
    rows: Tensor


class Rule(NamedTuple):
    """How experts are picked: the `top` of them by sigmoid score plus `bias` (fp32 [E]), weighted by the raw scores."""

    bias: Tensor
    top: int
    renormalise: bool
    scale: float


def route(x: Tensor, logits: Tensor, rule: Rule) -> Routing:
    """Pick experts for tokens x [N, D] by the router's logits, fp32 [N, E], and bring the rows of each together."""
    tokens, size = x.shape
    experts, top = logits.shape[1], rule.top
    picked, ranks, places = torch.empty(3, tokens, top, dtype=torch.int32, device=x.device)
    weights = torch.empty(tokens, top, dtype=torch.float32, device=x.device)
    counts = torch.zeros(experts, dtype=torch.int32, device=x.device)
    rows = x.new_empty(tokens * top, size)
    launch(
        _pick_kernel,
        (tokens,),
        logits,
        rule.bias,
        picked,
        ranks,
        weights,
        counts,
        rule.scale,
        EXPERTS=experts,
        TOP=top,
        RENORMALISE=rule.renormalise,
        BLOCK=triton.next_power_of_2(experts),
        BLOCK_TOP=triton.next_power_of_2(top),
        num_warps=1,
    )
    ends = counts.cumsum(0, dtype=torch.int32)
    launch(
        _send_kernel,
        (tokens * top,),
        x,
        picked,
        ranks,
        counts,
        ends,
        places,
        rows,
        SIZE=size,
        TOP=top,
        BLOCK=triton.next_power_of_2(size),
    )
    return Routing(weights, places, ends, rows)


def combine(outputs: Tensor, routing: Routing, shared: Tensor, residual: Tensor) -> None:
    """Add the experts' outputs [N T, D], weighted, and the shared experts' [N, D] to the residual fp32 [N, D]."""
    tokens, size = residual.shape
    launch(
        _combine_kernel,
        (tokens,),
        outputs,
        routing.places,
        routing.weights,
        shared,
        residual,
        SIZE=size,
        TOP=routing.places.shape[1],
        BLOCK=triton.next_power_of_2(size),
        num_warps=8,
    )


@triton.jit
def _pick_kernel(  # noqa: PLR0913, PLR0917, a kernel's arguments are its pointers and sizes
    logits,
    bias,
    picked,
    ranks,
    weights,
    counts,
    scale,
    EXPERTS: tl.constexpr,
    TOP: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert, pick = tl.arange(0, BLOCK), tl.arange(0, BLOCK_TOP)
    inside = expert < EXPERTS
    score = tl.sigmoid(tl.load(logits + token * EXPERTS + expert, mask=inside, other=0.0))
    merit = tl.where(inside, score + tl.load(bias + expert, mask=inside, other=0.0), float("-inf"))
    chosen = tl.zeros((BLOCK_TOP,), tl.int32)
    weight = tl.zeros((BLOCK_TOP,), tl.float32)
    for i in tl.static_range(TOP):  # pyright: ignore[reportGeneralTypeIssues]
        best = tl.argmax(merit, 0)
        chosen = tl.where(pick == i, best, chosen)
        weight = tl.where(pick == i, tl.sum(tl.where(expert == best, score, 0.0), 0), weight)
        merit = tl.where(expert == best, float("-inf"), merit)
    if RENORMALISE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    is_pick = pick < TOP
    at = token * TOP + pick
    tl.store(picked + at, chosen, mask=is_pick)
    tl.store(weights + at, weight * scale, mask=is_pick)
    tl.store(ranks + at, tl.atomic_add(counts + chosen, 1, mask=is_pick), mask=is_pick)


@triton.jit
def _send_kernel(  # noqa: PLR0913, PLR0917
    x, picked, ranks, counts, ends, places, rows, SIZE: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr
):
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(picked + pair)
    place = tl.load(ends + expert) - tl.load(counts + expert) + tl.load(ranks + pair)
    tl.store(places + pair, place)
    column = tl.arange(0, BLOCK)
    row = tl.load(x + pair // TOP * SIZE + column, mask=column < SIZE, other=0.0)
    tl.store(rows + place.to(tl.int64) * SIZE + column, row, mask=column < SIZE)


@triton.jit
def _combine_kernel(  # noqa: PLR0913, PLR0917
    outputs, places, weights, shared, residual, SIZE: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    total = tl.load(residual + token * SIZE + column, mask=inside, other=0.0)
    total += tl.load(shared + token * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(TOP):  # pyright: ignore[reportGeneralTypeIssues]
        place = tl.load(places + token * TOP + i).to(tl.int64)
        given = tl.load(outputs + place * SIZE + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights + token * TOP + i) * given
    tl.store(residual + token * SIZE + column, total, mask=inside)
