"""`prfaas contract` takes one engine or a pair, and equal answers differ by rounding only."""

import math
from typing import Any

import pytest

from prfaas.cli.contract.calls import CheckedAnswer
from prfaas.cli.contract.command import contract
from prfaas.errors import ConfigError, PeerError, UnreachableError
from prfaas.measure.scores import difference


@pytest.mark.parametrize(
    ("urls", "words", "kind"),
    [
        (["http://a:1", "http://b:1", "http://c:1"], "give one engine", ConfigError),
        (["http://a:1", "http://a:1"], "a source and another", ConfigError),
        (["a:1"], "--url is 'a:1'", ConfigError),
        (["http://127.0.0.1:9"], "http://127.0.0.1:9 does not answer", UnreachableError),
    ],
)
def test_what_is_no_engine_and_no_pair_is_refused(urls: list[str], words: str, kind: type[Exception]):
    with pytest.raises(kind, match=words):
        contract(urls)


def scores(tokens: str, values: tuple[float, ...] = (-0.1, -0.1, -0.1), **others: float) -> dict[str, Any]:
    tops = [{token: value} | others for token, value in zip(tokens, values, strict=False)]
    return {"tokens": list(tokens), "token_logprobs": list(values)[: len(tokens)], "top_logprobs": tops}


@pytest.mark.parametrize(
    ("found", "nats"),
    [
        (scores("abc", (-0.1, -0.3, -0.2)), 0.2),
        (scores("axy", (-0.1, -0.3, -9.0)), 0.2),  # behind another token nothing is compared
        (scores("ayy"), math.inf),  # a token that was none of the likely ones
        (scores("ab"), math.inf),
    ],
)
def test_equal_answers_differ_by_the_largest_difference_until_their_tokens_do(found: dict[str, Any], nats: float):
    assert difference(found, scores("abc", x=-0.3)) == pytest.approx(nats)


def test_an_answer_without_logprobs_is_not_compared():
    with pytest.raises(PeerError, match="without them"):
        CheckedAnswer(200, {}, {"choices": [{"logprobs": None}]}).scores  # noqa: B018
