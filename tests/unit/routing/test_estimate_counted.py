"""Proves that estimates are within 15 % of the exact count, on texts that two real vocabularies have counted."""

import json
import random
from pathlib import Path

import msgspec
import pytest

from prfaas.routing.estimate import TokenEstimator
from prfaas.routing.prompt_size import PromptSize, prompt_size, prompt_values


class Counted(msgspec.Struct):
    """A piece of text with its exact length in each vocabulary; `prfaas bench prompt_estimate --save` counted it."""

    text: str
    tokens: dict[str, int]


PIECES = msgspec.json.decode((Path(__file__).parent / "counted.json").read_bytes(), type=dict[str, list[Counted]])
VOCABULARIES = ("32K", "131K")


def size_of(text: str) -> PromptSize:
    body = json.dumps({"prompt": text}).encode()
    return prompt_size(prompt_values(msgspec.json.decode(body, type=dict[str, msgspec.Raw]), {"prompt"}))


def error(estimator: TokenEstimator, pieces: list[Counted], vocabulary: str) -> float:
    """Return the mean error of some prompts, as a part of their length."""
    exact = sum(one.tokens[vocabulary] for one in pieces)
    return sum(abs(estimator.tokens(size_of(one.text)) - one.tokens[vocabulary]) for one in pieces) / exact


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_who_sends_all_kinds_of_text_has_estimates_within_15_percent(vocabulary):
    estimator, order = TokenEstimator(), random.Random(1)
    lessons = [one for pieces in PIECES.values() for one in pieces[::2]]
    for _ in range(3):
        order.shuffle(lessons)
        for one in lessons:
            estimator.observe(size_of(one.text), one.tokens[vocabulary])
    assert {kind for kind, pieces in PIECES.items() if error(estimator, pieces[1::2], vocabulary) > 0.15} == set()


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("kind", PIECES)
def test_who_sends_one_kind_of_text_has_estimates_within_15_percent_after_two_prompts(kind, vocabulary):
    estimator = TokenEstimator()
    for one in PIECES[kind][:2]:
        estimator.observe(size_of(one.text), one.tokens[vocabulary])
    assert error(estimator, PIECES[kind][2:], vocabulary) < 0.15
