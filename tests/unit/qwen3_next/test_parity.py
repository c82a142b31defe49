"""Proves that logits are those of transformers' own model, and that our memory is the whole cache.

Where the shapes are the same, every bit is: one prefill and decodes against transformers with its own cache, decodes on
another replica that got nothing but bytes, going on from a checkpoint against going on. Chunks have other shapes than
one prefill, so they agree within BOUND, at logits of standard deviation 5.
"""

from collections.abc import Callable

import pytest
import torch

from prfaas_worker.models.base import Batch, Chunk, Decodes
from prfaas_worker.models.solo import Solo, SoloSequence

from .conftest import Checkpoint
from .sequences import distance, fresh, moved, prefilled, solo_of
from .tiny import LOGIT_SCALE, VOCAB

BOUND = 1e-4
# More than two pages, and past a linear layer's chunk of 64.
LENGTH = 150


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (200,), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def solo(checkpoint: Checkpoint) -> Solo:
    return solo_of(checkpoint.model)


class Oracle:
    """transformers' model with its own cache, one sequence."""

    def __init__(self, checkpoint: Checkpoint):
        from transformers import DynamicCache

        self._model, self._cache = checkpoint.oracle, DynamicCache(config=checkpoint.oracle.config)

    @torch.inference_mode()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append tokens; returns the logits after the last."""
        inputs = tokens.unsqueeze(0)
        return self._model(inputs, past_key_values=self._cache, use_cache=True, logits_to_keep=1).logits[0, -1]


def test_logits_have_the_scale_at_which_bounds_are_claimed(checkpoint, tokens):
    assert Oracle(checkpoint).logits(tokens).std().item() == pytest.approx(LOGIT_SCALE, rel=0.25)


@pytest.mark.parametrize("length", [1, 2, 3, 64, LENGTH])
def test_one_prefill_is_bit_for_bit_that_of_transformers(checkpoint, solo, tokens, length):
    assert torch.equal(prefilled(solo, tokens[:length])[1], Oracle(checkpoint).logits(tokens[:length]))


@pytest.mark.parametrize("length", [1, 20, LENGTH])
def test_decodes_are_bit_for_bit_those_of_transformers(checkpoint, solo, tokens, length):
    oracle = Oracle(checkpoint)
    oracle.logits(tokens[:length])
    sequence, _ = prefilled(solo, tokens[:length])
    for token in tokens[length : length + 8]:
        assert torch.equal(solo.decode(token.view(1), [sequence])[0], oracle.logits(token.view(1)))


@pytest.mark.parametrize("length", [20, LENGTH])
def test_another_replica_continues_from_bytes_with_the_same_bits(checkpoint, solo, tokens, length):
    here, _ = prefilled(solo, tokens[:length])
    there = solo_of(checkpoint.replica, slots=9)
    copy = moved(solo, here, there)
    assert copy.slot != here.slot
    assert there.pages(copy).tolist() != solo.pages(here).tolist()
    for token in tokens[length : length + 9]:
        assert torch.equal(there.decode(token.view(1), [copy]), solo.decode(token.view(1), [here]))


@pytest.mark.parametrize("sizes", [(100, 50), (64, 64, 22), (1, 2, 147)])
def test_chunks_agree_with_one_prefill(checkpoint, solo, tokens, sizes):
    chunked, _ = prefilled(solo, tokens[:LENGTH], *sizes)
    whole, _ = prefilled(solo, tokens[:LENGTH])
    for token in tokens[LENGTH : LENGTH + 2]:
        assert distance(*(solo.decode(token.view(1), [sequence]) for sequence in (chunked, whole))) < BOUND


def test_going_on_from_a_checkpoint_has_the_bits_of_going_on(solo, tokens):
    geometry = solo.memory.geometry
    first, _ = prefilled(solo, tokens[:64])
    kept = list(range(geometry.pages_per_state))
    spare = fresh(solo)
    pages = solo.memory.table[spare.slot, kept].tolist()
    solo.memory.save_state(first.slot, pages)
    expected = solo.model.logits(solo.prefill(tokens[64:LENGTH], first))

    resumed = fresh(solo)
    solo.memory.set_pages(resumed.slot, 0, [int(solo.memory.table[first.slot, 0])])
    solo.memory.load_state(pages, resumed.slot)
    resumed.length = 64
    assert torch.equal(solo.model.logits(solo.prefill(tokens[64:LENGTH], resumed)), expected)


def test_chunks_and_decodes_of_one_step_come_out_in_order_as_if_alone(checkpoint, solo, tokens):
    decoding = [prefilled(solo, tokens[:length])[0] for length in (130, 63)]
    begun, new = prefilled(solo, tokens[:100])[0], fresh(solo)
    chunks = (Chunk(begun.slot, 100, 60), Chunk(new.slot, 0, 45))
    decodes = Decodes(torch.tensor([sequence.slot for sequence in decoding]), torch.tensor([130, 63]), 130)
    batch = Batch(torch.cat([tokens[100:160], tokens[:45], tokens[[130, 63]]]), chunks, decodes)
    seen: list[int] = []
    hidden = solo.model.forward(batch, seen.append)
    assert hidden.shape == (4, solo.model.hidden_size)
    assert seen == list(range(len(solo.model.layers)))
    for row, length in zip(solo.model.logits(hidden), (160, 45, 131, 64), strict=True):
        assert distance(row, Oracle(checkpoint).logits(tokens[:length])) < BOUND


def test_decodes_of_unequal_length_continue_as_if_alone(checkpoint, solo, tokens):
    lengths = (21, 0, LENGTH, 1, 63)
    sequences = [prefilled(solo, tokens[:length])[0] if length else fresh(solo) for length in lengths]
    for step in range(4):
        logits = solo.decode(torch.stack([tokens[length + step] for length in lengths]), sequences)
    for row, sequence in zip(logits, sequences, strict=True):
        assert distance(row, Oracle(checkpoint).logits(tokens[: sequence.length])) < BOUND
    last = solo.decode(tokens[lengths[0] + 4].view(1), sequences[:1])[0]
    assert distance(last, Oracle(checkpoint).logits(tokens[: lengths[0] + 5])) < BOUND


@pytest.mark.parametrize("count", [1, 2])
def test_a_layer_is_reported_when_its_part_of_the_cache_is_whole(solo, tokens, count):
    """A chunk for one sequence, decodes for two."""
    inputs = [tokens[64:100]] if count == 1 else [tokens[64:65], tokens[50:51]]
    final, watched = ([prefilled(solo, tokens[:length])[0] for length in (64, 50)[:count]] for _ in range(2))

    def step(sequences: list[SoloSequence], on_layer: Callable[[int], None]) -> None:
        if count == 1:
            solo.prefill(inputs[0], sequences[0], on_layer)
        else:
            slots = torch.tensor([sequence.slot for sequence in sequences])
            solo.model.forward(Batch(torch.cat(inputs), (), Decodes(slots, torch.tensor([64, 50]), 64)), on_layer)

    step(final, lambda _layer: None)
    expected = [state_and_rows(solo, final, layer) for layer in range(len(solo.model.layers))]
    reported = []
    step(watched, lambda layer: reported.append(same(state_and_rows(solo, watched, layer), expected[layer])))
    assert reported == [True] * len(solo.model.layers)


def state_and_rows(solo: Solo, sequences: list[SoloSequence], layer: int) -> list[torch.Tensor]:
    """Bytes of a layer's states, and of its rows that any of the sequences has."""
    found = []
    for sequence in sequences:
        pages = solo.memory.table[sequence.slot, :2]
        found += [tensor[pages].flatten(0, 1)[:100] for tensor in solo.memory.rows(layer).values()]
        found += [tensor[sequence.slot].clone() for tensor in solo.memory.states(layer).values()]
    return [tensor.view(torch.uint8) for tensor in found]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))
