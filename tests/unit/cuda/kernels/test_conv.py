"""Proves that the convolution over the chunks of a step is the causal one, that it begins with what the slot holds, and
that it leaves in the slot what the next token needs, for chunks shorter and longer than the window."""

import pytest
import torch

from prfaas_worker.models.base import Batch, Chunk
from prfaas_worker.models.kimi_linear.cuda.conv import conv_chunks
from prfaas_worker.models.kimi_linear.cuda.step import plan_step

from .reference import convolved, relative

CHANNELS, TAPS, SLOTS = 3 * 48, 4, 6


def step_of(lengths, slots, device):
    chunks = tuple(Chunk(slot, 7 * slot, tokens) for slot, tokens in zip(slots, lengths, strict=True))
    return plan_step(Batch(torch.zeros(sum(lengths), dtype=torch.int64, device=device), chunks))


@pytest.mark.parametrize("lengths", [[1], [2, 3, 1], [4, 40, 33]])
def test_every_chunk_is_convolved_behind_its_own_slot(lengths, normal, device):
    taps, state = normal(CHANNELS, TAPS), normal(SLOTS, 2, CHANNELS, TAPS - 1)[:, 0]
    x = normal(sum(lengths), CHANNELS + 16)[:, :CHANNELS]
    slots = [4, 1, 0][: len(lengths)]
    before = state.clone()
    found = conv_chunks(x, taps, state, step_of(lengths, slots, device))
    begin = 0
    for slot, tokens in zip(slots, lengths, strict=True):
        wanted, left = convolved(x[begin : begin + tokens], taps, before[slot])
        given = found[:, begin : begin + tokens].transpose(0, 1).flatten(1)
        assert relative(given, wanted) < 1e-5
        assert torch.equal(state[slot].double(), left)
        begin += tokens
    others = [slot for slot in range(SLOTS) if slot not in slots]
    assert torch.equal(state[others], before[others])


def test_a_chunk_in_two_pieces_is_the_same(normal, device):
    taps, x = normal(CHANNELS, TAPS), normal(10, CHANNELS)
    whole_state, state = (torch.zeros(SLOTS, CHANNELS, TAPS - 1, device=device) for _ in range(2))
    whole = conv_chunks(x, taps, whole_state, step_of([10], [2], device))
    pieces = [conv_chunks(x[a:b], taps, state, step_of([b - a], [2], device)) for a, b in [(0, 2), (2, 3), (3, 10)]]
    assert torch.allclose(torch.cat(pieces, dim=1), whole, atol=1e-6)
    assert torch.equal(state, whole_state)
