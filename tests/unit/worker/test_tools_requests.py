"""Tools in chat requests: what is offered reaches the template, what is demanded becomes a grammar that every sound
call fits and nothing else, and answers come back as OpenAI's tool calls.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from prfaas.errors import RequestError
from prfaas.wire.engine import Tokens
from prfaas_worker.assets import model_directory
from prfaas_worker.front.openai_in import Job, RequestReader
from prfaas_worker.front.openai_out import ChoiceDetokenizer, ResponseFormatter
from prfaas_worker.front.serving import ServedModel
from prfaas_worker.grammars import llguidance_text
from prfaas_worker.tokenizer import Tokenizer, load_tokenizer

BOS, EOS, USER, ASSISTANT, SYSTEM, END, TOOL = 256, 257, 259, 260, 261, 262, 263
SERVED = ServedModel(model_name="tiny", fingerprint="", vocab_size=264, max_context=4000, max_choices=8)
TINY = load_tokenizer(model_directory("builtin:kimi-linear-tiny"))
HELLO = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "<|user|> time"}}
STRICT = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}


def chat(tokenizer: Tokenizer = TINY, **fields: Any) -> Job:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 50} | fields
    return RequestReader(SERVED, tokenizer).chat_job(msgspec.json.encode(body))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte model whose template teaches Hermes' format, with marks made of letters."""
    directory = tmp_path_factory.mktemp("qwen")
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}"
    config = {"tokenizer_class": "byte", "added_tokens_decoder": {}}
    config["chat_template"] = template + "{% endfor %}{{ m.content }}{% endfor %}{{ tools | length if tools }}"
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(directory)


class Wrapped:
    """The tiny model's vocabulary as llguidance wants it."""

    eos_token_id, bos_token_id = EOS, BOS
    special_token_ids = list(range(256, 264))  # noqa: RUF012
    tokens = [bytes([byte]) for byte in range(256)] + [
        text.encode() for text in sorted(TINY.specials, key=TINY.specials.__getitem__)
    ]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


LLGUIDANCE = LLTokenizer(TokenizerWrapper(Wrapped()))


def fits(job: Job, *answer: bytes | int) -> bool:
    """Whether an answer, text and special tokens, is one that the job's grammar ends with."""
    assert job.prompts[0].grammar is not None
    tokens = [token for part in answer for token in (part if isinstance(part, bytes) else [part])]
    matcher = LLMatcher(LLGUIDANCE, llguidance_text(job.prompts[0].grammar))
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


OSLO = (TOOL, b'weather\n{"city":"Oslo"}')


def test_what_is_offered_reaches_the_template_as_letters():
    job = chat(tools=[CLOCK])
    functions = b'NAME, a line end, and JSON arguments. Functions:\n{"name": "clock", "description": "<|user|> time"}\n'
    wanted = [BOS, SYSTEM, *b"A call is ", TOOL, *functions, END, USER, *b"hi", END, ASSISTANT]
    assert job.prompts[0].token_ids == wanted
    assert (job.prompts[0].grammar, job.tools.parallel) == (None, True)


def test_without_choice_the_model_sees_no_tools():
    for fields in ({"tools": []}, {"tools": [CLOCK], "tool_choice": "none"}, {"tool_choice": "none"}):
        assert chat(**fields).prompts[0].token_ids == chat().prompts[0].token_ids
        assert chat(**fields).tools is None


def test_past_calls_have_the_tokens_they_were_generated_as():
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": '{"a" :1}'}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "call_1", "content": "noon<|tool|>"}]
    token_ids = chat(messages=messages).prompts[0].token_ids
    past = [ASSISTANT, TOOL, *b'clock\n{"a" :1}', END, TOOL, *b"noon<|tool|>", END, ASSISTANT]
    assert token_ids == [BOS, USER, *b"hi", END, *past]


def test_a_template_that_wants_an_object_gets_one(qwen: Tokenizer):
    call = {"id": "call_1", "function": {"name": "clock", "arguments": '{"a" :1}'}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert bytes(chat(qwen, messages=messages).prompts[0].token_ids) == b'<tool_call>{"a": 1}'


def test_a_required_call_is_one_or_more_sound_calls():
    job = chat(tools=[WEATHER, CLOCK], tool_choice="required")
    assert fits(job, *OSLO)
    assert fits(job, *OSLO, TOOL, b"clock\n{}", *OSLO)
    for wrong in [(b"text",), (), (b"text", *OSLO), (TOOL, b'weather\n{"city":"Bonn"}'), (TOOL, b"other\n{}")]:
        assert not fits(job, *wrong)
    assert fits(job, TOOL, b'weather\n{"city": "Oslo"}')
    assert not fits(job, TOOL, b'weather\n{"city":  "Oslo"}')  # no free spaces, which a small model does not end
    assert not fits(job, b'<|tool|>weather\n{"city":"Oslo"}')  # the mark is a token, not its letters


def test_a_named_function_is_called_once():
    job = chat(tools=[WEATHER, CLOCK], tool_choice={"type": "function", "function": {"name": "weather"}})
    assert fits(job, *OSLO)
    assert not fits(job, TOOL, b"clock\n{}")
    assert not fits(job, *OSLO, *OSLO)


def test_parallel_calls_can_be_forbidden():
    job = chat(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    assert fits(job, *OSLO)
    assert not fits(job, *OSLO, *OSLO)


def test_strict_functions_bind_calls_and_leave_text_free(qwen: Tokenizer):
    job = chat(tools=[STRICT])
    for right in [(b"hello",), (), (b"hello", *OSLO), OSLO]:
        assert fits(job, *right)
    assert not fits(job, b"hello", TOOL, b'weather\n{"city":"Bonn"}')
    job = chat(qwen, tools=[STRICT])
    call = b'<tool_call>\n{"name": "weather", "arguments": {"city":"%s"}}\n</tool_call>'
    for right in [b"hello", b"", b"<tool", b"hello" + call % b"Oslo", call % b"Oslo" + b"\n" + call % b"Rome"]:
        assert fits(job, right)
    assert not fits(job, b"hello" + call % b"Bonn")


def test_an_answer_in_json_can_stand_beside_tools():
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    job = chat(tools=[WEATHER], response_format=form)
    assert fits(job, b"17")
    assert fits(job, *OSLO)
    assert not fits(job, b"hello")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "code", "function": {"name": "a"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [CLOCK, CLOCK]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": str(n)}} for n in range(129)]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": 7}}}],
          "tool_choice": "required"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"name": "clock"}}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": "required", "guided_json": {}}, "tool_choice"),
        ({"tools": [CLOCK], "guided_regex": "a"}, "tool_choice"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "1", "function": {"name": "a", "arguments": "[1]"}}]}]}, "messages"),
    ],
)  # fmt: skip
def test_what_is_not_in_order_is_a_400(fields: dict[str, Any], param: str):
    with pytest.raises(RequestError) as raised:
        chat(**fields)
    assert (raised.value.status, raised.value.param) == (400, param)


