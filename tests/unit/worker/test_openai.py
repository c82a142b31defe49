"""Request bodies: what is right becomes a job, what is wrong becomes a 4xx that names the field, and nothing that would
change the answer is ignored.
"""

from typing import Any

import msgspec
import pytest

from prfaas.errors import RequestError
from prfaas.wire.engine import Sampling
from prfaas_worker.assets import model_directory
from prfaas_worker.front.openai import Job, Served, chat_job, completion_job
from prfaas_worker.tokenizer import load_tokenizer

SERVED = Served(model_name="tiny", vocab_size=264, max_context=100, max_choices=8)
TINY = load_tokenizer(model_directory("builtin:kimi-linear-tiny"))
HELLO = [{"role": "user", "content": "hello"}]


def completion(**fields: Any) -> Job:
    body = {"model": "tiny", "prompt": "hello"} | fields
    return completion_job(msgspec.json.encode(body), SERVED, TINY)


def chat(**fields: Any) -> Job:
    body = {"model": "tiny", "messages": HELLO} | fields
    return chat_job(msgspec.json.encode(body), SERVED, TINY)


def test_a_bare_completion_gets_the_apis_defaults():
    job = completion(seed=5)
    assert job == Job(
        chat=False,
        token_ids=[256, *b"hello"],
        choices=1,
        max_tokens=16,
        sampling=Sampling(1.0, 1.0, 0, 5),
        stop=[],
        logprobs=-1,
        stream=False,
        include_usage=False,
    )


def test_every_served_field_arrives():
    job = completion(
        prompt=[1, 2, 263],
        max_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=3,
        seed=-9,
        stop=["a", "b"],
        n=4,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=2,
        user="someone",
        unheard_of={"x": 1},
    )
    assert (job.token_ids, job.max_tokens, job.sampling) == ([1, 2, 263], 7, Sampling(0, 0.5, 3, -9))
    assert (job.stop, job.choices, job.stream, job.include_usage, job.logprobs) == (["a", "b"], 4, True, True, 2)


def test_null_is_as_good_as_absent():
    nulls = ["max_tokens", "temperature", "top_p", "top_k", "stop", "n", "stream", "stream_options", "logit_bias"]
    assert completion(seed=1, **dict.fromkeys(nulls)) == completion(seed=1)


def test_without_a_seed_every_request_draws_its_own():
    assert completion().sampling.seed != completion().sampling.seed


def test_a_batch_of_one_prompt_is_that_prompt():
    assert completion(prompt=["hello"]).token_ids == completion(prompt="hello").token_ids
    assert completion(prompt=[[1, 2]]).token_ids == [1, 2]


def test_a_chat_without_limit_may_fill_the_context():
    job = chat()
    assert job.chat
    assert len(job.token_ids) + job.max_tokens == SERVED.max_context


def test_chat_limits_logprobs_and_parts_are_read():
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    job = chat(messages=[{"role": "user", "content": parts}], max_completion_tokens=3, logprobs=True, top_logprobs=5)
    assert (job.token_ids, job.max_tokens, job.logprobs) == (chat().token_ids, 3, 5)
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=False).logprobs == -1


def refused(function: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as raised:
        function(**fields)
    return raised.value


@pytest.mark.parametrize("function", [completion, chat])
@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"max_tokens": 0}, "max_tokens", "must be at least 1"),
        ({"max_tokens": "many"}, "max_tokens", "Expected `int | null`, got `str`"),
        ({"max_tokens": True}, "max_tokens", "got `bool`"),
        ({"max_tokens": 1.5}, "max_tokens", "got `float`"),
        ({"n": 0}, "n", "must be 1 to 8"),
        ({"n": -1}, "n", "must be 1 to 8"),
        ({"n": 9}, "n", "must be 1 to 8"),
        ({"temperature": -0.1}, "temperature", "must be 0 to 2"),
        ({"temperature": 2.1}, "temperature", "must be 0 to 2"),
        ({"temperature": "hot"}, "temperature", "got `str`"),
        ({"top_p": 0}, "top_p", "must be above 0"),
        ({"top_p": 1.1}, "top_p", "must be above 0"),
        ({"top_k": -2}, "top_k", "must be at least 1"),
        ({"seed": 1 << 63}, "seed", "64-bit"),
        ({"stop": ""}, "stop", "empty string"),
        ({"stop": ["a", ""]}, "stop", "empty string"),
        ({"stop": list("abcde")}, "stop", "at most 4"),
        ({"stop": [1]}, "stop", "Expected `str`, got `int`"),
        ({"stream": "yes"}, "stream", "got `str`"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "is not served"),
        ({"presence_penalty": -1}, "presence_penalty", "is not served"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "is not served"),
        ({"model": 7}, "model", "got `int`"),
    ],
)
def test_a_wrong_field_is_a_400_that_names_it(function: Any, fields: dict[str, Any], param: str, sentence: str):
    error = refused(function, **fields)
    assert (error.status, error.param) == (400, param)
    assert sentence in str(error)


