"""Proves on the shipped model, reading this file, what codecs do to answers: after LOSSLESS every logit has the same
bits; after INT8 they differ, by less than docs/understand/compression.md states. Small damage shows in both."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from prfaas.wire.frames import Codec
from prfaas.wire.transfer import TensorLayout
from prfaas_transfer.compression import decode_into, encode
from prfaas_worker.models import load_model
from prfaas_worker.models.solo import Solo, SoloSequence

READ, SCORED = 512, 24
LARGEST_BOUND, MEAN_BOUND = 1.0, 0.005

Change = Callable[[bytearray], None]


@pytest.fixture(scope="module")
def solo() -> Solo:
    return Solo(load_model("builtin:kimi-linear-tiny", 1)[0], slots=1, tokens=READ + SCORED)


def unchanged(_: bytearray) -> None:
    pass


def frames(solo: Solo, sequence: SoloSequence):
    """Each frame of a sequence's cache: layouts, items and memory."""
    for layer, spec in enumerate(solo.model.layers):
        pages, span = solo.pages(sequence).tolist(), (0, sequence.length)
        if spec.rows:
            memory = [part for one in spec.rows for part in solo.memory.row_bytes(layer, one.name, pages, span)]
            yield [TensorLayout(*one) for one in spec.rows], sequence.length, memory
        if spec.state:
            memory = [solo.memory.state_bytes(layer, one.name, sequence.slot) for one in spec.state]
            yield [TensorLayout(*one) for one in spec.state], 1, memory


def logits_after(solo: Solo, codec: Codec, change: Change = unchanged) -> torch.Tensor:
    """Logits, fp32 [SCORED, vocab_size], after a cache went through a codec and its payloads changed on the way."""
    tokens = torch.tensor([256, *Path(__file__).read_bytes()[: READ + SCORED]])
    sequence = solo.new()
    solo.prefill(tokens[:READ], sequence)
    for layouts, items, memory in frames(solo, sequence):
        encoded = encode(codec, layouts, items, memory)
        payload = bytearray(b"".join(encoded.buffers))
        if encoded.codec is codec:
            change(payload)
        for piece in memory:
            piece[:] = bytes(piece.nbytes)
        decode_into(encoded.codec, layouts, items, payload, memory)
    found = torch.cat([solo.decode(tokens[at : at + 1], [sequence]) for at in range(READ, READ + SCORED)])
    solo.drop(sequence)
    return found


@pytest.fixture(scope="module")
def exact(solo) -> torch.Tensor:
    return logits_after(solo, Codec.NONE)


def test_after_lossless_every_logit_has_the_same_bits(solo, exact):
    assert torch.equal(logits_after(solo, Codec.LOSSLESS), exact)


def test_a_single_byte_of_a_lossless_payload_shows_in_the_logits(solo, exact):
    def flip(payload: bytearray) -> None:
        payload[101] ^= 0x80  # in a plane of mantissas, behind the lengths

    assert not torch.equal(logits_after(solo, Codec.LOSSLESS, flip), exact)


def test_after_int8_logits_differ_by_less_than_is_stated(solo, exact):
    off = (logits_after(solo, Codec.INT8) - exact).abs()
    assert 0 < off.mean() < MEAN_BOUND
    assert off.max() < LARGEST_BOUND


def test_rows_of_16_levels_instead_of_255_break_what_is_stated(solo, exact):
    def coarser(payload: bytearray) -> None:
        integers = 64 * 4  # behind a scale for each channel of the latent
        payload[integers:] = bytes(value & 0xF0 for value in payload[integers:])

    assert (logits_after(solo, Codec.INT8, coarser) - exact).abs().mean() > MEAN_BOUND
