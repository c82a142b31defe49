"""Proves on the shipped model, reading this file, what codecs do to answers: after LOSSLESS every logit has the same
bits; after INT8 they differ, by less than docs/understand/compression.md states."""

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


@pytest.fixture(scope="module")
def solo() -> Solo:
    return Solo(load_model("builtin:kimi-linear-tiny", 1)[0], slots=1, tokens=READ + SCORED)


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


def logits_after(solo: Solo, codec: Codec) -> torch.Tensor:
    """Logits, fp32 [SCORED, vocab_size], after a cache went through a codec."""
    tokens = torch.tensor([256, *Path(__file__).read_bytes()[: READ + SCORED]])
    sequence = solo.new()
    solo.prefill(tokens[:READ], sequence)
    for layouts, items, memory in frames(solo, sequence):
        encoded = encode(codec, layouts, items, memory)
        payload = b"".join(encoded.buffers)
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


def test_after_int8_logits_differ_by_less_than_is_stated(solo, exact):
    off = (logits_after(solo, Codec.INT8) - exact).abs()
    assert 0 < off.mean() < MEAN_BOUND
    assert off.max() < LARGEST_BOUND
