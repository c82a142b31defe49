"""Proves that the decoding kernel of KDA is the recurrence, in outputs and in the states that it changes in place, and
that rows which belong to no sequence change nothing."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812, the name that torch's own documentation gives it

from prfaas_worker.models.kimi_linear.cuda.delta import DeltaInputs, delta_step
from prfaas_worker.models.kimi_linear.cuda.step import PADDING
from prfaas_worker.models.kimi_linear.cuda.weights import DeltaWeights

from .reference import convolved, delta_rule, relative, rms_norm

HEADS, SIZE, TAPS, SLOTS = 2, 32, 4, 5
CHANNELS = HEADS * SIZE
EPS = 1e-5


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request):
    return request.param


@pytest.fixture
def weights(normal, dtype):
    unused = normal(1)
    return DeltaWeights(
        inputs=unused,
        taps=normal(3 * CHANNELS, TAPS).to(dtype),
        forget=unused,
        gate=unused,
        decay_log=normal(HEADS).abs(),
        decay_bias=normal(CHANNELS),
        norm=normal(SIZE).to(dtype),
        norm_eps=EPS,
        output=unused,
    )


@pytest.fixture
def states(normal, dtype):
    """Slots with room between them, as a slot holds every layer's state."""
    recurrent, conv = normal(SLOTS, 2, HEADS, SIZE, SIZE)[:, 1], normal(SLOTS, 2, 3 * CHANNELS, TAPS - 1)[:, 0]
    return {"recurrent": recurrent, "conv": conv.to(dtype)}


def inputs_of(normal, dtype, rows):
    """Projections that are parts of wider rows."""
    wide = normal(rows, 3 * CHANNELS + HEADS + 8).to(dtype)
    qkv, strength, _ = wide.split([3 * CHANNELS, HEADS, 8], dim=1)
    return DeltaInputs(qkv, normal(rows, CHANNELS).to(dtype), strength, normal(rows, CHANNELS).to(dtype))


def run(inputs, weights, states, slots, dtype):
    out = torch.full((len(slots), CHANNELS), torch.nan, dtype=dtype, device=inputs.qkv.device)
    delta_step(inputs, weights, states, torch.tensor(slots, device=out.device), out)
    return out


def expected(inputs, weights, states, row, slot):
    """Output [H V], S and the convolution's inputs after one token."""
    mixed, conv = convolved(inputs.qkv[row : row + 1], weights.taps, states["conv"][slot])
    q, k, v = mixed.view(3, 1, HEADS, SIZE)
    forget = F.softplus(inputs.forget[row].double() + weights.decay_bias.double()).view(1, HEADS, SIZE)
    g = -weights.decay_log.double().exp()[None, :, None] * forget
    o, S = delta_rule(q, k, v, g, inputs.strength[row : row + 1].double().sigmoid(), states["recurrent"][slot])
    gate = inputs.gate[row].double().sigmoid()
    return rms_norm(o[0], weights.norm, EPS).flatten() * gate, S, conv


def test_a_step_is_the_recurrence_and_moves_the_states_on_in_place(weights, states, normal, dtype):
    inputs, slots = inputs_of(normal, dtype, 3), [4, 0, 2]
    wanted = [expected(inputs, weights, states, row, slot) for row, slot in enumerate(slots)]
    found = run(inputs, weights, states, slots, dtype)
    for row, slot in enumerate(slots):
        o, S, conv = wanted[row]
        assert relative(found[row], o) < (1e-5 if dtype == torch.float32 else 5e-3)
        assert relative(states["recurrent"][slot], S) < 1e-5
        assert torch.equal(states["conv"][slot].double(), conv)


def test_rows_of_no_sequence_touch_no_state_and_give_nothing(weights, states, normal, dtype):
    inputs, before = inputs_of(normal, dtype, 3), {name: state.clone() for name, state in states.items()}
    found = run(inputs, weights, states, [PADDING, 1, PADDING], dtype)
    assert torch.equal(found[[0, 2]], torch.zeros_like(found[:2]))
    assert found[1].isfinite().all()
    for name, state in states.items():
        unused = [0, 2, 3, 4]
        assert torch.equal(state[unused], before[name][unused])
        assert not torch.equal(state[1], before[name][1])


def test_steps_carry_on_from_each_other(weights, states, normal, dtype):
    inputs = inputs_of(normal, dtype, 4)
    for row in range(4):
        wanted, S, _ = expected(inputs, weights, states, row, 3)
        found = run(inputs.rows(slice(row, row + 1)), weights, states, [3], dtype)
        assert relative(found[0], wanted) < (1e-5 if dtype == torch.float32 else 5e-3)
        assert relative(states["recurrent"][3], S) < 1e-5


def test_a_transposed_state_is_seen(weights, states, normal, dtype):
    """The check itself: key and value axes are equally long, so only values can tell them apart."""
    inputs = inputs_of(normal, dtype, 1)
    wanted, _, _ = expected(inputs, weights, states, 0, 1)
    states["recurrent"][1] = states["recurrent"][1].mT.clone()
    assert relative(run(inputs, weights, states, [1], dtype)[0], wanted) > 0.3
