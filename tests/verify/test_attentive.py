"""The attentive models depend on all of their context, through both kinds of cache: else no fault would show."""

import random
from collections.abc import Callable

import pytest
import torch

from prfaas_worker.models import load_model
from prfaas_worker.models.base import Model
from prfaas_worker.models.solo import Solo, SoloSequence

from .attentive import make_attentive_model, make_attentive_qwen3_next

CLEAR_NATS = 0.3

Harm = Callable[[Solo, SoloSequence], None]


@pytest.fixture(scope="module", params=[make_attentive_model, make_attentive_qwen3_next])
def attentive(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(str(request.param(tmp_path_factory.mktemp("attentive") / "model")), 1)[0]


def tokens(length: int) -> list[int]:
    return list(random.Random(length).randbytes(length).hex()[:length].encode())


def scores(model: Model, prompt: list[int], harm: Harm = lambda _solo, _sequence: None) -> torch.Tensor:
    """Log probabilities of the first token behind a prompt; its cache is harmed before the last token is computed."""
    solo = Solo(model, slots=1, tokens=1024)
    sequence = solo.new()
    solo.prefill(torch.tensor(prompt[:-1]), sequence)
    harm(solo, sequence)
    return solo.decode(torch.tensor(prompt[-1:]), [sequence])[0].log_softmax(-1)


def moved(model: Model, prompt: list[int], found: torch.Tensor) -> float:
    """By how many nats the likeliest tokens of a prompt differ."""
    wanted = scores(model, prompt)
    likeliest = wanted.topk(5).indices
    return float((found - wanted)[likeliest].abs().max())


@pytest.mark.parametrize("length", [100, 300, 700])
def test_half_of_the_context_makes_another_answer(attentive: Model, length: int):
    prompt = tokens(length)
    assert moved(attentive, prompt, scores(attentive, prompt[length // 2 :])) > CLEAR_NATS
    assert moved(attentive, prompt, scores(attentive, prompt)) == 0


def lose_rows(solo: Solo, sequence: SoloSequence) -> None:
    solo.memory.pages[solo.pages(sequence)] = 0


def lose_state(solo: Solo, sequence: SoloSequence) -> None:
    solo.memory.clear_slot(sequence.slot)


@pytest.mark.parametrize("length", [100, 300, 700])
@pytest.mark.parametrize("harm", [lose_rows, lose_state], ids=["rows", "state"])
def test_either_cache_alone_makes_another_answer(attentive: Model, harm: Harm, length: int):
    prompt = tokens(length)
    assert moved(attentive, prompt, scores(attentive, prompt, harm)) > CLEAR_NATS