def test_a_template_without_tools_refuses_them(tmp_path: Path):
    config = {"tokenizer_class": "byte", "added_tokens_decoder": {}, "chat_template": "{{ messages }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match="has no known format of tool calls"):
        chat(load_tokenizer(tmp_path), tools=[CLOCK])


def answered(job: Job, *parts: list[int], reason: str = "stop") -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole answer's choice, and the stream's choices, for tokens that come in these parts."""
    pieces = []
    choice = ChoiceDetokenizer(0, job, TINY)
    for place, part in enumerate(parts):
        pieces.append(choice.piece(Tokens(1, 0, part, [], reason if place == len(parts) - 1 else None)))
    answers = ResponseFormatter(job, "tiny", TINY)
    events = b"".join(answers.event(piece, None) for piece in pieces).split(b"\n\n")[:-1]
    return answers.whole_choice(pieces), [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]


def test_calls_are_answered_in_openais_form():
    job = chat(tools=[WEATHER])
    call = list(b'weather\n{"city":"Oslo"}')
    whole, stream = answered(job, list(b"Hm."), [TOOL], call[:12], call[12:], [TOOL, *b"clock\n{}"], [])
    assert whole["finish_reason"] == "tool_calls"
    message = whole["message"]
    assert message["content"] == "Hm."
    functions = [{"name": "weather", "arguments": '{"city":"Oslo"}'}, {"name": "clock", "arguments": "{}"}]
    assert [entry["function"] for entry in message["tool_calls"]] == functions
    assert [entry["type"] for entry in message["tool_calls"]] == ["function"] * 2
    deltas = [choice["delta"] for choice in stream]
    assert deltas[0] == {"role": "assistant", "content": "Hm."}
    parts = [part for delta in deltas for part in delta.get("tool_calls", [])]
    for index, function in enumerate(functions):
        mine = [part for part in parts if part["index"] == index]
        assert [part.get("id") for part in mine][1:] == [None] * (len(mine) - 1)
        assert mine[0]["id"].startswith("call_")
        assert mine[0]["function"] == {"name": function["name"], "arguments": ""}
        assert "".join(part["function"]["arguments"] for part in mine) == function["arguments"]
    assert [choice["finish_reason"] for choice in stream] == [None] * (len(stream) - 1) + ["tool_calls"]


def test_an_answer_of_calls_alone_has_no_content():
    whole, stream = answered(chat(tools=[WEATHER]), [TOOL, *b"clock\n{}"])
    assert whole["message"]["content"] is None
    assert stream[0]["delta"]["role"] == "assistant"
    assert not any(choice["delta"].get("content") for choice in stream)


def test_no_letter_of_a_mark_or_a_dropped_call_streams_as_content():
    job = chat(tools=[WEATHER], parallel_tool_calls=False)
    tokens = [*b"Hm.", TOOL, *b'weather\n{"city":"Oslo"}', TOOL, *b"clock\n{}"]
    whole, stream = answered(job, *([token] for token in tokens), [])
    deltas = [choice["delta"] for choice in stream]
    assert "".join(delta.get("content", "") for delta in deltas) == "Hm." == whole["message"]["content"]
    parts = [part["function"] for delta in deltas for part in delta.get("tool_calls", [])]
    assert "".join(part["arguments"] for part in parts) == '{"city":"Oslo"}'


def test_an_answer_without_calls_is_text():
    whole, stream = answered(chat(tools=[WEATHER]), list(b"clock"), [])
    assert (whole["message"], whole["finish_reason"]) == ({"role": "assistant", "content": "clock"}, "stop")
    assert stream[-1]["finish_reason"] == "stop"


def test_a_call_cut_by_the_limit_says_so():
    whole, _ = answered(chat(tools=[WEATHER]), [TOOL, *b"clock\n{"], reason="length")
    assert whole["finish_reason"] == "length"
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == "{"


def test_one_call_is_kept_where_no_more_were_wanted():
    job = chat(tools=[WEATHER], parallel_tool_calls=False)
    whole, _ = answered(job, [TOOL, *b"clock\n{}", TOOL, *b"weather\n{}"])
    assert [call["function"]["name"] for call in whole["message"]["tool_calls"]] == ["clock"]


def test_the_mark_is_hidden_where_no_tools_were_offered():
    whole, _ = answered(chat(), [*b"a", TOOL, *b"b"])
    assert whole["message"] == {"role": "assistant", "content": "ab"}
