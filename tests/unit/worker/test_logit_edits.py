"""Biases and penalties beside their definition, and held-back ends."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.errors import RequestError
from prfaas.wire.engine import Sampling
from prfaas_worker.engine.logit_edits import edit_logits
from prfaas_worker.engine.sampling import sample
from prfaas_worker.engine.sequences import Outputs, Sampler, check_tokens

from .test_sampling import request

VOCAB = 40
EOS = 0
MODEL = Outputs(VOCAB, (EOS,))


def greedy(**changes: object) -> Sampling:
    return Sampling(**{"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 1, **changes})


def reference(logits: list[float], sampling: Sampling, prompt: list[int], generated: list[int]) -> list[float]:
    """The definition, token by token."""
    counts = Counter(generated)
    edited = []
    for token, logit in enumerate(logits):
        value = logit + sum(bias for biased, bias in sampling.logit_bias if biased == token)
        if token in prompt or token in generated:
            penalty = sampling.repetition_penalty
            value = value / penalty if value > 0 else value * penalty
        value -= sampling.frequency_penalty * counts[token] + sampling.presence_penalty * (token in counts)
        edited.append(value)
    return edited


tokens = st.integers(0, VOCAB - 1)
penalised = st.builds(
    greedy,
    presence_penalty=st.sampled_from([0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.2, 0.5]),
    logit_bias=st.lists(st.tuples(tokens, st.floats(-100, 100)), max_size=5).map(tuple),
)


@settings(max_examples=80, deadline=None)
@given(
    sampling=penalised,
    prompt=st.lists(tokens, max_size=30),
    generated=st.lists(tokens, max_size=600),
    seed=st.integers(0, 2**32),
)
def test_penalties_and_biases_are_those_of_their_definition(
    sampling: Sampling, prompt: list[int], generated: list[int], seed: int
):
    logits = 4 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    expected = reference(logits.tolist(), sampling, prompt, generated)
    edit_logits(logits, sampling, frozenset(prompt), Counter(generated))
    torch.testing.assert_close(logits, torch.tensor(expected), rtol=1e-5, atol=1e-4)


def test_penalties_keep_greedy_text_from_repeating_itself():
    logits = torch.arange(VOCAB, 0, -1, dtype=torch.float32)[None] / 10
    plain = Sampler(request(greedy(), ignore_eos=True), 0, MODEL)
    penalised = Sampler(request(greedy(presence_penalty=2.0), ignore_eos=True), 0, MODEL)
    assert [sample(logits.clone(), [plain])[0].token for _ in range(10)] == [0] * 10
    assert [sample(logits.clone(), [penalised])[0].token for _ in range(10)] == list(range(10))


def test_a_bias_of_100_settles_the_draw():
    logits = torch.zeros(1, VOCAB)
    always = Sampler(request(greedy(temperature=1.0, logit_bias=((11, 100.0),))), 0, MODEL)
    assert {sample(logits.clone(), [always])[0].token for _ in range(50)} == {11}
    never = Sampler(
        request(greedy(temperature=1.0, logit_bias=tuple((token, -100.0) for token in range(1, VOCAB)))), 0, MODEL
    )
    assert {sample(logits.clone(), [never])[0].token for _ in range(50)} == {0}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_ends_an_answer_before_min_tokens(temperature: float):
    logits = torch.zeros(1, VOCAB)
    logits[0, [EOS, 7]] = 50.0
    logits[0, 7] = 49.0
    sampler = Sampler(request(greedy(temperature=temperature), min_tokens=5, stop_token_ids=(7,)), 0, MODEL)
    drawn = [sample(logits.clone(), [sampler])[0].token for _ in range(6)]
    assert [token in sampler.ends for token in drawn] == [False] * 5 + [True]


def test_min_tokens_counts_what_was_generated_elsewhere():
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS] = 50.0
    sampler = Sampler(request(greedy(), min_tokens=5), 0, MODEL, [9, 9, 9, 9])
    assert [sample(logits.clone(), [sampler])[0].token for _ in range(2)] == [1, EOS]


def test_with_ignore_eos_the_end_of_sequence_is_a_token_like_others():
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS] = 50.0
    sampler = Sampler(request(greedy(), ignore_eos=True, min_tokens=3, stop_token_ids=(7,)), 0, MODEL)
    assert sampler.ends == {7}
    assert sample(logits, [sampler])[0].token == EOS


@pytest.mark.parametrize(
    ("sampling", "stop_token_ids", "param"),
    [(greedy(logit_bias=((VOCAB, 1.0),)), (), "logit_bias"), (greedy(), (-1,), "stop_token_ids")],
)
def test_tokens_the_model_does_not_have_are_refused(sampling: Sampling, stop_token_ids: tuple[int, ...], param: str):
    with pytest.raises(RequestError) as raised:
        check_tokens(request(sampling, stop_token_ids=stop_token_ids), MODEL.vocab_size)
    assert raised.value.param == param


@pytest.mark.parametrize("penalty", [1e-45, 1e-39, 5e-324])
def test_a_tiny_penalty_makes_a_token_certain_and_no_logit_infinite(penalty: float):
    logits = torch.zeros(VOCAB)
    logits[7], logits[3] = 5.0, -5.0
    edit_logits(logits, greedy(repetition_penalty=penalty), frozenset({3, 7, 9}), Counter())
    assert torch.isfinite(logits).all()
    assert int(logits.argmax()) == 7
    drawn = sample(
        torch.full((1, VOCAB), 2.0), [Sampler(request(greedy(repetition_penalty=penalty), token_ids=[1, 2]), 0, MODEL)]
    )
    assert drawn[0].error is None
