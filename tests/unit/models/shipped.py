"""The models that ship with prfaas, the scripts that made them, and what new text costs them."""

import importlib.util
import json
import math
from functools import cache
from pathlib import Path
from types import ModuleType

import jinja2
import torch

from prfaas_worker.assets import model_directory
from prfaas_worker.models.base import Model
from prfaas_worker.models.solo import Solo

READ_BYTES, MEASURED_BYTES = 512, 512


MODELS = Path(__file__).parents[3] / "models"


@cache
def script_of(name: str) -> ModuleType:
    """The script that made a model."""
    return _loaded(MODELS / name / "train.py")


@cache
def common() -> ModuleType:
    """What the scripts have in common: text, tokens and loop."""
    return _loaded(MODELS / "training.py")


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"loaded_{path.parent.name}_{path.stem}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def held_out_texts() -> torch.Tensor:
    """The start of each held-out module after a BOS, int64 [modules, READ_BYTES + MEASURED_BYTES]."""
    length = READ_BYTES + MEASURED_BYTES
    return torch.tensor([[common().BOS, *source_of(name)[: length - 1]] for name in common().HELD_OUT])


def source_of(name: str) -> bytes:
    spec = importlib.util.find_spec(name)
    source = spec.loader.get_source(name)
    assert source
    return source.encode()


def bits_per_byte(model: Model, texts: torch.Tensor) -> float:
    """Read READ_BYTES of each text, then score all following bytes: prefill alone, decode as one batch."""
    solo = Solo(model, slots=len(texts), tokens=texts.shape[1])
    sequences = [solo.new() for _ in texts]
    read = [solo.prefill(text[:READ_BYTES], sequence) for text, sequence in zip(texts, sequences, strict=True)]
    logits, nats = model.logits(torch.stack(read)), []
    for column in texts[:, READ_BYTES:].T:
        nats.append(torch.nn.functional.cross_entropy(logits, column))
        logits = solo.decode(column, sequences)
    return torch.stack(nats).mean().item() / math.log(2)


def documents_of(source: str) -> tuple[dict, dict]:
    """config.json and tokenizer_config.json."""
    directory = model_directory(source)
    config, tokenizer = (
        json.loads((directory / name).read_text()) for name in ("config.json", "tokenizer_config.json")
    )
    return config, tokenizer


def check_special_tokens(source: str, ids: dict[str, int]) -> None:
    """Tokenizer, configuration and training agree about the special tokens and the longest text."""
    config, tokenizer = documents_of(source)
    assert sorted(ids.values()) == list(range(256, 264))
    assert max(ids.values()) < config["vocab_size"]
    assert ids[tokenizer["bos_token"]] == config["bos_token_id"] == common().BOS
    assert config["eos_token_id"] == [ids[tokenizer["eos_token"]], ids["<|end_of_turn|>"]]


def check_chat_template(source: str, ids: dict[str, int]) -> None:
    """The template writes what training read."""
    template = jinja2.Environment(autoescape=False).from_string(
        (model_directory(source) / "chat_template.jinja").read_text()
    )
    question, answer = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}
    text = template.render(messages=[question, answer], add_generation_prompt=False)
    for content, number in ids.items():
        text = text.replace(content, chr(number))
    assert [ord(character) for character in text] == common().chat("Hi?", "Yes.")
    prompt = template.render(messages=[question], add_generation_prompt=True)
    assert prompt == "<|bos|><|user|>Hi?<|end_of_turn|><|assistant|>"
