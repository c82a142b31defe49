"""Proves that our Kimi Linear computes what transformers' own implementation does, and that its cache is whole.

Logits are compared in fp32 at a standard deviation of about 5: for one prefill, for chunks, for decode, for a batch,
and for decode after the whole cache went through bytes into a fresh one. Comparing tokens would be nearly blind, so
negative controls damage the cache in ways that leave most greedy tokens unchanged and must move the logits far past
the bound.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from prfaas_worker.models.base import Batch, Chunk, Decodes, Model
from prfaas_worker.models.kimi_linear import paged_batch
from prfaas_worker.models.solo import Solo, SoloSequence

from .conftest import LOGIT_SCALE

BOUND = 1e-4
# What damage must do at the least; measured values are many times larger.
DAMAGE = 100 * BOUND


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(320, (400,), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def expected(oracle: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The oracle's logits [400, 320], at each position."""
    with torch.no_grad():
        return oracle(tokens.unsqueeze(0)).logits[0]


@pytest.fixture
def solo(model: Model) -> Solo:
    """The model on a memory of this test's own."""
    return Solo(model, slots=6, tokens=1600)


def prefill(solo: Solo, tokens: torch.Tensor, *sizes: int) -> tuple[SoloSequence, torch.Tensor]:
    """A sequence filled in chunks of these sizes (one chunk by default), and the logits after the last."""
    sequence = solo.new()
    for chunk in tokens.split(list(sizes) or [len(tokens)]):
        hidden = solo.prefill(chunk, sequence)
    return sequence, solo.model.logits(hidden)


def rows_of(solo: Solo, sequence: SoloSequence, layer: int) -> dict[str, torch.Tensor]:
    """A copy of a layer's rows, each [length, ...]."""
    pages = solo.pages(sequence)
    return {n: t[pages].flatten(0, 1)[: sequence.length] for n, t in solo.memory.rows(layer).items()}


