"""Proves of the Qwen3-Next that ships what `tests/unit/models/test_tiny_model.py` proves of the Kimi Linear: it has
learned its text, its files agree, and its tokens are those of its sibling.
"""

from types import ModuleType

import pytest
import torch

from prfaas_worker.assets import model_directory
from prfaas_worker.models import load_model
from prfaas_worker.models.base import Model
from prfaas_worker.models.solo import Solo
from prfaas_worker.tokenizer import Conversation, load_tokenizer

from ..models.shipped import (
    READ_BYTES,
    bits_per_byte,
    check_chat_template,
    check_special_tokens,
    documents_of,
    held_out_texts,
    script_of,
)

SOURCE, SIBLING = "builtin:qwen3-next-tiny", "builtin:kimi-linear-tiny"
BOUND_BITS = 2.8


@pytest.fixture(scope="module")
def tiny() -> Model:
    return load_model(SOURCE, None)[0]


@pytest.fixture(scope="module")
def training() -> ModuleType:
    """The script that made the model."""
    return script_of("qwen3-next-tiny")


@pytest.fixture(scope="module")
def held_out() -> torch.Tensor:
    """Shorter than its sibling's, as steps through transformers take longer."""
    return held_out_texts()[:, : READ_BYTES + 64]


def test_held_out_text_costs_at_most_the_claimed_bits_per_byte(tiny, held_out):
    assert bits_per_byte(tiny, held_out) <= BOUND_BITS


def test_all_files_but_the_weights_are_those_that_the_script_writes(training, tmp_path):
    training.write_texts(tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    shipped = {path.name: path.read_bytes() for path in model_directory(SOURCE).iterdir() if path.name in written}
    assert written == shipped
    assert {path.name for path in model_directory(SOURCE).iterdir()} - set(written) == {
        "model.safetensors",
        "README.md",
    }


def test_training_computes_what_serving_does(tiny, training, held_out):
    trained = training.trained_model(model_directory(SOURCE))
    made = training.forward(trained, held_out[:2, :100])
    solo = Solo(tiny)
    served = [tiny.logits(solo.prefill(text, solo.new())) for text in held_out[:2, :100]]
    assert (made.logits[:, -1] - torch.stack(served)).abs().max() < 1e-4
    assert [load.sum().item() for load in made.loads] == [2 * 100 * 2] * 4


def test_every_expert_is_used(training, held_out):
    made = training.forward(training.trained_model(model_directory(SOURCE)), held_out)
    for load in made.loads:
        assert load.min() > load.sum() / len(load) / 20


def test_the_weights_are_small_and_their_heads_divide_by_two_ranks():
    config, _ = documents_of(SOURCE)
    assert (model_directory(SOURCE) / "model.safetensors").stat().st_size < 5_000_000
    heads = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
    assert [config[name] % 2 for name in heads] == [0, 0, 0, 0]


def test_special_tokens_config_and_training_agree():
    ids = dict(load_tokenizer(model_directory(SOURCE)).specials)
    check_special_tokens(SOURCE, ids)
    check_chat_template(SOURCE, ids)


def test_text_and_chats_have_the_tokens_of_the_sibling():
    """Otherwise a question that one model has learned would be another one here."""
    ours, theirs = (load_tokenizer(model_directory(source)) for source in (SOURCE, SIBLING))
    text = "a\tb  \n\n c é \u2028 \U0001f600 <|user|> end"
    chat = Conversation([{"role": "system", "content": text}, {"role": "user", "content": "?"}])
    assert ours.encode(text) == theirs.encode(text)
    assert ours.encode_chat(chat) == theirs.encode_chat(chat)
    assert ours.specials == theirs.specials


def test_transformers_reads_the_same_tokens_from_the_directory():
    """As vLLM does, with its own chat template and special tokens."""
    from transformers import AutoTokenizer

    directory = model_directory(SOURCE)
    theirs, ours = AutoTokenizer.from_pretrained(directory), load_tokenizer(directory)
    messages = [{"role": "user", "content": "Wie heißt\tdas? \U0001f600"}]
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert theirs.encode("x é\n") == ours.encode("x é\n")
    assert theirs.encode(rendered, add_special_tokens=False) == ours.encode_chat(Conversation(messages))
    assert theirs.decode(ours.encode("x é\n"), skip_special_tokens=True) == "x é\n"
