"""Proves when a CPU multiplies in bf16, that the shipped model then says nearly the same, cache to and fro included,
and that weights which rounding would change too much stay in fp32.

Every processor can emulate bf16: here a small model does, whatever the machine.
"""

import logging
from pathlib import Path

import pytest
import torch

from prfaas_worker.assets import model_directory
from prfaas_worker.models.kimi_linear import model as kimi_linear
from prfaas_worker.models.kimi_linear.config import parse_config
from prfaas_worker.models.kimi_linear.model import KimiLinear
from prfaas_worker.models.kimi_linear.precision import (
    MOST_DIVERGENCE,
    PrecisionFacts,
    Speedups,
    choose,
    instructions,
    products_of_a_token,
    speedups,
)
from prfaas_worker.models.solo import Solo

from .conftest import ORACLE_CONFIG

TINY = model_directory("builtin:kimi-linear-tiny")
TEXT = torch.tensor(list(Path(__file__).read_bytes()[:400]))
AMX = frozenset({"amx_bf16", "avx512_bf16"})
QUICK = Speedups(prompt=3.0, token=1.5)


@pytest.fixture(scope="module")
def both() -> tuple[KimiLinear, KimiLinear]:
    """The shipped model in fp32 and with products in bf16."""
    return KimiLinear.load(TINY, "float32"), KimiLinear.load(TINY, "bfloat16")


@pytest.fixture
def on_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """This processor as if it multiplied bf16 quickly."""
    monkeypatch.setattr(kimi_linear, "instructions", lambda: AMX)
    monkeypatch.setattr(kimi_linear, "speedups", lambda _: QUICK)


@pytest.mark.parametrize(
    ("facts", "dtype", "reason"),
    [
        (PrecisionFacts("auto", frozenset()), torch.float32, "neither AVX512-BF16 nor AMX"),
        (PrecisionFacts("auto", AMX), torch.bfloat16, "amx_bf16 and avx512_bf16"),
        (PrecisionFacts("auto", AMX, QUICK), torch.bfloat16, "3.00 times as quick on prompts, 1.50 on single tokens"),
        (PrecisionFacts("auto", AMX, Speedups(3.0, 1.1)), torch.float32, "1.10 on single tokens; 1.2 are asked for"),
        (PrecisionFacts("auto", AMX, Speedups(0.2, 2.0)), torch.float32, "0.20 times as quick on prompts"),
        (PrecisionFacts("auto", AMX, QUICK, 0.001), torch.bfloat16, "by 0.001 nats"),
        (PrecisionFacts("auto", AMX, QUICK, 0.02), torch.float32, "by 0.02 nats; at most 0.005 are allowed"),
        (PrecisionFacts("auto", AMX, QUICK, float("nan")), torch.float32, "by nan nats"),
        (PrecisionFacts("float32", AMX, QUICK, 0.0), torch.float32, "asked for"),
        (PrecisionFacts("bfloat16", frozenset()), torch.bfloat16, "asked for"),
    ],
)
def test_bf16_needs_its_instructions_its_speed_and_its_closeness(facts, dtype, reason):
    choice = choose(facts)
    assert choice.dtype == dtype
    assert reason in choice.reason


def test_instructions_are_read_as_the_kernel_names_them(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile amx_int8\n")
    assert instructions(cpuinfo) == AMX
    cpuinfo.write_text("flags\t\t: fpu avx2 avx512f avx512_fp16 amx_tile\n")
    assert instructions(cpuinfo) == frozenset()
    assert instructions(tmp_path / "nowhere") == frozenset()


def test_what_is_timed_are_the_products_of_one_token():
    public = {"model_type": "kimi_linear", "rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "moe_renormalize": True}
    products = products_of_a_token(parse_config(ORACLE_CONFIG | public))
    # Six KDA layers with q, k, v [128, 256]; seven mixtures with two experts and a shared one, gate and up [96, 256].
    assert products[128, 256] == 6 * 3
    assert products[96, 256] == 7 * 3 * 2
    assert products[256, 128] == 8  # every layer's o_proj: both kinds are as wide


def test_both_types_are_timed():
    assert min(speedups(KimiLinear.load(TINY).config)) > 0


def test_the_shipped_model_says_nearly_the_same_in_bf16(both):
    exact, rounded = both
    assert 1e-6 < rounded.divergence_from(exact.blocks) < MOST_DIVERGENCE / 2
    assert exact.divergence_from(exact.blocks) == 0.0


def test_the_divergence_sees_weights_of_a_few_bits(both, monkeypatch):
    """Negative control: eight bits, of which two are the fraction."""
    damaged = KimiLinear.load(TINY, "bfloat16")
    for block in damaged.blocks:
        for part in (block.attention, block.feed_forward):
            for name, value in vars(part).items():
                if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
                    setattr(part, name, value.to(torch.float8_e5m2).to(torch.bfloat16))
    assert damaged.divergence_from(both[0].blocks) > MOST_DIVERGENCE


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


@pytest.mark.usefixtures("on_amx")
def test_a_quick_processor_takes_bf16_for_the_shipped_model(caplog):
    with caplog.at_level(logging.INFO):
        model = KimiLinear.load(TINY, "auto")
    assert model.blocks[0].attention._qkv.dtype == torch.bfloat16
    assert "matrix products in bfloat16: amx_bf16 and avx512_bf16, bfloat16 is 3.00 times as quick" in caplog.text
    assert model.fingerprint == KimiLinear.load(TINY).fingerprint


@pytest.mark.usefixtures("on_amx")
def test_random_weights_whose_router_rounding_upsets_stay_in_fp32(checkpoint, model, caplog):
    with caplog.at_level(logging.INFO):
        loaded = KimiLinear.load(checkpoint, "auto")
    assert loaded.blocks[0].attention._qkv.dtype == torch.float32
    assert "matrix products in float32: bfloat16: it moves the next token's distribution by" in caplog.text
    assert loaded.fingerprint == model.fingerprint


def test_gates_router_and_attention_stay_fp32(both):
    block, attention = both[1].blocks[1], both[1].blocks[3].attention
    fp32 = [block.attention._gates, block.attention._conv, block.attention._f_b, block.attention._g_b]
    fp32 += [block.feed_forward._gate, attention._kv_b, both[1].embedding, both[1]._head]
    assert {tensor.dtype for tensor in fp32} == {torch.float32}
    assert block.feed_forward._gate_up.dtype == attention._o_proj.dtype == torch.bfloat16
