"""A client wants a request to kill every engine: by a chain of rules, a pattern of millions of states, a template."""

import json
from typing import Any

import msgspec
import pytest

from prfaas.bounds.requests import MAX_BIASES, MAX_DEPTH, MAX_RULES, MAX_STOPS, check_fields
from prfaas.errors import RequestError
from prfaas.routing.prompt_size import prompt_values
from prfaas.routing.quarantine import MAX_REFUSED, QUARANTINE_SECONDS, SAME_LOSS_SECONDS, Quarantine
from prfaas_gateway.request import read_fields


def chain(length: int, define: str = ": ") -> str:
    return f"start{define}a0\n" + "".join(f"a{n}{define}a{n + 1}\n" for n in range(length)) + f'a{length}{define}"x"'


def references(length: int, link: str = "$ref") -> dict[str, Any]:
    return {
        "$defs": {f"a{n}": {link: f"#/$defs/a{n + 1}"} for n in range(length)} | {f"a{length}": {"type": "string"}},
        link: "#/$defs/a0",
    }


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"properties": {"x": schema}}
    return schema


def lists(counts: int) -> dict[str, Any]:
    return {"type": "array", "minItems": counts, "items": {"type": "array", "maxItems": counts, "items": {}}}


def as_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def as_tool(schema: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}


