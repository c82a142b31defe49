"""Proves in which type a model multiplies, and that the shipped model in bf16 says nearly the same, cache to and fro
included.

Every processor can emulate bf16: here a small model does, whatever the machine.
"""

from pathlib import Path

import pytest
import torch

from prfaas_worker.assets import model_directory
from prfaas_worker.models.kimi_linear.model import KimiLinear
from prfaas_worker.models.solo import Solo

TINY = model_directory("builtin:kimi-linear-tiny")
TEXT = torch.tensor(list(Path(__file__).read_bytes()[:400]))


@pytest.fixture(scope="module")
def both() -> tuple[KimiLinear, KimiLinear]:
    """The shipped model in fp32 and with products in bf16."""
    return KimiLinear.load(TINY, "float32"), KimiLinear.load(TINY, "bfloat16")


def test_a_cpu_multiplies_in_fp32_by_default(both):
    types = [model.blocks[0].attention._qkv.dtype for model in (KimiLinear.load(TINY, "auto"), *both)]
    assert types == [torch.float32, torch.float32, torch.bfloat16]


def test_caches_mean_the_same_in_both_types(both):
    """One prefills and the other decodes, in either direction, over one memory."""
    solos = [Solo(model, slots=2, tokens=512) for model in both]
    exact = continued(solos[0], both[0])
    assert 0 < distance(continued(solos[0], both[1]), exact) < 0.02
    assert 0 < distance(continued(solos[1], both[0]), exact) < 0.02
    assert both[0].fingerprint == both[1].fingerprint
    assert both[0].layers == both[1].layers


def continued(solo: Solo, decoder: KimiLinear) -> torch.Tensor:
    """Probabilities of 20 steps by `decoder` after a prompt by the solo's own model."""
    sequence = solo.new()
    solo.model.bind(solo.memory)
    solo.prefill(TEXT[:300], sequence)
    decoder.bind(solo.memory)
    prefiller, solo.model = solo.model, decoder
    logits = torch.cat([solo.decode(TEXT[i : i + 1], [sequence]) for i in range(300, 320)])
    solo.model = prefiller
    solo.drop(sequence)
    return logits.softmax(-1)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Mean over steps of how much of the probability moves."""
    return (a - b).abs().sum(-1).mean().item() / 2


def test_gates_router_and_attention_stay_fp32(both):
    block, attention = both[1].blocks[1], both[1].blocks[3].attention
    fp32 = [block.attention._gates, block.attention._conv, block.attention._f_b, block.attention._g_b]
    fp32 += [block.feed_forward._gate, attention._kv_b, both[1].embedding, both[1]._head]
    assert {tensor.dtype for tensor in fp32} == {torch.float32}
    assert block.feed_forward._gate_up.dtype == attention._o_proj.dtype == torch.bfloat16
