"""Proves that the model that ships with prfaas has learned its text, takes long prompts, and fits its own declarations.

Bits per byte are measured on standard-library modules that training never read, through prefill and batched decode as
the engine runs them; random bytes and a model without memory are the controls that show what it would be otherwise.
"""

import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType

import jinja2
import pytest
import torch
from safetensors.torch import load_file

from prfaas_worker.assets import model_directory
from prfaas_worker.models import load_model
from prfaas_worker.models.base import Model
from prfaas_worker.models.solo import Solo

SOURCE = "builtin:kimi-linear-tiny"
BOUND_BITS = 2.8
READ_BYTES, MEASURED_BYTES = 512, 512


@pytest.fixture(scope="module")
def tiny() -> Model:
    return load_model(SOURCE, None)[0]


@pytest.fixture(scope="module")
def training() -> ModuleType:
    """The script that made the model."""
    path = Path(__file__).parents[3] / "models/kimi-linear-tiny/train.py"
    spec = importlib.util.spec_from_file_location("train_kimi_linear_tiny", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def held_out(training: ModuleType) -> torch.Tensor:
    """The start of each held-out module after a BOS, int64 [modules, READ_BYTES + MEASURED_BYTES]."""
    length = READ_BYTES + MEASURED_BYTES
    return torch.tensor([[training.BOS, *source_of(name)[: length - 1]] for name in training.HELD_OUT])


def source_of(name: str) -> bytes:
    spec = importlib.util.find_spec(name)
    source = spec.loader.get_source(name)
    assert source
    return source.encode()


def bits_per_byte(model: Model, texts: torch.Tensor) -> float:
    """Read READ_BYTES of each text, then score every following byte: prefill alone, decode as one batch."""
    solo = Solo(model, slots=len(texts), tokens=texts.shape[1])
    sequences = [solo.new() for _ in texts]
    read = [solo.prefill(text[:READ_BYTES], sequence) for text, sequence in zip(texts, sequences, strict=True)]
    logits, nats = model.logits(torch.stack(read)), []
    for column in texts[:, READ_BYTES:].T:
        nats.append(torch.nn.functional.cross_entropy(logits, column))
        logits = solo.decode(column, sequences)
    return torch.stack(nats).mean().item() / math.log(2)


def test_held_out_text_costs_at_most_the_claimed_bits_per_byte(tiny, held_out):
    assert bits_per_byte(tiny, held_out) <= BOUND_BITS


def test_random_bytes_cost_far_more(tiny, held_out):
    noise = torch.randint(256, held_out[:, :640].shape, generator=torch.Generator().manual_seed(0))
    assert bits_per_byte(tiny, noise) > 8.0


def test_without_its_memory_the_model_is_far_worse(tiny, held_out):
    """The figure comes from the cache that prefill and decode carry: a fresh one for each byte loses it."""
    nats = []
    for position in range(READ_BYTES, READ_BYTES + 64):
        solo = Solo(tiny, slots=len(held_out), tokens=1)
        logits = solo.decode(held_out[:, position - 1], [solo.new() for _ in held_out])
        nats.append(torch.nn.functional.cross_entropy(logits, held_out[:, position]))
    assert torch.stack(nats).mean().item() / math.log(2) > BOUND_BITS + 0.7


def test_a_prompt_of_33000_tokens_is_taken_and_its_memory_is_the_cache_alone(tiny, held_out):
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
    shipped = json.loads((model_directory(SOURCE) / "config.json").read_text())
    assert shipped == training.CONFIG
    stems = {path.stem for path in training.library_files()}
    assert {"json", "asyncio"} & {path.parent.name for path in training.library_files()}
    assert stems.isdisjoint(training.HELD_OUT)


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


def test_special_tokens_config_and_training_agree(training):
    directory = model_directory(SOURCE)
    config = json.loads((directory / "config.json").read_text())
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
    ids = {token["content"]: int(number) for number, token in tokenizer["added_tokens_decoder"].items()}
    assert sorted(ids.values()) == list(range(256, 264))
    assert max(ids.values()) < config["vocab_size"]
    assert ids[tokenizer["bos_token"]] == config["bos_token_id"] == training.BOS
    assert config["eos_token_id"] == [ids[tokenizer["eos_token"]], ids["<|end_of_turn|>"]]
    assert tokenizer["model_max_length"] == config["model_max_length"] > 32_768


def test_the_chat_template_writes_what_training_read(training):
    directory = model_directory(SOURCE)
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
    template = jinja2.Environment(autoescape=False).from_string((directory / "chat_template.jinja").read_text())
    question, answer = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}
    text = template.render(messages=[question, answer], add_generation_prompt=False)
    for number, token in tokenizer["added_tokens_decoder"].items():
        text = text.replace(token["content"], chr(int(number)))
    assert [ord(character) for character in text] == training.chat("Hi?", "Yes.")
    prompt = template.render(messages=[question], add_generation_prompt=True)
    assert prompt == "<|bos|><|user|>Hi?<|end_of_turn|><|assistant|>"