def write_rows(solo: Solo, sequence: SoloSequence, layer: int, rows: dict[str, torch.Tensor]) -> None:
    """Put rows [n, ...] at the beginning of a sequence's pages, token by token."""
    for name, values in rows.items():
        for token, row in enumerate(values):
            solo.memory.rows(layer)[name][solo.memory.table[sequence.slot, token // 64], token % 64] = row


def states_of(solo: Solo, sequence: SoloSequence, layer: int) -> dict[str, torch.Tensor]:
    """Views of a layer's states."""
    return {name: tensor[sequence.slot] for name, tensor in solo.memory.states(layer).items()}


def through_bytes(solo: Solo, sequence: SoloSequence) -> SoloSequence:
    """A fresh sequence, in other pages, made from nothing but each tensor's bytes and the layers' specs."""
    fresh = solo.new()
    for index, spec in enumerate(solo.model.layers):
        rows, states = rows_of(solo, sequence, index), states_of(solo, sequence, index)
        for tensor in spec.rows:
            payload = rows[tensor.name].numpy().tobytes()
            copy = restored(payload, (sequence.length, *tensor.shape), tensor.dtype)
            write_rows(solo, fresh, index, {tensor.name: copy})
        for tensor in spec.state:
            payload = states[tensor.name].numpy().tobytes()
            states_of(solo, fresh, index)[tensor.name].copy_(restored(payload, tensor.shape, tensor.dtype))
    fresh.length = sequence.length
    return fresh


def restored(payload: bytes, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(payload, dtype).reshape(shape).copy())


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def test_logits_have_the_scale_at_which_parity_is_claimed(expected):
    assert expected.std().item() == pytest.approx(LOGIT_SCALE, rel=0.2)


@pytest.mark.parametrize("length", [1, 2, 3, 31, 32, 33, 63, 64, 65, 200, 400])
def test_one_prefill_matches_the_oracle(solo, tokens, expected, length):
    _, logits = prefill(solo, tokens[:length])
    assert distance(logits, expected[length - 1]) < BOUND


@pytest.mark.parametrize("sizes", [(1, 399), (200, 200), (37, 1, 2, 130, 229, 1), (100,) * 4])
def test_chunked_prefill_matches_the_oracle(solo, tokens, expected, sizes):
    _, logits = prefill(solo, tokens, *sizes)
    assert distance(logits, expected[-1]) < BOUND


def test_prefill_longer_than_a_segment_matches_the_oracle(solo, oracle):
    tokens = torch.randint(320, (1500,), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = oracle(tokens.unsqueeze(0)).logits[0]
    assert distance(prefill(solo, tokens)[1], expected[-1]) < BOUND
    assert distance(prefill(solo, tokens, 10, 1100, 390)[1], expected[-1]) < BOUND


def test_decode_from_nothing_and_after_prefill_matches_the_oracle(solo, tokens, expected):
    for start in (0, 350):
        sequence = prefill(solo, tokens[:start])[0] if start else solo.new()
        for position in range(start, start + 50):
            logits = solo.decode(tokens[position].view(1), [sequence])
            assert distance(logits[0], expected[position]) < BOUND


def test_rows_in_blocks_are_attended_to_as_all_at_once(solo, tokens, expected, monkeypatch):
    """Long contexts are cut into blocks; here they are tiny, so that sequences end in different ones."""
    monkeypatch.setattr(paged_batch, "_DECODE_BYTES", 1)
    monkeypatch.setattr(paged_batch, "_ROWS_AT_ONCE", 64)
    sequences = [prefill(solo, tokens[:length], *sizes)[0] for length, *sizes in ((300, 99, 201), (1,), (64,), (127,))]
    for chosen in ([0], [0, 1, 2, 3]):
        logits = solo.decode(torch.stack([tokens[sequences[i].length] for i in chosen]), [sequences[i] for i in chosen])
        for row, i in zip(logits, chosen, strict=True):
            assert distance(row, expected[sequences[i].length - 1]) < BOUND


def test_slots_in_any_order_decode_each_sequence(solo, tokens, expected):
    sequences = [prefill(solo, tokens[:length])[0] for length in (70, 20, 130)]
    for order in ([2, 0, 1], [1, 2, 0], [0, 2, 1]):
        lengths = [sequences[i].length for i in order]
        logits = solo.decode(tokens[lengths], [sequences[i] for i in order])
        assert all(distance(row, expected[length]) < BOUND for row, length in zip(logits, lengths, strict=True))


def test_chunks_and_decodes_of_one_step_are_computed_as_if_alone(solo, tokens, expected):
    decoding = [prefill(solo, tokens[:length])[0] for length in (130, 63)]
    begun, fresh = prefill(solo, tokens[:100])[0], solo.new()
    chunks = (Chunk(begun.slot, 100, 60), Chunk(fresh.slot, 0, 45))
    slots = torch.tensor([sequence.slot for sequence in decoding])
    batch = Batch(
        torch.cat([tokens[100:160], tokens[:45], tokens[[130, 63]]]),
        chunks,
        Decodes(slots, torch.tensor([130, 63]), 130),
    )
    logits = solo.model.logits(solo.model.forward(batch))
    for row, position in zip(logits, (159, 44, 130, 63), strict=True):
        assert distance(row, expected[position]) < BOUND


def test_what_stands_in_pages_behind_a_sequence_is_never_read(model, tokens, expected):
    """A page may have held anything before, a state's bytes for one: here no number at all."""
    solo = Solo(model, slots=3, tokens=400)
    solo.memory.pages.fill_(0xFF)
    assert solo.memory.rows(3)["latent"].isnan().all()
    sequences = [prefill(solo, tokens[:length], length - 1, 1)[0] for length in (70, 3)]
    sequences.append(solo.new())
    lengths = (70, 3, 0)
    for step in range(3):
        logits = solo.decode(torch.stack([tokens[length + step] for length in lengths]), sequences)
        for row, length in zip(logits, lengths, strict=True):
            assert distance(row, expected[length + step]) < BOUND


def test_decode_after_the_cache_went_through_bytes_matches_the_oracle(solo, tokens, expected):
    sequence = through_bytes(solo, prefill(solo, tokens[:350], 200, 150)[0])
    for position in range(350, 400):
        logits = solo.decode(tokens[position].view(1), [sequence])
        assert distance(logits[0], expected[position]) < BOUND


def test_prefill_continues_in_a_cache_that_went_through_bytes(solo, tokens, expected):
    sequence = through_bytes(solo, prefill(solo, tokens[:123])[0])
    assert distance(solo.model.logits(solo.prefill(tokens[123:], sequence)), expected[-1]) < BOUND


def test_our_prefill_can_be_decoded_by_the_oracle(solo, oracle, tokens, expected):
    from transformers import DynamicCache

    ours, _ = prefill(solo, tokens[:350])
    theirs = DynamicCache(config=oracle.config)
    with torch.no_grad():
        oracle(tokens[:2].unsqueeze(0), past_key_values=theirs, use_cache=True)  # allocates every layer's tensors
    for index, other in enumerate(theirs.layers):
        overwrite_oracle_layer(solo, ours, index, other)
    with torch.no_grad():
        logits = oracle(tokens[350:351].unsqueeze(0), past_key_values=theirs, use_cache=True).logits[0, -1]
    assert distance(logits, expected[350]) < BOUND


def overwrite_oracle_layer(solo: Solo, sequence: SoloSequence, index: int, other) -> None:
    if solo.model.layers[index].rows:
        rows, latent_size = rows_of(solo, sequence, index)["latent"], solo.model.config.latent_size
        latent, shared = rows.split([latent_size, rows.shape[1] - latent_size], dim=-1)
        other.keys, other.values = latent[None, None].clone(), shared[None, None].clone()
        return
    states = states_of(solo, sequence, index)
    (their_conv,) = as_list(other.conv_states)
    (their_recurrent,) = as_list(other.recurrent_states)
    their_recurrent.copy_(states["recurrent"].unsqueeze(0))
    their_conv[..., -states["conv"].shape[-1] :] = states["conv"]


def as_list(states) -> list[torch.Tensor]:
    return (
        [states] if isinstance(states, torch.Tensor) else list(states.values() if isinstance(states, dict) else states)
    )


def transpose_recurrent(solo: Solo, sequence: SoloSequence) -> None:
    for layer in linear_layers(solo):
        recurrent = states_of(solo, sequence, layer)["recurrent"]
        recurrent.copy_(recurrent.mT.clone())


def swap_conv_columns(solo: Solo, sequence: SoloSequence) -> None:
    for layer in linear_layers(solo):
        conv = states_of(solo, sequence, layer)["conv"]
        conv.copy_(conv.flip(-1).clone())


def shift_one_row(solo: Solo, sequence: SoloSequence) -> None:
    page = solo.pages(sequence)[1]
    for layer in attention_layers(solo):
        rows = solo.memory.rows(layer)["latent"][page]
        rows[36] = rows[37].clone()


def swap_two_pages(solo: Solo, sequence: SoloSequence) -> None:
    """What a page table with two entries exchanged would read; attention without positions must still tell."""
    first, last = solo.pages(sequence)[[0, -1]].tolist()
    for layer in attention_layers(solo):
        pages = solo.memory.rows(layer)["latent"]
        pages[[first, last]] = pages[[last, first]].clone()


def zero_one_head_of_one_layer(solo: Solo, sequence: SoloSequence) -> None:
    states_of(solo, sequence, linear_layers(solo)[0])["recurrent"][0].zero_()


def attention_layers(solo: Solo) -> list[int]:
    return [index for index, spec in enumerate(solo.model.layers) if spec.rows]


def linear_layers(solo: Solo) -> list[int]:
    return [index for index, spec in enumerate(solo.model.layers) if spec.state]


@pytest.mark.parametrize(
    "damage", [transpose_recurrent, swap_conv_columns, shift_one_row, swap_two_pages, zero_one_head_of_one_layer]
)
def test_a_damaged_cache_moves_the_logits_far_past_the_bound(
    solo, tokens, expected, damage: Callable[[Solo, SoloSequence], None]
):
    sequence = through_bytes(solo, prefill(solo, tokens[:350])[0])
    damage(solo, sequence)
    logits = solo.decode(tokens[350].view(1), [sequence])
    # A page's unused rows are whatever memory held, so what reads them may be no number at all.
    assert not distance(logits[0], expected[350]) <= DAMAGE


def test_layers_report_in_order_with_their_rows_and_states_in_place(solo, tokens):
    whole, _ = prefill(solo, tokens[:300])
    sequence, seen = solo.new(), []

    def on_layer(index: int) -> None:
        seen.append(index)
        now = SoloSequence(sequence.slot, 300)
        for found, final in ((f(solo, now, index), f(solo, whole, index)) for f in (rows_of, states_of)):
            assert all(distance(found[name], final[name]) < BOUND for name in final)

    solo.prefill(tokens[:300], sequence, on_layer)
    assert seen == list(range(8))