@pytest.mark.parametrize(
    ("function", "fields", "param"),
    [
        (completion, {"prompt": ""}, None),  # the beginning token alone is a prompt
        (completion, {"prompt": []}, "prompt"),
        (completion, {"prompt": 5}, "prompt"),
        (completion, {"prompt": None}, "prompt"),
        (completion, {"prompt": [264]}, "prompt"),
        (completion, {"prompt": [-1]}, "prompt"),
        (completion, {"prompt": [1.0]}, "prompt"),
        (completion, {"prompt": [True]}, "prompt"),
        (completion, {"prompt": ["a", "b"]}, "prompt"),
        (completion, {"prompt": [[1], [2]]}, "prompt"),
        (completion, {"prompt": [1, "a"]}, "prompt"),
        (completion, {"echo": True}, "echo"),
        (completion, {"suffix": "x"}, "suffix"),
        (completion, {"best_of": 2}, "best_of"),
        (completion, {"logprobs": 21}, "logprobs"),
        (chat, {"messages": []}, "messages"),
        (chat, {"messages": "hello"}, "messages"),
        (chat, {"messages": [{"role": "user"}]}, "messages"),
        (chat, {"messages": [{"role": "user", "content": None}]}, "messages"),
        (chat, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        (chat, {"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        (chat, {"tools": [{"type": "function"}]}, "tools"),
        (chat, {"response_format": {"type": "json_object"}}, "response_format"),
        (chat, {"top_logprobs": 2}, "top_logprobs"),
        (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ],
)
def test_each_endpoints_own_fields_are_checked(function: Any, fields: dict[str, Any], param: str | None):
    if param is None:
        assert function(**fields).token_ids == [256]
    else:
        error = refused(function, **fields)
        assert (error.status, error.param) == (400, param)


def test_neutral_values_of_unserved_fields_are_fine():
    completion(frequency_penalty=0, presence_penalty=0.0, logit_bias={}, echo=False, suffix="", best_of=1)
    chat(tools=[], functions=[], response_format={"type": "text"})


def test_another_model_is_a_404():
    error = refused(completion, model="gpt")
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert "'tiny'" in str(error)


def test_a_prompt_that_leaves_no_room_is_too_long():
    assert completion(prompt=[1] * 99, max_tokens=1).max_tokens == 1
    for error in [
        refused(completion, prompt=[1] * 100),
        refused(chat, messages=[{"role": "user", "content": "x" * 99}]),
    ]:
        assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "prompt")


def test_a_limit_beyond_the_context_is_refused_and_the_default_is_cut():
    error = refused(completion, prompt=[1] * 90, max_tokens=11)
    assert (error.code, error.param) == ("context_length_exceeded", "max_tokens")
    assert "at most 10" in str(error)
    assert completion(prompt=[1] * 90).max_tokens == 10


@pytest.mark.parametrize("body", [b"", b"{", b"nonsense", b'{"model": "\xff"}', b'{"model": "tiny",}'])
def test_what_is_not_json_is_a_400(body: bytes):
    with pytest.raises(RequestError) as raised:
        completion_job(body, SERVED, TINY)
    assert (raised.value.status, raised.value.code) == (400, "invalid_json")


@pytest.mark.parametrize(("body", "param"), [(b"[]", None), (b"{}", "model"), (b'{"model": "tiny"}', "prompt")])
def test_json_of_another_shape_names_what_is_missing(body: bytes, param: str | None):
    with pytest.raises(RequestError) as raised:
        completion_job(body, SERVED, TINY)
    assert (raised.value.status, raised.value.param) == (400, param)
