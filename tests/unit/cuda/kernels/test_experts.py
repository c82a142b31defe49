"""Proves that the mixture picks, weighs and adds up as written: each token's best experts by corrected score, their
weights from the raw one, one product for each expert that has rows, whatever their number."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812, the name that torch's own documentation gives it

from prfaas_worker.models.kimi_linear.cuda import grouped
from prfaas_worker.models.kimi_linear.cuda.grouped import grouped_linear_triton
from prfaas_worker.models.kimi_linear.cuda.norms import add_rms_norm, silu_mul
from prfaas_worker.models.kimi_linear.cuda.routing import Rule, combine, route

from .reference import relative

TOKENS, SIZE, EXPERTS, TOP = 13, 40, 10, 3


@pytest.mark.parametrize("renormalise", [True, False])
def test_tokens_go_to_their_best_experts_and_come_back_weighted(renormalise, normal):
    x, logits, bias = normal(TOKENS, SIZE), normal(TOKENS, EXPERTS), normal(EXPERTS)
    routing = route(x, logits, Rule(bias, TOP, renormalise, 2.5))
    scores = logits.double().sigmoid()
    picked = (scores + bias).topk(TOP, dim=-1).indices
    weights = scores.gather(1, picked)
    weights = 2.5 * (weights / weights.sum(-1, keepdim=True) if renormalise else weights)
    assert relative(routing.weights, weights) < 1e-5

    begins = torch.cat([routing.ends.new_zeros(1), routing.ends[:-1]])
    assert torch.equal(routing.ends - begins, picked.flatten().bincount(minlength=EXPERTS).int())
    assert torch.equal(routing.places.flatten().sort().values, torch.arange(TOKENS * TOP).to(routing.places))
    for token in range(TOKENS):
        for pick in range(TOP):
            place, expert = routing.places[token, pick], picked[token, pick]
            assert begins[expert] <= place < routing.ends[expert]
            assert torch.equal(routing.rows[place], x[token])

    outputs, shared, residual = normal(TOKENS * TOP, SIZE), normal(TOKENS, SIZE), normal(TOKENS, SIZE)
    mixed = (outputs.double()[routing.places.long()] * weights.unsqueeze(-1)).sum(1)
    right = residual.double() + shared + mixed
    combine(outputs, routing, shared, residual)
    assert relative(residual, right) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("counts", [[1, 0, 0, 1], [0, 40, 1, 0], [70, 3, 0, 120]])
def test_each_expert_multiplies_its_own_rows(counts, dtype, normal, device):
    x, weight = normal(sum(counts), 72).to(dtype), normal(4, 80, 72).to(dtype)
    ends = torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)
    right = torch.cat([rows.double() @ weight[e].double().T for e, rows in enumerate(x.split(counts))])
    bound = 1e-5 if dtype == torch.float32 else 5e-3
    assert relative(grouped_linear_triton(x, weight, ends), right) < bound
    assert relative(grouped.grouped_linear(x, weight, ends), right) < bound


def test_a_row_at_anothers_expert_is_seen(normal, device):
    """The check itself: ends that are one off move one row to its neighbour's expert."""
    x, weight = normal(8, 64), normal(4, 64, 64)
    right = torch.cat([rows.double() @ weight[e].double().T for e, rows in enumerate(x.split(2))])
    ends = torch.tensor([2, 5, 6, 8], dtype=torch.int32, device=device)
    assert relative(grouped_linear_triton(x, weight, ends), right) > 0.1


def test_the_residual_stream_grows_in_fp32_and_is_normed_on_the_way(normal):
    residual, delta, weight = normal(5, SIZE), normal(5, SIZE).bfloat16(), normal(SIZE)
    total = residual.double() + delta.double()
    found = add_rms_norm(residual, delta, weight, 1e-5, torch.float32)
    assert relative(residual, total) < 1e-7
    assert relative(found, F.rms_norm(total, (SIZE,), weight.double(), 1e-5)) < 1e-5


def test_silu_mul_takes_the_gate_first(normal):
    given = normal(3, 2 * SIZE)
    gate, up = given.double().chunk(2, dim=-1)
    assert relative(silu_mul(given), F.silu(gate) * up) < 1e-5
