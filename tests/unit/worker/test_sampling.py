"""A row's draw depends only on its logits and its sampler, and a sampler on the request and the tokens so far."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.errors import InternalError, RequestError
from prfaas.wire.engine import Generate, Sampling
from prfaas_worker.engine.sampling import sample, uniform
from prfaas_worker.engine.sequences import Outputs, Sampler
from prfaas_worker.engine.steps import Drawn

PROMPT = [3, 1, 4, 1, 5]
VOCAB = 300
MODEL = Outputs(VOCAB, (2,))


def request(sampling: Sampling, **fields: object) -> Generate:
    common = {"handle": 1, "request_id": "r", "token_ids": PROMPT, "choices": 1, "max_tokens": 99}
    return Generate(**{**common, "sampling": sampling, "logprobs": -1, **fields})


def greedy(**fields: object) -> Generate:
    return request(Sampling(0.0, 1.0, 0, 1), **fields)


def samplings() -> st.SearchStrategy[Sampling]:
    return st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        top_p=st.sampled_from([1.0, 0.3, 0.95]),
        top_k=st.sampled_from([0, 1, 5, 400]),
        seed=st.integers(-(2**63), 2**63 - 1),
        min_p=st.sampled_from([0.0, 0.1]),
        presence_penalty=st.sampled_from([0.0, 0.5]),
        frequency_penalty=st.sampled_from([0.0, -0.7]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        logit_bias=st.sampled_from([(), ((7, 3.0), (8, -100.0))]),
    )


def requests() -> st.SearchStrategy[Generate]:
    return st.builds(
        request,
        samplings(),
        logprobs=st.sampled_from([-1, 0, 4]),
        min_tokens=st.sampled_from([0, 2]),
        stop_token_ids=st.sampled_from([(), (9, 10)]),
        ignore_eos=st.booleans(),
    )


def random_logits(rows: int, seed: int) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(batch=st.lists(requests(), min_size=1, max_size=8), seed=st.integers(0, 2**32))
def test_a_row_is_drawn_the_same_alone_and_in_any_batch(batch: list[Generate], seed: int):
    together = [Sampler(one, row % 3, MODEL) for row, one in enumerate(batch)]
    alone = [Sampler(one, row % 3, MODEL) for row, one in enumerate(batch)]
    for step in range(3):
        logits = random_logits(len(batch), seed + step)
        backward = reversed(range(len(batch)))
        apart = {row: sample(logits[row : row + 1].clone(), [alone[row]])[0] for row in backward}
        assert sample(logits, together) == [apart[row] for row in range(len(batch))]


@settings(max_examples=60, deadline=None)
@given(generate=requests(), steps=st.integers(0, 40), seed=st.integers(0, 2**32))
def test_a_new_sampler_elsewhere_continues_as_the_first_would_have(generate: Generate, steps: int, seed: int):
    first = Sampler(generate, 1, MODEL)
    generated = [sample(random_logits(1, seed + step), [first])[0].token for step in range(steps)]
    second = Sampler(generate, 1, MODEL, generated)
    for step in range(steps, steps + 5):
        assert sample(random_logits(1, seed + step), [second]) == sample(random_logits(1, seed + step), [first])


def test_random_numbers_differ_by_every_part_of_their_key_and_fill_the_unit_interval():
    keys = [(seed, choice, position) for seed in (-1, 0, 1) for choice in range(3) for position in range(500)]
    numbers = [uniform(*key) for key in keys]
    assert len(set(numbers)) == len(keys)
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.02
    assert uniform(2**63 - 1, 0, 0) != uniform(-(2**63), 0, 0)


def test_of_equally_likely_tokens_the_first_is_taken_and_named_first():
    logits = random_logits(6, 4).round()
    drawn = sample(logits, [Sampler(greedy(logprobs=20), 0, MODEL) for _ in range(6)])
    for row, one in zip(logits.numpy(), drawn, strict=True):
        order = np.argsort(-row, kind="stable").tolist()
        assert one.token == order[0]
        assert one.logprob is not None
        assert [token for token, _ in one.logprob.top] == order[:20]


def test_logprobs_are_those_of_the_model_whatever_changes_the_draw():
    logits = random_logits(3, 1)
    expected = torch.log_softmax(logits, dim=-1)
    banned = int(logits[0].argmax())
    odd = Sampling(0.1, 0.9, 3, 1, repetition_penalty=2.0, logit_bias=((banned, -100.0),))
    batch = [request(odd, logprobs=3), greedy(), greedy(logprobs=0)]
    drawn = sample(logits, [Sampler(one, 0, MODEL) for one in batch])
    assert drawn[0].token != banned
    assert drawn[0].logprob is not None
    assert drawn[0].logprob.logprob == pytest.approx(float(expected[0, drawn[0].token]), abs=1e-6)
    assert [token for token, _ in drawn[0].logprob.top] == expected[0].topk(3).indices.tolist()
    assert [value for _, value in drawn[0].logprob.top] == pytest.approx(expected[0].topk(3).values.tolist(), abs=1e-6)
    assert drawn[1] == Drawn(drawn[1].token, None)
    assert drawn[2].logprob is not None
    assert drawn[2].logprob.top == []


def test_choices_may_share_one_row_of_logits():
    shared = random_logits(1, 2)
    best = int(shared.argmax())
    samplers = [
        Sampler(greedy(), 0, MODEL),
        Sampler(request(Sampling(0.0, 1.0, 0, 1, logit_bias=((best, -99.0),))), 1, MODEL),
    ]
    first, second = sample(shared.expand(2, -1), samplers)
    assert first.token == best
    assert second.token != best


@pytest.mark.parametrize("damage", [math.nan, math.inf])
def test_logits_that_are_no_numbers_end_only_their_own_row(damage: float):
    logits = random_logits(3, 3)
    expected = int(logits[2].argmax())
    logits[0, 17] = damage
    logits[1] = -math.inf
    batch = [request(Sampling(1.0, 0.9, 0, 1)), request(Sampling(1.0, 1.0, 0, 1)), greedy()]
    drawn = sample(logits, [Sampler(one, 0, MODEL) for one in batch])
    assert isinstance(drawn[0].error, InternalError)
    assert isinstance(drawn[1].error, InternalError)
    assert drawn[2] == Drawn(expected, None)


def test_a_row_whose_every_token_is_ruled_out_is_the_requests_own_error():
    model = Outputs(3, (0,))
    stuck = Sampler(greedy(token_ids=[1], min_tokens=1, stop_token_ids=(1, 2)), 0, model)
    other = Sampler(greedy(token_ids=[1]), 0, model)
    drawn = sample(torch.tensor([[1.0, 2.0, 3.0]] * 2), [stuck, other])
    assert isinstance(drawn[0].error, RequestError)
    assert drawn[1] == Drawn(2, None)
