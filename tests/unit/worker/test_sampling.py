"""Drawing tokens: the distribution asked for, and the same draw for the same seed, choice and position anywhere."""

import math
from collections import Counter

import pytest
import torch

from prfaas.wire.engine import Sampling
from prfaas_worker.engine.sampling import Draw, Drawn, draw, uniform

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 3.5])


def sampling(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int = 1) -> Sampling:
    return Sampling(temperature, top_p, top_k, seed)


def drawn_tokens(parameters: Sampling, count: int = 4000) -> Counter[int]:
    draws = [Draw(parameters, 0, position, -1) for position in range(count)]
    return Counter(found.token for found in draw(LOGITS.expand(count, -1), draws))


def test_temperature_0_takes_the_most_likely_token():
    assert drawn_tokens(sampling(temperature=0), 3) == {4: 3}


def test_a_tiny_temperature_is_as_good_as_greedy():
    assert drawn_tokens(sampling(temperature=1e-30), 100) == {4: 100}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_those_of_the_softmax(temperature: float):
    found = drawn_tokens(sampling(temperature=temperature))
    expected = torch.softmax(LOGITS / temperature, dim=-1)
    for token, probability in enumerate(expected.tolist()):
        # Five standard deviations of a binomial count: a fixed seed makes this exact for ever.
        assert abs(found[token] - 4000 * probability) <= 5 * math.sqrt(4000 * probability)


def test_top_k_keeps_the_most_likely():
    assert set(drawn_tokens(sampling(top_k=2))) == {4, 1}
    assert set(drawn_tokens(sampling(top_k=1))) == {4}
    assert set(drawn_tokens(sampling(top_k=99, temperature=2))) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    first, second = torch.softmax(LOGITS, dim=-1).sort(descending=True).values[:2].tolist()
    assert set(drawn_tokens(sampling(top_p=first - 0.001))) == {4}
    assert set(drawn_tokens(sampling(top_p=first + 0.001))) == {4, 1}
    assert set(drawn_tokens(sampling(top_p=first + second + 0.001))) == {4, 1, 2}
    assert set(drawn_tokens(sampling(top_p=1e-9))) == {4}


def test_a_draw_depends_on_seed_choice_and_position_alone():
    many = torch.randn(50, 20, generator=torch.Generator().manual_seed(0))
    draws = [Draw(sampling(seed=row % 7), row % 3, 100 + row, -1) for row in range(50)]
    together = draw(many, draws)
    apart = [draw(many[row : row + 1], [draws[row]])[0] for row in reversed(range(50))]
    assert together == apart[::-1]


def test_random_numbers_differ_by_every_part_of_their_key_and_fill_the_unit_interval():
    keys = [(seed, choice, position) for seed in (-1, 0, 1) for choice in range(3) for position in range(500)]
    numbers = [uniform(*key) for key in keys]
    assert len(set(numbers)) == len(keys)
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.02
    assert uniform(2**63 - 1, 0, 0) != uniform(-(2**63), 0, 0)


def test_logprobs_are_those_of_the_model_whatever_the_temperature():
    expected = torch.log_softmax(LOGITS, dim=-1).tolist()
    (found,) = draw(LOGITS[None], [Draw(sampling(temperature=0.1, top_k=1), 0, 0, 3)])
    assert found.token == 4
    assert found.logprob is not None
    assert found.logprob.logprob == pytest.approx(expected[4], abs=1e-6)
    assert [token for token, _ in found.logprob.top] == [4, 1, 2]
    assert [value for _, value in found.logprob.top] == pytest.approx([expected[4], expected[1], expected[2]], abs=1e-6)


def test_no_logprobs_unless_asked():
    assert draw(LOGITS[None], [Draw(sampling(temperature=0), 0, 0, -1)]) == [Drawn(4, None)]
