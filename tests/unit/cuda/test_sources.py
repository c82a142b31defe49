"""Proves that a checkpoint's files, tensors in memory and chance each fill a GPU model's weights by their public names,
joined and stacked as the kernels take them."""

import pytest
import torch
from safetensors.torch import save_file

from prfaas_worker.models.kimi_linear.checkpoint import Checkpoint
from prfaas_worker.models.kimi_linear.config import KimiLinearConfig
from prfaas_worker.models.kimi_linear.cuda.sources import MemorySource, RandomSource
from prfaas_worker.models.kimi_linear.shapes import expected_shapes

pytest.importorskip("triton")

from prfaas_worker.models.kimi_linear.cuda.weights import DeltaWeights, ExpertWeights, LatentWeights, Loader

CONFIG = KimiLinearConfig(
    vocab_size=20,
    hidden_size=12,
    intermediate_size=16,
    rms_norm_eps=1e-5,
    max_context=64,
    eos_token_ids=frozenset({2}),
    layer_kinds=("linear", "attention"),
    dense_layers=(True, False),
    num_heads=2,
    latent_size=6,
    nope_size=3,
    shared_key_size=2,
    value_size=4,
    kda_heads=2,
    kda_head_size=5,
    conv_kernel=4,
    num_experts=3,
    experts_per_token=2,
    shared_experts=1,
    expert_size=7,
    renormalise=True,
    routed_scale=1.0,
)


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(*shape, generator=generator) for name, shape in expected_shapes(CONFIG).items()}


def test_a_checkpoints_files_fill_the_weights_in_the_type_asked_for(tensors, tmp_path):
    save_file(tensors, tmp_path / "model.safetensors")
    loader = Loader.of(Checkpoint(tmp_path, CONFIG), CONFIG, torch.device("cpu"), torch.bfloat16)
    delta = DeltaWeights.load(loader.under("model.layers.0").under("self_attn"), CONFIG)
    prefix = "model.layers.0.self_attn."
    q, b = tensors[f"{prefix}q_proj.weight"], tensors[f"{prefix}b_proj.weight"]
    assert torch.equal(delta.inputs[: len(q)], q.bfloat16())
    assert torch.equal(delta.inputs[-len(b) :], b.bfloat16())
    assert torch.equal(delta.taps[10:20], tensors[f"{prefix}k_conv1d.weight"].squeeze(1).bfloat16())
    assert torch.equal(delta.decay_log, tensors[f"{prefix}A_log"].flatten())
    assert delta.decay_bias.dtype == torch.float32


def test_experts_are_stacked_gate_before_up_and_kv_b_value_before_key(tensors):
    loader = Loader.of(MemorySource(tensors), CONFIG, torch.device("cpu"), torch.float32).under("model.layers.1")
    experts = ExpertWeights.load(loader.under("block_sparse_moe"), CONFIG)
    prefix = "model.layers.1.block_sparse_moe.experts.2."
    w1, w2, w3 = (tensors[f"{prefix}w{i}.weight"] for i in (1, 2, 3))
    assert torch.equal(experts.gate_up[2], torch.cat([w1, w3]))
    assert torch.equal(experts.down[2], w2)
    public = tensors["model.layers.1.self_attn.kv_b_proj.weight"].unflatten(0, (2, 7))
    latent = LatentWeights.load(loader.under("self_attn"), CONFIG)
    assert torch.equal(latent.expand, torch.cat([public[:, 3:], public[:, :3]], dim=1))


def test_weights_by_chance_are_those_that_training_begins_with():
    source = RandomSource(torch.device("cpu"), seed=1)
    a_log, dt_bias, norm, wide = torch.empty(2000), torch.empty(2000), torch.empty(5), torch.empty(100, 64)
    for name, out in {"A_log": a_log, "dt_bias": dt_bias, "o_norm.weight": norm, "q_proj.weight": wide}.items():
        source.read(name, out)
    assert 0 <= a_log.exp().min() - 1 < 0.1
    assert 15.9 < a_log.exp().max() <= 16.001
    steps = torch.nn.functional.softplus(dt_bias)
    assert 0.0009 < steps.min() < 0.002
    assert 0.08 < steps.max() <= 0.1001
    assert torch.equal(norm, torch.ones(5))
    assert abs(wide.std().item() - 1 / 8) < 0.01
    again = torch.empty(2000)
    RandomSource(torch.device("cpu"), seed=1).read("A_log", again)
    assert torch.equal(again, a_log)
