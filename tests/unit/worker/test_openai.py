"""Request bodies: what is right becomes a job, what is wrong becomes a 4xx that names the field, and nothing that would
change the answer is ignored.
"""

from typing import Any

import msgspec
import pytest
from openai.types import completion_create_params as openai_completion
from openai.types.chat import completion_create_params

from prfaas.client.requests import Parameters
from prfaas.errors import RequestError
from prfaas.wire.engine import Generate, Sampling
from prfaas_worker.assets import model_directory
from prfaas_worker.front.openai_bodies import NEUTRAL, ChatBody, CompletionBody, IgnoredFields, UnservedFields
from prfaas_worker.front.openai_in import Job, RequestReader
from prfaas_worker.front.serving import ServedModel
from prfaas_worker.tokenizer import load_tokenizer

pytestmark = pytest.mark.system

SERVED = ServedModel(model_name="tiny", fingerprint="", vocab_size=264, max_context=100, max_choices=8)
TINY = load_tokenizer(model_directory("builtin:kimi-linear-tiny"))
READER = RequestReader(SERVED, TINY)
HELLO = [{"role": "user", "content": "hello"}]


def completion(**fields: Any) -> Job:
    body = {"model": "tiny", "prompt": "hello"} | fields
    return READER.completion_job(msgspec.json.encode(body))


def chat(**fields: Any) -> Job:
    body = {"model": "tiny", "messages": HELLO} | fields
    return READER.chat_job(msgspec.json.encode(body))


def test_a_bare_completion_gets_the_apis_defaults():
    job = completion(seed=5)
    sampling = Sampling(1.0, 1.0, 0, 5)
    assert job.prompts == [Generate(0, "", [256, *b"hello"], 1, 16, sampling, logprobs=-1)]
    assert not job.is_chat
    assert (job.choices, job.stop, job.echoes) == (1, [], [""])
    assert (job.body.stream, job.has_usage, job.has_continuous_usage) == (None, False, False)


def only(job: Job) -> Generate:
    (prompt,) = job.prompts
    return prompt


def test_every_served_field_arrives():
    job = completion(
        prompt=[1, 2, 263],
        max_tokens=7,
        min_tokens=2,
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.25,
        seed=-9,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1.5,
        logit_bias={"5": 1, "263": -100},
        stop=["a", "b"],
        stop_token_ids=[7, 8],
        ignore_eos=True,
        n=4,
        best_of=4,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        logprobs=2,
        cache_salt="mine",
        user="someone",
        store=True,
        metadata={"a": "b"},
    )
    sampling = Sampling(0, 0.5, 3, -9, 0.25, -2, 2, 1.5, ((5, 1), (263, -100)))
    assert only(job) == Generate(
        0,
        "",
        token_ids=[1, 2, 263],
        choices=4,
        max_tokens=7,
        sampling=sampling,
        logprobs=2,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=(7, 8),
        cache_salt="mine",
    )
    assert (job.choices, job.stop, job.echoes) == (4, ["a", "b"], [""])
    assert job.body.stream
    assert job.has_usage
    assert job.has_continuous_usage


def test_null_is_as_good_as_absent():
    nulls = ["max_tokens", "temperature", "top_p", "top_k", "stop", "n", "stream", "stream_options", "logit_bias"]
    nulls += [
        "min_p",
        "min_tokens",
        "ignore_eos",
        "stop_token_ids",
        "response_format",
        "guided_json",
        "cache_salt",
        "echo",
    ]
    nulls += ["best_of", "lora", "suffix", "structured_outputs", "presence_penalty", "repetition_penalty"]
    assert completion(seed=1, **dict.fromkeys(nulls)).prompts == completion(seed=1).prompts


def test_without_a_seed_every_request_draws_its_own():
    seeds = [prompt.sampling.seed for job in (completion(), completion(prompt=["a", "b"])) for prompt in job.prompts]
    assert len(set(seeds)) == 3


def test_several_prompts_are_a_call_each():
    assert completion(prompt=["hello"], seed=1).prompts == completion(prompt="hello", seed=1).prompts
    job = completion(prompt=["a", "bc"], max_tokens=5, seed=3, n=2)
    assert [(prompt.token_ids, prompt.max_tokens, prompt.sampling.seed) for prompt in job.prompts] == [
        ([256, *b"a"], 5, 3),
        ([256, *b"bc"], 5, 3),
    ]
    assert (job.choices, job.prompt_tokens) == (2, 5)
    assert [prompt.token_ids for prompt in completion(prompt=[[1, 2], [3]]).prompts] == [[1, 2], [3]]


def test_the_choices_of_all_prompts_are_bounded_together():
    assert len(completion(prompt=["x"] * 64, n=2).prompts) == 64
    assert refused(completion, prompt=["x"] * 65, n=2).param == "prompt"
    assert refused(completion, prompt=["x"] * 129).param == "prompt"