X = "x y"
DEADLY: dict[str, tuple[dict[str, Any], str]] = {
    "rules of Lark": ({"guided_grammar": chain(3000)}, "guided_grammar"),
    "terminals of Lark": ({"structured_outputs": {"grammar": chain(10_000).upper()}}, "structured_outputs"),
    "rules of EBNF in one line": ({"ebnf": chain(3000, " ::= ").replace("\n", " ")}, "ebnf"),
    "a grammar in a grammar": (
        {"guided_grammar": json.dumps({"grammars": [{"lark_grammar": chain(3000)}]})},
        "guided_grammar",
    ),
    "references": (as_format(references(3000)), "response_format"),
    "dynamic references": (as_format(references(3000, "$dynamicRef")), "response_format"),
    "references of a tool": (as_tool(references(3000)), "tools"),
    "a schema as a text": ({"guided_json": json.dumps(references(3000))}, "guided_json"),
    "a schema for SGLang": ({"json_schema": json.dumps(references(3000))}, "json_schema"),
    "a schema of the Responses API": (
        {"text": {"format": {"type": "json_schema", "schema": references(3000)}}},
        "text",
    ),
    "a schema for Dynamo": ({"nvext": {"guided_json": references(3000)}}, "nvext"),
    "objects in objects": (as_format(nested(300)), "response_format"),
    "objects in objects as a text": ({"structural_tag": '{"x":' * 5000 + "1" + "}" * 5000}, "structural_tag"),
    "repetitions of repetitions": ({"guided_regex": "(x{3000}){3000}"}, "guided_regex"),
    "the same in a comment's disguise": ({"guided_regex": "(?x)(x{3000}) #\n{3000}"}, "guided_regex"),
    "a schema's pattern": (as_format({"type": "string", "pattern": "(x{3000}){3000}"}), "response_format"),
    "a number of thousands of digits": ({"guided_regex": f"x{{{'9' * 5000}}}"}, "guided_regex"),
    "a number behind zeros": ({"guided_regex": f"x{{{'0' * 9}3000}}" * 40}, "guided_regex"),
    "a pattern of names": (as_format({"patternProperties": {"(x{3000}){3000}": {}}}), "response_format"),
    "a pattern of white space": ({"guided_whitespace_pattern": "( {3000}){3000}"}, "guided_whitespace_pattern"),
    "repetitions over two lines": ({"guided_grammar": 'start: ("x"{3000}\n){3000}'}, "guided_grammar"),
    "repetitions of Lark": ({"guided_grammar": 'start: ("x" ~ 3000) ~ 1..3000'}, "guided_grammar"),
    "repetitions in an alternative of a group": (
        {"guided_grammar": f"start: (({X}){{400}} | z){{400}}"},
        "guided_grammar",
    ),
    "repetitions behind a literal bracket": (
        {"guided_grammar": f'start: ( ")" ({X}){{400}} | z ){{400}}'},
        "guided_grammar",
    ),
    "repetitions behind a bracket in a class": ({"ebnf": f"a ::= ( [)] ({X}){{400}} | z ){{400}}"}, "ebnf"),
    "repetitions behind a quote in a class": ({"ebnf": f'a ::= ( ["] ({X}){{400}} | ")" ){{400}}'}, "ebnf"),
    "repetitions behind a bracket in a pattern": (
        {"guided_grammar": f"start: ( /[)]\\)/ ({X}){{400}} | z ){{400}}"},
        "guided_grammar",
    ),
    "repetitions behind a bracket in a comment": ({"ebnf": f"a ::= ( # )\n ({X}){{400}} | z ){{400}}"}, "ebnf"),
    "a repetition on the next line": ({"ebnf": f"a ::= ({X}){{400}} # |\n # \n {{400}}"}, "ebnf"),
    "a repetition of a pattern with flags": ({"guided_grammar": f"start: /({X}){{400}}/i ~ 400"}, "guided_grammar"),
    "a repetition behind a tab in JSON": ({"guided_grammar": rf"start: ({X}){{400}}\t~ 400"}, "guided_grammar"),
    "a repetition of an option": ({"guided_grammar": "start: [x ~ 400]~400"}, "guided_grammar"),
    "a repetition of a repetition": ({"guided_grammar": f"start: ({X}) ~ 400 ~ 400"}, "guided_grammar"),
    "repetitions of a stop": ({"stop_regex": ["END", "(x{3000}){3000}"]}, "stop_regex"),
    "groups in groups": ({"structured_outputs": {"regex": "(" * 5000 + ")" * 5000}}, "structured_outputs"),
    "options in options": ({"guided_grammar": "start: " + "[" * 5000 + '"x"' + "]" * 5000}, "guided_grammar"),
    "lists of lists": (as_format(lists(3000)), "response_format"),
    "very many choices": ({"guided_choice": [str(n) for n in range(100_000)]}, "guided_choice"),
    "a megabyte of tools": (as_tool({"description": "x" * (1 << 20)}), "tools"),
    "a template": ({"chat_template": "{% for i in range(10**9) %}{% endfor %}"}, "chat_template"),
    "a template among the arguments": ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template"),
    "a megabyte for a template": ({"chat_template_kwargs": {"x": [{}] * 400_000}}, "chat_template_kwargs"),
    "many stops": ({"stop": ["x"] * 1000}, "stop"),
    "a long stop": ({"stop": "\u00e9" * 1000}, "stop"),
    "many stops of the Messages API": ({"stop_sequences": ["x"] * 1000}, "stop_sequences"),
    "many bad words": ({"bad_words": ["x"] * 1000}, "bad_words"),
    "many ids that stop": ({"stop_token_ids": list(range(10_000))}, "stop_token_ids"),
    "many biases": ({"logit_bias": {str(n): 1 for n in range(100_000)}}, "logit_bias"),
    "many answers": ({"n": 16_384}, "n"),
    "many answers to choose from": ({"best_of": 16_384}, "best_of"),
}
each_deadly = pytest.mark.parametrize(("fields", "at_fault"), DEADLY.values(), ids=DEADLY.keys())
HARMLESS: dict[str, dict[str, Any]] = {
    "a recursive schema": as_format({"$defs": {"tree": {"items": {"$ref": "#/$defs/tree"}}}, "$ref": "#/$defs/tree"}),
    "a long list": as_format({"type": "array", "maxItems": 1000, "items": {"type": "string", "maxLength": 100_000}}),
    "an address of mail": {"guided_regex": r"[a-z0-9._%+-]{1,64}@(?:[a-z0-9-]{1,63}\.){1,8}[a-z]{2,63}"},
    "a date": {"guided_regex": r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d{1,9})?Z"},
    "a property that is called pattern": as_tool({"properties": {"pattern": {"type": "string"}, "minItems": {}}}),
    "a grammar": {"guided_grammar": chain(300)},
    "rules that each repeat": {"guided_grammar": "".join(f'a{n}: ("," item){{0,100}}\n' for n in range(50))},
    "alternatives that each repeat": {
        "guided_grammar": f"start: ({X}){{400}} | ({X}) ~ 400\n  | [0-9] ({X}){{400}} // |"
    },
    "alternatives that each repeat in EBNF": {"ebnf": f'a ::= "|(" ({X}){{400}} | ({X} "|" "y"){{2}} | ({X}){{400}}'},
    "lines that each repeat": {"ebnf": f"a ::= ({X}){{400}}\n({X}){{400}} # (\n({X}){{400}}"},
    "literals and names that each repeat": {
        "guided_grammar": 'start: "a" ~ 3000 b ~ 1..3000 "c"i ~ 3000\nb: "d"{3000}'
    },
    "names of headers": as_format({"patternProperties": {"^x-[a-z]{1,30}$": {"type": "string"}}}),
    "a property that is called patternProperties": as_tool({"properties": {"patternProperties": {"type": "string"}}}),
    "an EBNF": {"ebnf": chain(300, " ::= ")},
    "nothing": {"stop": None, "logit_bias": None, "n": None, "tools": None, "chat_template": None},
    "a few": {"stop": ["\n\n", "END"], "logit_bias": {"1": 100}, "n": 128, "chat_template_kwargs": {"thinking": True}},
}


def body(fields: dict[str, Any]) -> bytes:
    return json.dumps({"model": "m", "prompt": "x", **fields}).encode()


@each_deadly
def test_what_would_kill_engines_is_refused_by_name(fields, at_fault):
    with pytest.raises(RequestError) as refused:
        read_fields(body(fields), every=True)
    assert (refused.value.status, refused.value.param) == (400, at_fault)
    assert at_fault in str(refused.value)


