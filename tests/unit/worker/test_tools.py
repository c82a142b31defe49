"""Readers of tool calls: however an answer is cut into pieces, the same calls come out, as they were written; and what
is no call comes out as text.
"""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas_worker.front.tools.base import ArgumentsDelta, CallDelta, TextDelta, ToolEvent
from prfaas_worker.front.tools.formats import tool_format

NAMES = ("turns", "kimi", "hermes")
MARK = {"turns": "<|tool|>", "kimi": "<|tool_calls_section_begin|>", "hermes": "<tool_call>"}


def read(name: str, text: str, cuts: list[int] | None = None) -> tuple[str, list[tuple[str, str]]]:
    """What is said, and every call as name and arguments, of an answer cut in pieces."""
    known = tool_format(MARK[name])
    assert known is not None
    parser = known.parser(lambda: "id")
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts or []), len(text)]
    events: list[ToolEvent] = []
    for start, end in itertools.pairwise(edges):
        events += parser.push(text[start:end], final=False)
    events += parser.push("", final=True)
    calls = [event for event in events if isinstance(event, CallDelta)]
    assert [call.index for call in calls] == list(range(len(calls)))
    arguments = [
        "".join(e.text for e in events if isinstance(e, ArgumentsDelta) and e.index == call.index) for call in calls
    ]
    said = "".join(event.text for event in events if isinstance(event, TextDelta))
    return said, [(call.name, text) for call, text in zip(calls, arguments, strict=True)]


def written(name: str, said: str, calls: list[tuple[str, str]]) -> str:
    """The answer of a model that knows its format."""
    if name == "turns":
        return said + "".join(f"<|tool|>{function}\n{arguments}" for function, arguments in calls)
    if name == "hermes":
        bodies = [f'{{"name": "{function}", "arguments": {arguments}}}' for function, arguments in calls]
        return said + "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
    inner = "".join(
        f"<|tool_call_begin|>functions.{function}:{place}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for place, (function, arguments) in enumerate(calls)
    )
    section = f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"
    return said + (section if calls else "")


TEXT = st.text(st.sampled_from('ab {}[]"\\:,<|>é\n'), max_size=8)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT, lambda inner: st.lists(inner, max_size=2), max_leaves=4
)
ARGUMENTS = st.dictionaries(TEXT, VALUE, max_size=3).map(lambda found: json.dumps(found, ensure_ascii=False))
FUNCTION = st.from_regex(r"[A-Za-z0-9_.-]{1,10}", fullmatch=True)
CALLS = st.lists(st.tuples(FUNCTION, ARGUMENTS), max_size=3)
# Beginnings of marks, but none whole: an answer that spells one out is read as a call.
SAID = st.text(st.sampled_from("ab <|tool_cal/>\n"), max_size=12).filter(
    lambda text: not any(mark in text for mark in MARK.values())
)
CUTS = st.lists(st.integers(0, 400), max_size=30)


@pytest.mark.parametrize("name", NAMES)
@given(said=SAID, calls=CALLS, cuts=CUTS)
@settings(deadline=None)
def test_calls_come_out_as_they_were_written_wherever_they_are_cut(
    name: str, said: str, calls: list[tuple[str, str]], cuts: list[int]
):
    assert read(name, written(name, said, calls), cuts) == (said, calls)


@pytest.mark.parametrize("name", NAMES)
@given(
    text=st.lists(
        st.sampled_from(
            [
                *'ab{}"\\:\n ',
                *MARK.values(),
                "</tool_call>",
                '{"name": "f", "arguments": ',
                "<|tool_call_begin|>",
                "<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
                "<|tool_calls_section_end|>",
            ]
        ),
        max_size=14,
    ).map("".join),
    cuts=CUTS,
)
@settings(deadline=None)
def test_damaged_answers_are_read_the_same_way_wherever_they_are_cut(name: str, text: str, cuts: list[int]):
    assert read(name, text, cuts) == read(name, text)


def test_a_call_is_told_before_its_arguments_are_complete():
    for name in NAMES:
        known = tool_format(MARK[name])
        assert known is not None
        parser = known.parser(lambda: "call_1")
        whole = written(name, "", [("f", '{"a": "long text"}')])
        events = parser.push(whole[: whole.index(" text")], final=False)
        assert CallDelta(0, events[0].call_id, "f") in events
        assert "".join(event.text for event in events if isinstance(event, ArgumentsDelta)) == '{"a": "long'


def test_kimis_ids_are_the_models_own_and_others_are_made():
    parser = tool_format(MARK["kimi"]).parser(lambda: "made")
    text = written("kimi", "", [("a", "{}"), ("b", "{}")])
    assert [e.call_id for e in parser.push(text, final=True) if isinstance(e, CallDelta)] == [
        "functions.a:0",
        "functions.b:1",
    ]
    parser = tool_format(MARK["turns"]).parser(lambda: "made")
    assert parser.push("<|tool|>a\n{}", final=True)[0] == CallDelta(0, "made", "a")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ("", [("f", '{"a": 1}')])),
        ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', ("", [("f", '{"a": 1}')])),
        ('<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>\n  and so on', ("and so on", [("f", "{}")])),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
            ("", [("f", '{"a": "</tool_call>"}')]),
        ),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>x', ("x", [("f", '{"a": 1')])),
        ('<tool_call>{"name": "f", "arguments": {"a": 1', ("", [("f", '{"a": 1')])),
        ("<tool_call>nonsense</tool_call>", ("<tool_call>nonsense</tool_call>", [])),
        ("<tool_call>", ("<tool_call>", [])),
        ("</tool_call>", ("</tool_call>", [])),
    ],
)
def test_hermes_calls_in_other_orders_and_damaged_ones(text: str, wanted: Any):
    assert read("hermes", text) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("hm<|tool|>f\n", ("hm", [("f", "")])),
        ("<|tool|>f", ("", [("f", "")])),
        ("<|tool|>f<|tool|>g\n{}", ("", [("f", ""), ("g", "{}")])),
    ],
)
def test_turns_that_were_cut_off(text: str, wanted: Any):
    assert read("turns", text) == wanted


def test_a_template_tells_its_format():
    assert tool_format("{{ '<|tool|>' }}").name == "turns"
    assert tool_format("<tool_call> and <|tool_calls_section_begin|>").name == "kimi"
    assert tool_format("<tool_call>").name == "hermes"
    assert tool_format("{{ messages }}") is None
