"""Proves that the whole model on the kernels is the model of the CPU: logits, rows and states, for prompts in one chunk
and in several, for decoding, and for all of it in one step. Weights are the same, everything is fp32."""

import os
from dataclasses import replace

import pytest
import torch

from prfaas.errors import ConfigError
from prfaas_worker.models.base import Batch, Chunk, Decodes
from prfaas_worker.models.kimi_linear.config import KimiLinearConfig
from prfaas_worker.models.kimi_linear.cuda.model import KimiLinearCuda
from prfaas_worker.models.kimi_linear.cuda.sources import MemorySource, RandomSource
from prfaas_worker.models.kimi_linear.cuda.step import PADDING
from prfaas_worker.models.kimi_linear.model import KimiLinear
from prfaas_worker.models.kimi_linear.shapes import expected_shapes
from prfaas_worker.models.solo import Solo

from .reference import relative

CONFIG = KimiLinearConfig(
    vocab_size=96,
    hidden_size=48,
    intermediate_size=80,
    rms_norm_eps=1e-5,
    max_context=512,
    eos_token_ids=frozenset({2}),
    layer_kinds=("linear", "attention", "linear"),
    dense_layers=(True, True, False),
    num_heads=2,
    latent_size=32,
    nope_size=16,
    shared_key_size=16,
    value_size=24,
    kda_heads=2,
    kda_head_size=16,
    conv_kernel=4,
    num_experts=6,
    experts_per_token=2,
    shared_experts=1,
    expert_size=24,
    renormalise=True,
    routed_scale=2.446,
)
# On a GPU the chunk kernels multiply fp32 as tf32.
BOUND = 1e-5 if os.environ.get("TRITON_INTERPRET") == "1" else 5e-3


@pytest.fixture(scope="module")
def tensors():
    source, found = RandomSource(torch.device("cpu")), {}
    for name, shape in expected_shapes(CONFIG).items():
        found[name] = torch.empty(shape)
        source.read(name, found[name])
    return found


def build(tensors, device, dtype=torch.float32):
    return KimiLinearCuda.build(CONFIG, MemorySource(tensors), device, dtype, "same")


@pytest.fixture
def pair(tensors, device):
    """The model on the CPU and the one on the kernels, each over memory of its own; what nobody wrote is NaN."""
    solos = [
        Solo(model, slots=4, tokens=128) for model in (KimiLinear(CONFIG, tensors, "same"), build(tensors, device))
    ]
    for solo in solos:
        solo.memory.pages.fill_(255)
    return solos


def tokens_of(count, seed=0):
    return torch.randint(CONFIG.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


def run(solo: Solo, order=None):
    """Prompts, the longer of them in more than a page, decodes, then everything in one step; logits of all steps."""
    a, b, c = solo.new(), solo.new(), solo.new()
    hidden = [solo.prefill(tokens_of(65), a, order).unsqueeze(0), solo.prefill(tokens_of(3, 1), b).unsqueeze(0)]
    logits = [solo.model.logits(part) for part in hidden]
    logits.append(solo.decode(tokens_of(2, 3), [a, b]))
    device = solo.model.device
    decodes = Decodes(torch.tensor([b.slot], device=device), torch.tensor([b.length], device=device), b.length)
    chunks = (Chunk(c.slot, 0, 2), Chunk(a.slot, a.length, 5))
    logits.append(solo.model.logits(solo.model.forward(Batch(tokens_of(8, 9), chunks, decodes))))
    a.length, b.length, c.length = a.length + 5, b.length + 1, 2
    return torch.cat(logits).cpu(), (a, b, c)


def test_all_kinds_of_steps_give_the_logits_of_the_cpu_and_leave_its_cache(pair):
    plain, ours = pair
    order = []
    right, sequences = run(plain)
    found, _ = run(ours, order.append)
    assert found.shape == right.shape
    assert relative(found, right) < BOUND
    assert order == [0, 1, 2]
    for sequence in sequences:
        rows, ours_rows = (
            solo.memory.rows(1)["latent"][solo.pages(sequence)].flatten(0, 1)[: sequence.length].cpu() for solo in pair
        )
        assert relative(ours_rows, rows) < BOUND
        for layer in (0, 2):
            for name, state in plain.memory.states(layer).items():
                assert relative(ours.memory.states(layer)[name][sequence.slot].cpu(), state[sequence.slot]) < BOUND


def test_a_step_with_rows_to_spare_gives_the_same_and_touches_no_other_cache(pair):
    _, ours = pair
    sequence, memory, device = ours.new(), ours.memory, ours.model.device
    ours.prefill(tokens_of(4), sequence)
    pages, slots = memory.pages.clone(), memory.slots.clone()

    def step(rows):
        memory.pages.copy_(pages)
        memory.slots.copy_(slots)
        decodes = Decodes(torch.tensor(rows, device=device), torch.full((len(rows),), 4, device=device), 4)
        return ours.model.forward(Batch(tokens_of(1, 5).repeat(len(rows)), (), decodes))

    alone, padded = step([sequence.slot])[0], step([PADDING, sequence.slot, PADDING])[1]
    assert relative(padded, alone) < BOUND
    own = memory.table[sequence.slot, 0]
    pages[own], slots[sequence.slot] = memory.pages[own], memory.slots[sequence.slot]
    assert torch.equal(memory.pages, pages)
    assert torch.equal(memory.slots, slots)


def test_in_bf16_it_is_the_same_model_but_for_rounding(tensors, pair, device):
    plain, _ = pair
    ours = Solo(build(tensors, device, torch.bfloat16), slots=4, tokens=128)
    assert {spec.dtype for layer in ours.model.layers for spec in (*layer.rows, *layer.state)} == {
        "bfloat16",
        "float32",
    }
    logits = []
    for solo in (plain, ours):
        sequence = solo.new()
        first = solo.model.logits(solo.prefill(tokens_of(12), sequence))
        logits.append(torch.cat([first.unsqueeze(0), solo.decode(tokens_of(1, 3), [sequence])]).cpu())
    assert relative(logits[1], logits[0]) < 0.05


def test_a_damaged_cache_is_seen(pair):
    """The check itself: a transposed state and rows of another sequence move the logits far beyond the bound."""
    _, ours = pair
    sequence, other, memory = ours.new(), ours.new(), ours.memory
    ours.prefill(tokens_of(6), sequence)
    ours.prefill(tokens_of(6, 1), other)
    slots = memory.slots.clone()
    right = ours.decode(tokens_of(1, 4), [sequence])

    def again():
        sequence.length = 6
        return ours.decode(tokens_of(1, 4), [sequence])

    memory.slots.copy_(slots)
    assert relative(again(), right) < BOUND
    memory.slots.copy_(slots)
    state = memory.states(2)["recurrent"][sequence.slot]
    state.copy_(state.mT.clone())
    assert relative(again(), right) > 20 * BOUND
    memory.slots.copy_(slots)
    memory.table[sequence.slot] = memory.table[other.slot]
    assert relative(again(), right) > 20 * BOUND


def test_sizes_that_the_kernels_cannot_hold_are_refused_by_name(tensors, device):
    with pytest.raises(ConfigError, match="kv_lora_rank is 48"):
        KimiLinearCuda.build(replace(CONFIG, latent_size=48), MemorySource(tensors), device, torch.float32, "same")
    with pytest.raises(ConfigError, match="v_head_dim is 40"):
        KimiLinearCuda.build(replace(CONFIG, value_size=40), MemorySource(tensors), device, torch.float32, "same")
