"""Proves that the chunked delta rule is the recurrence: against a token-by-token loop in fp64, for gates from nearly
none to ones that forget everything at once, in values, in the state carried between calls and in gradients."""

import pytest
import torch
from torch import Tensor

from prfaas_worker.models.kimi_linear import delta_rule
from prfaas_worker.models.kimi_linear.delta_rule import kda_chunked, kda_step

HEADS, SIZE = 3, 32
GATE_SCALES = [0.1, 1.0, 5.0, 10.0, 30.0, 100.0]
# Largest errors of outputs and state.
OUTPUT_BOUND, STATE_BOUND = 6e-7, 3.2e-6


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The rule as it is written, one token after another, in fp64."""
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    outputs = []
    for t in range(q.shape[1]):
        state = g[:, t].exp().unsqueeze(-1) * state
        error = beta[:, t, None] * (v[:, t] - torch.einsum("mk,mkv->mv", k[:, t], state))
        state = state + torch.einsum("mk,mv->mkv", k[:, t], error)
        outputs.append(torch.einsum("mk,mkv->mv", q[:, t], state))
    return torch.stack(outputs, dim=1), state


def inputs(tokens: int, gate_scale: float, *, seed: int = 0) -> list[Tensor]:
    """q, k, v, g, beta and a state that earlier tokens left, as a layer makes them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v = (normal(HEADS, tokens, SIZE) for _ in range(3))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    g = -gate_scale * torch.nn.functional.softplus(normal(HEADS, tokens, SIZE))
    return [q * SIZE**-0.5, k, v, g, normal(HEADS, tokens).sigmoid(), normal(HEADS, SIZE, SIZE)]


def assert_is_recurrence(*arguments: Tensor) -> None:
    o, state = kda_chunked(*arguments)
    expected_o, expected_state = recurrence(*arguments)
    assert (o - expected_o).abs().max() < OUTPUT_BOUND
    assert (state - expected_state).abs().max() < STATE_BOUND


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 32, 33, 64, 300])
@pytest.mark.parametrize("gate_scale", GATE_SCALES)
def test_chunks_are_the_recurrence(gate_scale, tokens):
    assert_is_recurrence(*inputs(tokens, gate_scale))


@pytest.mark.parametrize("gate_scale", GATE_SCALES)
def test_steps_are_the_recurrence(gate_scale):
    arguments = inputs(20, gate_scale)
    state = arguments[5].clone()
    outputs = [kda_step(*(x[:, t] for x in arguments[:5]), state) for t in range(20)]
    expected_o, expected_state = recurrence(*arguments)
    assert (torch.stack(outputs, dim=1) - expected_o).abs().max() < OUTPUT_BOUND
    assert (state - expected_state).abs().max() < STATE_BOUND


def test_strong_and_weak_gates_side_by_side_stay_exact():
    """Tokens and channels that forget everything stand beside ones that forget nothing: sums must not lose digits."""
    q, k, v, g, beta, state = inputs(300, 1.0)
    mixed = g * 10 ** (5 * torch.rand(g.shape, generator=torch.Generator().manual_seed(1)) - 3)
    assert mixed.min() < -100
    assert mixed.max() > -1e-3
    assert_is_recurrence(q, k, v, mixed, beta, state)


def test_a_gate_that_forgets_everything_is_no_special_case():
    q, k, v, g, beta, state = inputs(100, 1.0)
    g[:, 40:45] = -torch.inf
    g[:, 70, ::2] = -torch.inf
    assert_is_recurrence(q, k, v, g, beta, state)


def test_any_split_of_the_tokens_gives_the_same_state():
    arguments = inputs(2500, 0.3)
    o, state = kda_chunked(*arguments)
    pieces, carried = [], arguments[5]
    for piece in zip(*(x.split([1, 31, 1024, 1400, 44], dim=1) for x in arguments[:5]), strict=True):
        part, carried = kda_chunked(*piece, carried)
        pieces.append(part)
    assert (torch.cat(pieces, dim=1) - o).abs().max() < OUTPUT_BOUND
    assert (carried - state).abs().max() < STATE_BOUND


def test_equal_keys_that_are_written_in_full_stay_exact():
    """The worst case of the triangular inverse: every product inside the chunk is 1."""
    q, k, v, g, beta, state = inputs(64, 0.1)
    k = k[:, :1].expand_as(k)
    arguments = [q, k, v, torch.zeros_like(g), torch.ones_like(beta), state]
    o, final = kda_chunked(*arguments)
    expected_o, expected_final = recurrence(*arguments)
    assert (o - expected_o).abs().max() < 1e-5
    assert (final - expected_final).abs().max() < 1e-5


@pytest.mark.parametrize("chunk", [32, 16, 8, 4])
def test_the_strongest_gates_that_a_chunk_size_takes_stay_exact(chunk):
    """Gates right below the limit of each size: where the factorised form has the largest numbers."""
    q, k, v, g, beta, state = inputs(256, 1.0)
    strongest = g.unflatten(1, (-1, chunk // 2)).sum(2).min()
    arguments = [q, k, v, g * (0.999 * -delta_rule._HALF_CHUNK_DECAY / strongest), beta, state]
    assert delta_rule._padded([x.clone() for x in arguments[:5]])[0] == chunk
    assert_is_recurrence(*arguments)


def test_chunks_that_ignored_the_gates_would_overflow(monkeypatch):
    """Negative control: with the largest chunk everywhere strong gates give NaN; their size is what saves them."""
    monkeypatch.setattr(delta_rule, "_HALF_CHUNK_DECAY", float("inf"))
    o, _ = kda_chunked(*inputs(64, 30.0))
    assert not o.isfinite().all()


def test_inputs_in_the_layout_of_a_layer_give_the_same():
    """A layer hands over views [M, T, ...] of tensors that stand token by token."""
    arguments = inputs(100, 1.0)
    views = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in arguments[:5]]
    assert not views[0].is_contiguous()
    o, state = kda_chunked(*views, arguments[5])
    expected_o, expected_state = kda_chunked(*arguments)
    assert torch.equal(o, expected_o)
    assert torch.equal(state, expected_state)


@pytest.mark.parametrize("gate_scale", [1.0, 30.0])
def test_gradients_are_those_of_the_recurrence(gate_scale):
    chunked = [x.requires_grad_() for x in inputs(50, gate_scale)]
    looped = [x.requires_grad_() for x in inputs(50, gate_scale)]
    for function, arguments in ((kda_chunked, chunked), (recurrence, looped)):
        o, state = function(*arguments)
        (o.sin().sum() + state.sin().sum()).backward()
    for ours, expected in zip(chunked, looped, strict=True):
        assert (ours.grad - expected.grad).abs().max() < 2e-5