@pytest.mark.parametrize("fields", HARMLESS.values(), ids=HARMLESS.keys())
def test_what_clients_do_send_is_not(fields):
    assert read_fields(body(fields), every=True)[0] == "m"


@each_deadly
def test_control_without_the_bounds_each_goes_to_an_engine(fields, at_fault, monkeypatch):
    monkeypatch.setattr("prfaas_gateway.request.check_fields", lambda _: None)
    _, sent = read_fields(body(fields), every=True)
    assert at_fault in sent or at_fault == "chat_template"


@pytest.mark.parametrize(
    ("bound", "sent", "longer"),
    [
        (MAX_RULES, lambda n: {"guided_grammar": chain(n - 2)}, 1),
        (MAX_RULES, lambda n: as_format(references(n - 1)), 1),
        (MAX_STOPS, lambda n: {"stop": ["x"] * n}, 1),
        (MAX_BIASES, lambda n: {"logit_bias": {str(one): 1 for one in range(n)}}, 1),
    ],
    ids=["rules", "references", "stops", "biases"],
)
def test_the_bounds_are_where_they_are_said_to_be(bound, sent, longer):
    read_fields(body(sent(bound)), every=True)
    with pytest.raises(RequestError):
        read_fields(body(sent(bound + longer)), every=True)


def test_a_schema_may_be_nested_as_deep_as_schemas_are():
    check_fields({"guided_json": msgspec.Raw(json.dumps(nested(MAX_DEPTH // 2 - 1)).encode())})


UNREADABLE: dict[str, tuple[bytes, bytes]] = {
    "half a pair": (b'"\\ud800"', b'"\\ud800\\udc00"'),
    "a pair the wrong way": (b'["a", "\\udc00\\ud800"]', b'["a", "\\ud800\\udc00"]'),
    "no UTF-8": (b'"\xff"', b'"\xc3\xbf"'),
    "a surrogate in UTF-8": (b'"\xed\xa0\x80"', b'"\xed\x9f\xbf"'),
    "too deep": (b"[" * 2000 + b"]" * 2000, b"[" * 200 + b"]" * 200),
}
"""Each beside one like it that can be read."""
each_unreadable = pytest.mark.parametrize(("written", "readable"), UNREADABLE.values(), ids=UNREADABLE.keys())


@each_unreadable
def test_text_that_no_engine_can_read_is_refused(written, readable):
    with pytest.raises(RequestError) as refused:
        prompt_values({"input": msgspec.Raw(written)}, {"input"})
    assert refused.value.param == "input"


@each_unreadable
def test_control_text_that_can_be_read_is_not(written, readable):
    assert prompt_values({"input": msgspec.Raw(readable)}, {"input"}) == {"input": json.loads(readable)}


def test_the_quarantine_is_bounded_and_ends():
    held = Quarantine()
    for number in range(2 * MAX_REFUSED):
        held.add(b"%d" % number, str(number), 100.0 + number / 1e6)
    assert held.left_seconds(b"0", 101.0) == 0
    last = b"%d" % (2 * MAX_REFUSED - 1)
    assert 0 < held.left_seconds(last, 101.0) <= QUARANTINE_SECONDS
    assert held.left_seconds(last, 100.0 + QUARANTINE_SECONDS + 1) == 0
    assert not held


def test_a_client_that_changes_a_letter_each_time_is_refused_as_a_whole():
    held = Quarantine()
    assert not held.add(b"a", "mallory", 100.0)
    assert held.left_seconds("mallory", 100.0) == 0
    assert held.add(b"b", "mallory", 110.0)
    assert held.left_seconds("mallory", 111.0) == QUARANTINE_SECONDS - 1
    assert held.left_seconds("alice", 111.0) == 0
    assert held.left_seconds("mallory", 110.0 + QUARANTINE_SECONDS) == 0


@pytest.mark.parametrize("at_once", [2, 300])
def test_what_a_client_loses_at_one_time_is_one_loss_whatever_instances_it_lost(at_once):
    held = Quarantine()
    losses = [
        held.add(b"%d" % number, "alice", 100.0 + SAME_LOSS_SECONDS * number / at_once) for number in range(at_once)
    ]
    assert not any(losses)
    assert held.left_seconds("alice", 101.0 + SAME_LOSS_SECONDS) == 0
    assert not held.add(b"later", "alice", 101.0 + SAME_LOSS_SECONDS + QUARANTINE_SECONDS)


def test_control_what_it_loses_after_that_time_is_another_one():
    held = Quarantine()
    assert [held.add(b"%d" % at, "alice", 100.0 + SAME_LOSS_SECONDS * at) for at in (0, 1)] == [False, True]


def test_without_keys_nobody_is_refused_as_a_whole():
    held = Quarantine()
    assert not any(held.add(b"%d" % at, "", 100.0 + 10 * at) for at in range(5))
    assert held.left_seconds("", 140.0) == 0
    assert held.left_seconds(b"4", 140.0) == QUARANTINE_SECONDS
