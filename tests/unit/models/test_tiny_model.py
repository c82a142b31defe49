"""Proves that the model that ships with prfaas has learned its text, takes long prompts, and fits its own declarations.

Bits per byte are measured on standard-library modules that training never read, through prefill and batched decode as
the engine runs them; random bytes are the control that shows what it would be otherwise.
"""

from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from prfaas_worker.assets import model_directory
from prfaas_worker.models import load_model
from prfaas_worker.models.base import Model
from prfaas_worker.models.kimi_linear.config import parse_config
from prfaas_worker.models.solo import Solo

from .shipped import (
    bits_per_byte,
    check_chat_template,
    check_special_tokens,
    common,
    documents_of,
    held_out_texts,
    script_of,
)

SOURCE = "builtin:kimi-linear-tiny"
BOUND_BITS = 2.8


@pytest.fixture(scope="module")
def tiny() -> Model:
    return load_model(SOURCE, None)[0]


@pytest.fixture(scope="module")
def training() -> ModuleType:
    """The script that made the model."""
    return script_of("kimi-linear-tiny")


@pytest.fixture(scope="module")
def held_out() -> torch.Tensor:
    return held_out_texts()


def test_held_out_text_costs_at_most_the_claimed_bits_per_byte(tiny, held_out):
    assert bits_per_byte(tiny, held_out) <= BOUND_BITS


def test_random_bytes_cost_far_more(tiny, held_out):
    noise = torch.randint(256, held_out[:, :640].shape, generator=torch.Generator().manual_seed(0))
    assert bits_per_byte(tiny, noise) > 8.0


def test_accepts_a_prompt_of_33000_tokens_and_its_memory_is_only_the_cache(tiny, held_out):
    tokens = held_out.flatten().repeat(4)[:33_000]
    solo = Solo(tiny, slots=1, tokens=33_001)
    sequence = solo.new()
    for chunk in tokens.split(4096):
        hidden = solo.prefill(chunk, sequence)
    assert sequence.length == 33_000
    assert tiny.logits(hidden).isfinite().all()
    assert solo.decode(torch.tensor([32]), [sequence]).isfinite().all()
    assert solo.memory.pages.nbytes == 516 * 64 * 64 * 4


def test_the_script_declares_what_ships_and_never_reads_the_held_out_modules(training):
    assert documents_of(SOURCE)[0] == training.CONFIG
    files = common().library_files()
    stems = {path.stem for path in files}
    assert {"json", "asyncio"} & {path.parent.name for path in files}
    assert stems.isdisjoint(common().HELD_OUT)


def test_training_computes_what_serving_does(tiny, training, held_out):
    tensors = load_file(model_directory(SOURCE) / "model.safetensors")
    logits, loads = training.forward(tiny.config, tensors, held_out[:2, :100])
    solo = Solo(tiny)
    served = [tiny.logits(solo.prefill(text, solo.new())) for text in held_out[:2, :100]]
    assert (logits[:, -1] - torch.stack(served)).abs().max() < 1e-4
    assert [load.sum().item() for load in loads] == [2 * 100 * 2] * 3


def test_every_expert_is_used(tiny, training, held_out):
    tensors = load_file(model_directory(SOURCE) / "model.safetensors")
    _, loads = training.forward(tiny.config, tensors, held_out)
    for load in loads:
        assert load.min() > load.sum() / len(load) / 10


def test_gradients_reach_every_parameter(training):
    """What the checkpoint's loader joins and stacks is made of parameters here."""
    config = parse_config(training.CONFIG)
    tensors = training.initial_tensors(config)
    logits, _ = training.forward(config, tensors, torch.arange(100).unsqueeze(0))
    logits.square().mean().backward()
    without = [name for name, tensor in tensors.items() if tensor.requires_grad and tensor.grad is None]
    assert without == []
    assert tensors["model.layers.3.self_attn.kv_b_proj.weight"].grad.abs().sum() > 0


def test_special_tokens_config_and_training_agree():
    check_special_tokens(SOURCE, special_ids())
    config, tokenizer = documents_of(SOURCE)
    assert tokenizer["model_max_length"] == config["model_max_length"] > 32_768


def test_the_chat_template_writes_what_training_read():
    check_chat_template(SOURCE, special_ids())


def special_ids() -> dict[str, int]:
    _, tokenizer = documents_of(SOURCE)
    return {token["content"]: int(number) for number, token in tokenizer["added_tokens_decoder"].items()}