def test_more_prompts_than_can_wait_are_refused_with_the_cure_and_not_for_ever():
    small = RequestReader(msgspec.structs.replace(SERVED, max_choices=4), TINY)

    def job(prompts: int) -> Job:
        return small.completion_job(msgspec.json.encode({"model": "tiny", "prompt": ["x"] * prompts}))

    assert len(job(32).prompts) == 32
    for many in (33, 128):
        error = refused(job, prompts=many)
        assert (error.status, error.param) == (400, "prompt")
        assert f"has {many} prompts and this worker takes 32 at once: send several requests" in str(error)


def test_an_echo_is_the_prompts_text():
    job = completion(prompt=["<|user|>é", "x"], echo=True)
    assert job.echoes == ["<|user|>é", "x"]
    assert completion(prompt=[256, 104, 105], echo=True).echoes == ["<|bos|>hi"]
    assert completion(echo=False).echoes == [""]


def test_a_chat_without_limit_may_fill_the_context():
    job = chat()
    assert job.is_chat
    assert len(only(job).token_ids) + only(job).max_tokens == SERVED.max_context


def test_chat_limits_logprobs_and_parts_are_read():
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    job = chat(messages=[{"role": "user", "content": parts}], max_completion_tokens=3, logprobs=True, top_logprobs=5)
    assert (only(job).token_ids, only(job).max_tokens, only(job).logprobs) == (only(chat()).token_ids, 3, 5)
    assert only(chat(logprobs=True)).logprobs == 0
    assert only(chat(logprobs=False)).logprobs == -1


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
        ({"n": 0}, "n", "must be 1 to 8"),
        ({"n": 9}, "n", "must be 1 to 8"),
        ({"temperature": -0.1}, "temperature", "must be 0 to 2"),
        ({"temperature": 2.1}, "temperature", "must be 0 to 2"),
        ({"top_p": 0}, "top_p", "must be above 0"),
        ({"top_p": 1.1}, "top_p", "must be above 0"),
        ({"top_k": -2}, "top_k", "must be at least 1"),
        ({"seed": 1 << 63}, "seed", "64-bit"),
        ({"stop": ""}, "stop", "empty string"),
        ({"stop": ["a", ""]}, "stop", "empty string"),
        ({"stop": ["a"] * 65}, "stop", "at most 64"),
        ({"stop": ["a" * 1025]}, "stop", "1024 bytes"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "must be -2 to 2"),
        ({"presence_penalty": -2.1}, "presence_penalty", "must be -2 to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "must be above 0"),
        ({"min_p": 1.5}, "min_p", "must be 0 to 1"),
        ({"logit_bias": {"264": 1}}, "logit_bias", "want token ids of 0 to 263"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "holds 'a'"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "want token ids of 0 to 263"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "of token 5 must be -100 to 100"),
        ({"stop_token_ids": [264]}, "stop_token_ids", "want token ids of 0 to 263"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids", "at most 128"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "must be 0 to max_tokens, here 8"),
        ({"min_tokens": -1}, "min_tokens", "must be 0 to"),
        ({"cache_salt": ""}, "cache_salt", "1 to 256 characters"),
        ({"best_of": 2}, "best_of", "must equal n"),
        ({"suffix": "x"}, "suffix", "is not served"),
        ({"lora": "x"}, "lora", "LoRA adapter"),
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
        (completion, {"prompt": [True]}, "prompt"),
        (completion, {"prompt": [[1], []]}, "prompt"),
        (completion, {"prompt": ["a", [2]]}, "prompt"),
        (completion, {"echo": True, "logprobs": 0}, "echo"),
        (completion, {"logprobs": 21}, "logprobs"),
        (chat, {"messages": []}, "messages"),
        (chat, {"messages": "hello"}, "messages"),
        (chat, {"messages": [{"role": "user"}]}, "messages"),
        (chat, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        (chat, {"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        (chat, {"messages": [{"role": "assistant", "tool_calls": []}]}, "messages"),
        (chat, {"messages": [{"role": "assistant", "tool_calls": [7]}]}, "messages"),
        (chat, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages"),  # not for this template
        (chat, {"echo": True}, "echo"),
        (chat, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (chat, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (chat, {"top_logprobs": 2}, "top_logprobs"),
        (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ],
)
def test_each_endpoints_own_fields_are_checked(function: Any, fields: dict[str, Any], param: str | None):
    if param is None:
        assert only(function(**fields)).token_ids == [256]
    else:
        error = refused(function, **fields)
        assert (error.status, error.param) == (400, param)


def test_neutral_values_of_unserved_fields_are_fine():
    completion(use_beam_search=False, length_penalty=1.0, echo=False, suffix="", best_of=1, bad_words=[])
    chat(tools=[], tool_choice="none", response_format={"type": "text"}, modalities=["text"], skip_special_tokens=True)
    chat(function_call="none", guided_decoding_backend="xgrammar", guided_whitespace_pattern=" ?")
    chat(function_call=None, guided_json_object=False)


def test_what_says_only_how_to_guide_is_refused_by_the_name_of_what_is_guided():
    error = refused(chat, guided_decoding_backend="xgrammar", guided_json={"type": "object"})
    assert (error.param, error.code) == ("guided_json", "unsupported_parameter")


CLOCK = {"type": "function", "function": {"name": "clock"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}


@pytest.mark.parametrize("function", [completion, chat])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [CLOCK]),
        ("tool_choice", "auto"),
        ("tool_choice", CLOCK),
        ("functions", [CLOCK]),
        ("function_call", "auto"),
        ("function_call", {"name": "clock"}),
        ("guided_json_object", True),
        ("guided_choice", ["a"]),
        ("guided_json", {}),
        ("guided_regex", ""),
        ("response_format", SCHEMA),
        ("structured_outputs", {"regex": "a"}),
    ],
)
def test_tools_and_structured_output_are_refused_with_the_engine_that_serves_them(function: Any, name: str, value: Any):
    error = refused(function, **{name: value})
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", name)
    cure = "serve the model with vLLM (engine.type: vllm), or leave the field out"
    assert str(error) == f"{name} is not served by this engine; {cure}"


CALL = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": '{"a" :1'}}
CALLED = [
    *HELLO,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "noon<|tool|>", "tool_call_id": "1"},
]


def test_past_calls_and_their_results_are_rendered_by_the_template():
    past = [260, 263, *b'clock\n{"a" :1', 262, 263, *b"noon<|tool|>", 262, 260]
    assert only(chat(messages=CALLED)).token_ids == [256, 259, *b"hello", 262, *past]


@pytest.mark.parametrize("name", ["kimi-linear-tiny", "qwen3-next-tiny"])
def test_both_built_in_models_take_what_agents_send(name: str):
    reader = RequestReader(SERVED, load_tokenizer(model_directory(f"builtin:{name}")))

    def tokens(*messages: dict[str, Any]) -> list[int]:
        body = {"model": "tiny", "messages": [*messages, *HELLO]}
        return only(reader.chat_job(msgspec.json.encode(body))).token_ids

    def call(arguments: Any) -> dict[str, Any]:
        function = {"name": "f", "arguments": arguments}
        return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}

    system, developer = ({"role": role, "content": "b"} for role in ("system", "developer"))
    assert tokens(developer) == tokens(system)
    assert tokens(system, developer) == tokens(system, system)
    assert tokens(call({"a": 1})) == tokens(call('{"a": 1}'))
    assert tokens(call("")) == tokens(call(None)) == tokens(call("{}"))
    assert tokens(call('{"a": "P')) != tokens(call('{"a": "Q'))
    old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": "P'}}
    assert tokens(old) == tokens(call('{"a": "P'))
    assert tokens(old, {"role": "function", "name": "f", "content": "x"}) == tokens(
        old, {"role": "tool", "name": "f", "content": "x"}
    )


@pytest.mark.parametrize("function", [completion, chat])
@pytest.mark.parametrize(
    ("fields", "param", "meant"),
    [
        ({"max_token": 4}, "max_token", "max_tokens"),
        ({"stopp": None}, "stopp", "stop"),
        ({"foo": 1}, "foo", None),
        ({"stream_options": {"foo": 1}}, "stream_options.foo", None),
        ({"stream_options": {"include_usages": True}}, "stream_options.include_usages", "include_usage"),
    ],
)
def test_a_parameter_that_no_endpoint_knows_is_refused_by_its_name(
    function: Any, fields: dict[str, Any], param: str, meant: str | None
):
    error = refused(function, **fields)
    assert (error.status, error.code, error.param) == (400, "unknown_parameter", param)
    assert str(error).startswith(f"{param} is not a parameter of this endpoint; ")
    assert str(error).endswith(f"did you mean {meant}?" if meant else "leave it out")


def test_a_misspelt_effort_of_reasoning_is_refused_by_name_and_by_value():
    assert str(refused(chat, reasoning_efort="low")).endswith("did you mean reasoning_effort?")
    error = refused(chat, reasoning_effort="hgih")
    assert (error.status, error.param) == (400, "reasoning_effort")
    assert str(error) == "reasoning_effort must be one of none, minimal, low, medium, high, xhigh, max"
    assert chat(reasoning_effort="high").prompts


@pytest.mark.parametrize("name", ["x" * 1_000_000, "x - at `$." + "y" * 1_000_000])
def test_an_error_repeats_no_more_than_the_beginning_of_what_was_sent(name: str):
    error = refused(completion, **{name: 1})
    assert len(str(error)) + len(str(error.param)) < 1_000


LONG = "x" * 1_000_000


@pytest.mark.parametrize(
    ("function", "fields"),
    [
        (completion, {"prompt": [LONG, 1]}),
        (completion, {"prompt": [[LONG]]}),
        (completion, {"stop_token_ids": [LONG]}),
        (completion, {"model": LONG}),
        (completion, {"logit_bias": {LONG: 1}}),
        (completion, {"max_tokens": LONG}),
        (completion, {"max_tokens": 10**18}),
        (chat, {"messages": [{"role": LONG, "content": "x"}]}),
        (chat, {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
        (chat, {"reasoning_effort": LONG}),
        (chat, {"chat_template_kwargs": {LONG: 1, "messages": LONG}}),
        (chat, {"tool_choice": LONG}),
        (chat, {"response_format": {"type": LONG}}),
    ],
)
def test_an_error_repeats_no_more_than_the_beginning_of_a_value(function: Any, fields: dict[str, Any]):
    assert len(str(refused(function, **fields))) < 1_000


@pytest.mark.parametrize(
    ("function", "param"),
    [(completion, "reasoning_effort"), (completion, "messages"), (completion, "top_logprobs"), (chat, "prompt")],
)
def test_a_parameter_of_the_other_endpoint_is_refused(function: Any, param: str):
    assert refused(function, **{param: 1}).param == param


@pytest.mark.parametrize("function", [completion, chat])
def test_ignores_any_value_of_what_no_answer_depends_on(function: Any):
    ignored = {name: {"any": [1, "thing"]} for name in IgnoredFields.__struct_fields__}
    assert function(seed=1, **ignored).prompts == function(seed=1).prompts
    options = {"include_usage": True, "include_obfuscation": False}
    assert function(stream=True, stream_options=options).has_usage


@pytest.mark.parametrize("name", sorted(set(UnservedFields.__struct_fields__) - set(IgnoredFields.__struct_fields__)))
@pytest.mark.parametrize("function", [completion, chat])
def test_an_unserved_field_is_refused_unless_it_changes_nothing(function: Any, name: str):
    assert refused(function, **{name: "something else"}).param == name
    assert function(seed=1, **{name: getattr(NEUTRAL, name)}).prompts == function(seed=1).prompts


def test_every_parameter_of_the_openai_client_and_of_ours_is_served_ignored_or_refused_by_name():
    """Otherwise a new release of the client would be refused for what it sends by itself."""
    known = set(CompletionBody.__struct_fields__) | set(ChatBody.__struct_fields__)
    theirs = completion_create_params.CompletionCreateParamsBase, openai_completion.CompletionCreateParamsBase
    for params in (*theirs, Parameters):
        assert set(params.__annotations__) - known == set(), params


def test_an_adapter_of_the_model_is_refused_by_name():
    error = refused(completion, model="tiny:poet")
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", "model")
    assert "'tiny:poet' names a LoRA adapter" in str(error)


def test_an_answer_is_continued_where_it_ends():
    messages = [*HELLO, {"role": "assistant", "content": "he"}]
    job = chat(messages=messages, continue_final_message=True)
    assert only(job).token_ids == [256, 259, *b"hello", 262, 260, *b"he"]
    assert only(chat(add_generation_prompt=False)).token_ids == [256, 259, *b"hello", 262]


def test_another_model_is_a_404():
    error = refused(completion, model="gpt")
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert "'tiny'" in str(error)


def test_a_prompt_that_leaves_no_room_is_too_long():
    assert only(completion(prompt=[1] * 99, max_tokens=1)).max_tokens == 1
    for error in [
        refused(completion, prompt=[1] * 100),
        refused(chat, messages=[{"role": "user", "content": "x" * 99}]),
    ]:
        assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "prompt")


def test_a_limit_beyond_the_context_is_refused_and_the_default_is_cut():
    error = refused(completion, prompt=[1] * 90, max_tokens=11)
    assert (error.code, error.param) == ("context_length_exceeded", "max_tokens")
    assert "at most 10" in str(error)
    assert only(completion(prompt=[1] * 90)).max_tokens == 10


@pytest.mark.parametrize("body", [b"", b"{", b"nonsense", b'{"model": "\xff"}', b'{"model": "tiny",}'])
def test_what_is_not_json_is_a_400(body: bytes):
    with pytest.raises(RequestError) as raised:
        READER.completion_job(body)
    assert (raised.value.status, raised.value.code) == (400, "invalid_json")


@pytest.mark.parametrize(("body", "param"), [(b"[]", None), (b"{}", "model"), (b'{"model": "tiny"}', "prompt")])
def test_json_of_another_shape_names_what_is_missing(body: bytes, param: str | None):
    with pytest.raises(RequestError) as raised:
        READER.completion_job(body)
    assert (raised.value.status, raised.value.param) == (400, param)
