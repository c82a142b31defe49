"""A conversation's past reaches the model, whatever it holds: past calls, and roles that a template does not know.

The templates are short ones in the manner of those that public checkpoints ship. `as_sent` is the control: what Jinja
alone makes of the same messages.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import pytest

from prfaas.errors import RequestError
from prfaas_worker.front.openai_bodies import ChatBody
from prfaas_worker.front.openai_in import conversation_tokens
from prfaas_worker.tokenizer.base import ByteTokenizer
from prfaas_worker.tokenizer.chat_template import ChatTemplate

REFUSED = "refused"

QWEN3 = """
{%- if tools -%}{{- tools[0]['function'] | tojson -}}{%- endif -%}
{%- if messages[0].role == 'system' -%}{{- '<system>' + messages[0].content -}}{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'user' or (m.role == 'system' and not loop.first) -%}{{- '<' + m.role + '>' + m.content -}}
  {%- elif m.role == 'assistant' -%}
    {{- '<assistant>' + (m.content if m.content is string else '') -}}
    {%- for call in m.tool_calls or [] -%}
      {%- set f = call.function or call -%}
      {{- '<call>' + f.name + ' ' -}}{{- f.arguments if f.arguments is string else f.arguments | tojson -}}
    {%- endfor -%}
  {%- elif m.role == 'tool' -%}{{- '<user><result>' + m.content -}}
  {%- endif -%}
{%- endfor -%}
"""
KIMI_K2 = """
{%- for m in messages -%}
  {%- if loop.first and m['role'] != 'system' -%}{{- '<system>DEFAULT' -}}{%- endif -%}
  {%- set name = m.get('name') or m['role'] -%}
  {%- if m['role'] in ['user', 'assistant'] -%}{{- '<' + m['role'] + ':' + name + '>' -}}
  {%- else -%}{{- '<system:' + name + '>' -}}
  {%- endif -%}
  {%- if m['role'] == 'assistant' and m.get('tool_calls') -%}
    {{- m['content'] or '' -}}
    {%- for call in m['tool_calls'] -%}
      {%- set arguments = call['function']['arguments'] -%}
      {{- '<call>' + call['id'] + ' ' -}}{{- arguments if arguments is string else arguments | tojson -}}
    {%- endfor -%}
  {%- elif m['role'] == 'tool' -%}{{- '## Return of ' + m.tool_call_id + ' ' + m['content'] -}}
  {%- elif m['content'] is not none -%}{{- m['content'] -}}
  {%- endif -%}
{%- endfor -%}
"""
DEEPSEEK_V3 = """
{%- set ns = namespace(system='') -%}
{%- for m in messages -%}
  {%- if m['role'] == 'system' -%}{%- set ns.system = ns.system + m['content'] -%}{%- endif -%}
{%- endfor -%}
{{- '<system>' + ns.system -}}
{%- for m in messages -%}
  {%- if m['role'] == 'user' -%}{{- '<user>' + m['content'] -}}{%- endif -%}
  {%- if m['role'] == 'assistant' and m['content'] is none -%}
    {{- '<assistant>' -}}
    {%- for call in m['tool_calls'] -%}
      {{- '<call>' + call['type'] + ' ' + call['function']['name'] + ' ' + call['function']['arguments'] -}}
    {%- endfor -%}
  {%- endif -%}
  {%- if m['role'] == 'assistant' and m['content'] is not none -%}{{- '<assistant>' + m['content'] -}}{%- endif -%}
  {%- if m['role'] == 'tool' -%}{{- '<result>' + m['content'] -}}{%- endif -%}
{%- endfor -%}
"""
LLAMA_3_1 = """
{%- if messages[0]['role'] == 'system' -%}
  {%- set system = messages[0]['content'] -%}{%- set messages = messages[1:] -%}
{%- else -%}{%- set system = '' -%}
{%- endif -%}
{{- '<system>Today. ' + system -}}
{%- for tool in tools or [] -%}{{- {'type': 'function', 'function': tool['function']} | tojson -}}{%- endfor -%}
{%- for m in messages -%}
  {%- if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) -%}
    {{- '<' + m['role'] + '>' + m['content'] -}}
  {%- elif 'tool_calls' in m -%}
    {%- if m.tool_calls | length != 1 -%}{{- raise_exception('one call at a time') -}}{%- endif -%}
    {%- set f = m.tool_calls[0].function -%}
    {{- '<assistant>{"name": "' + f.name + '", "parameters": ' -}}{{- f.arguments | tojson -}}{{- '}' -}}
  {%- elif m.role == 'tool' or m.role == 'ipython' -%}
    {{- '<ipython>' -}}{{- m.content | tojson if m.content is iterable else m.content -}}
  {%- endif -%}
{%- endfor -%}
"""
MISTRAL = """
{%- if messages[0].role == 'system' -%}
  {%- set system = messages[0].content -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- set rest = messages -%}
{%- endif -%}
{%- set ns = namespace(turn=0) -%}
{%- for m in rest -%}
  {%- if not (m.role == 'tool' or m.tool_calls is defined) -%}
    {%- if (m.role == 'user') != (ns.turn % 2 == 0) -%}{{- raise_exception('roles must alternate') -}}{%- endif -%}
    {%- set ns.turn = ns.turn + 1 -%}
  {%- endif -%}
{%- endfor -%}
{%- for m in rest -%}
  {%- if m.role == 'user' -%}{{- '[INST]' + system + m.content -}}
  {%- elif m.tool_calls is defined and m.tool_calls is not none -%}
    {%- for call in m.tool_calls -%}
      {%- if call.id is not defined or call.id | length != 9 -%}{{- raise_exception('no id of nine') -}}{%- endif -%}
      {{- '[CALL]' + (call.function | tojson) + ' ' + call.id -}}
    {%- endfor -%}
  {%- elif m.role == 'assistant' -%}{{- '[ANSWER]' + m.content -}}
  {%- elif m.role == 'tool' -%}
    {%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 -%}
      {{- raise_exception('no id of nine') -}}
    {%- endif -%}
    {{- '[RESULT]' + m.content + ' ' + m.tool_call_id -}}
  {%- else -%}{{- raise_exception('no such role') -}}
  {%- endif -%}
{%- endfor -%}
"""
HERMES = """
{{- '<system>You call functions. ' -}}
{%- for tool in tools or [] -%}{{- tool['function'] | tojson -}}{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role in ['user', 'system'] or (m.role == 'assistant' and m.tool_calls is not defined) -%}
    {{- '<' + m.role + '>' + m.content -}}
  {%- elif m.role == 'assistant' -%}
    {{- '<assistant>' -}}
    {%- for call in m.tool_calls -%}
      {%- if call.function is defined -%}{%- set call = call.function -%}{%- endif -%}
      {{- '<call>{"name": "' + call.name + '", "arguments": ' -}}{{- call.arguments | tojson -}}{{- '}' -}}
    {%- endfor -%}
  {%- elif m.role == 'tool' -%}{{- '<result>' + m.content -}}
  {%- endif -%}
{%- endfor -%}
"""
CHATML = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"


class Kind(NamedTuple):
    """A template, and what it makes of a user's `a`, a call of `f` and its answer `r`: %C stands for the content, %A
    for the arguments, %I for the id."""

    template: str
    user: str
    call: str
    answer: str
    beside_text: str = ""
    takes_text: bool = True


KINDS = {
    "Qwen3": Kind(QWEN3, "<user>a", "<assistant>%C<call>f %A", "<user><result>r"),
    "Kimi K2": Kind(
        KIMI_K2, "<system>DEFAULT<user:user>a", "<assistant:assistant>%C<call>%I %A", "<system:tool>## Return of %I r"
    ),
    "DeepSeek V3": Kind(
        DEEPSEEK_V3, "<system><user>a", "<assistant><call>function f %A", "<result>r", beside_text="<assistant>%C"
    ),
    "Llama 3.1": Kind(
        LLAMA_3_1,
        "<system>Today. <user>a",
        '<assistant>{"name": "f", "parameters": %A}',
        '<ipython>"r"',
        takes_text=False,
    ),
    "Mistral": Kind(MISTRAL, "[INST]a", '[CALL]{"name": "f", "arguments": %A} %I', "[RESULT]r %I", takes_text=False),
    "Hermes": Kind(
        HERMES,
        "<system>You call functions. <user>a",
        '<assistant><call>{"name": "f", "arguments": %A}',
        "<result>r",
        takes_text=False,
    ),
    "ChatML": Kind(CHATML, "<user>a", "<assistant>%C", "<tool>r"),
}

ID = "abcdefgh1"
LONG_ID = "call_9pw1qnYScqvGrCH58HWCvFH6"
CUT = '{"city": "Par'
USER = {"role": "user", "content": "a"}
SYSTEM = {"role": "system", "content": "brief"}
DEVELOPER = {"role": "developer", "content": "brief"}
FUNCTION = {"role": "function", "name": "f", "content": "r"}

each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
each_content = pytest.mark.parametrize("content", [None, "", "hm"])


def call(content: str | None, arguments: Any, call_id: str = ID) -> dict[str, Any]:
    calls = [{"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def answer(call_id: str = ID, **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "r"} | fields


@cache
def model(template: str) -> ByteTokenizer:
    return ByteTokenizer({}, None, ChatTemplate(template, {}, Path("here")))


def rendered(template: str, *messages: dict[str, Any]) -> str:
    body = ChatBody(model="m", messages=list(messages))
    try:
        return bytes(conversation_tokens(body, model(template))).decode()
    except RequestError:
        return REFUSED


def as_sent(template: str, *messages: dict[str, Any]) -> str:
    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = json.dumps
    try:
        return environment.from_string(template).render(messages=messages, tools=None)
    except (jinja2.TemplateError, TypeError):
        return REFUSED


@each_kind
@each_content
@pytest.mark.parametrize(
    ("arguments", "text", "json_text"),
    [
        ('{"a" :1}', '{"a" :1}', '{"a": 1}'),
        ({"a": 1}, '{"a": 1}', '{"a": 1}'),
        (CUT, CUT, json.dumps({"arguments": CUT})),
        ("plain", "plain", '{"arguments": "plain"}'),
        ("", "{}", "{}"),
        (None, "{}", "{}"),
    ],
)
def test_a_past_call_is_rendered_as_the_template_renders_calls(
    kind: Kind, content: str | None, arguments: Any, text: str, json_text: str
):
    shown = kind.beside_text if content and kind.beside_text else kind.call
    shown = shown.replace("%C", content or "").replace("%A", text if kind.takes_text else json_text)
    wanted = (kind.user + shown + kind.answer).replace("%I", ID)
    assert rendered(kind.template, USER, call(content, arguments), answer()) == wanted


@each_kind
@each_content
@pytest.mark.parametrize("arguments", ['{"a" :1}', CUT, "plain", ""])
def test_the_older_form_of_a_call_and_its_answer_is_rendered_as_the_newer(
    kind: Kind, content: str | None, arguments: str
):
    older = {"role": "assistant", "content": content, "function_call": {"name": "f", "arguments": arguments}}
    newer = [USER, call(content, arguments, "f")]
    found = rendered(kind.template, USER, older, FUNCTION)
    assert found == rendered(kind.template, *newer, answer("f", name="f"))
    assert found != rendered(kind.template, *newer, answer("f", name="f", content="s"))


@each_kind
def test_a_developers_message_is_rendered_as_the_systems(kind: Kind):
    alone = rendered(kind.template, DEVELOPER, USER)
    assert "brief" in alone
    assert alone == rendered(kind.template, SYSTEM, USER)
    first = {"role": "system", "content": "first"}
    after = rendered(kind.template, first, DEVELOPER, USER)
    assert after == rendered(kind.template, first, SYSTEM, USER)
    assert ("brief" in after) == (kind.template != MISTRAL)  # which refuses a second system message


@pytest.mark.parametrize(
    ("template", "messages", "lost"),
    [
        (DEEPSEEK_V3, [USER, call("", "{}")], "<system><user>a<assistant>"),
        (DEEPSEEK_V3, [USER, call(None, {"a": 1})], REFUSED),
        (LLAMA_3_1, [USER, call(None, "{}")], '<system>Today. <user>a<assistant>{"name": "f", "parameters": "{}"}'),
        (MISTRAL, [USER, call("", {}, LONG_ID)], REFUSED),
        (CHATML, [USER, call(None, "{}")], REFUSED),
        (QWEN3, [USER, FUNCTION], "<user>a"),
        (HERMES, [USER, FUNCTION], "<system>You call functions. <user>a"),
        (QWEN3, [DEVELOPER, USER], "<user>a"),
        (MISTRAL, [DEVELOPER, USER], REFUSED),
    ],
)
def test_without_a_change_the_templates_lose_or_refuse_the_past(
    template: str, messages: list[dict[str, Any]], lost: str
):
    assert as_sent(template, *messages) == lost
    assert rendered(template, *messages) not in (lost, REFUSED)


def test_a_long_id_becomes_a_short_one_where_the_template_refuses_it():
    def ids(given: str) -> tuple[str, ...]:
        text = rendered(MISTRAL, USER, call("", "{}", given), answer(given))
        found = re.fullmatch(r"\[INST\]a\[CALL\]\{.*\} ([a-zA-Z0-9]{9})\[RESULT\]r (.*)", text)
        return found.groups() if found else ()

    short, same = ids(LONG_ID)
    assert short == same
    assert ids(LONG_ID + "x") not in ((short, short), ())
    assert ids(ID) == (ID, ID)
    assert f"<call>{LONG_ID} " in rendered(KIMI_K2, USER, call("", "{}", LONG_ID), answer(LONG_ID))


CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}{% endfor %}"


def test_arguments_stay_text_where_the_template_refuses_the_role_tool():
    refusal = "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    template = "{% for m in messages %}" + refusal + "{{ m.content or '' }}" + CALLS
    assert rendered(template, USER, call(None, {"a": 1})) == 'a{"a": 1}'
    assert rendered(template, USER, call(None, '{"a" :1}')) == 'a{"a" :1}'
    assert as_sent(template, USER, call(None, {"a": 1})) == "a{'a': 1}"
    assert rendered(template, USER, call(None, "{}"), answer()) == REFUSED


def test_null_content_is_not_printed_as_a_word():
    template = "{% for m in messages %}{{ m.content }}" + CALLS
    assert rendered(template, USER, call(None, "{}")) == "a{}"
    assert as_sent(template, USER, call(None, "{}")) == "aNone{}"
    assert rendered("None" + template, USER, call(None, "{}")) == "Nonea{}"


def test_arguments_become_an_object_where_the_template_takes_no_text_and_shows_some_of_it():
    template = "{% for m in messages %}{{ m.content }}" + CALLS.replace("arguments }}", "arguments.items() | length }}")
    assert rendered(template, USER, call("", '{"a": 1, "b": 2}')) == "a2"
    assert as_sent(template, USER, call("", '{"a": 1, "b": 2}')) == REFUSED


def test_a_call_without_a_type_gets_it():
    sent = call("", "{}")
    del sent["tool_calls"][0]["type"]
    template = "{% for m in messages %}{{ m.content }}" + CALLS.replace("c.function", "c.type + c.function")
    assert rendered(template, USER, sent) == "afunction{}"


def test_content_stays_as_it_was_sent_where_the_template_takes_both_forms():
    template = "{% for m in messages %}{% if m.content is not none %}<text>{{ m.content }}{% endif %}" + CALLS
    assert rendered(template, USER, call(None, "{}")) == "<text>a{}"
    assert rendered(template, USER, call("", "{}")) == "<text>a<text>{}"


EVERY_ROLE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TREATED = (
    "{% for m in messages %}{% if m.role == 'developer' %}<dev>{% elif m.role == 'function' %}<fn>"
    "{% else %}<{{ m.role }}>{% endif %}{{ m.content }}{% endfor %}"
)
LISTED = EVERY_ROLE.replace(
    "<",
    "{% if m.role not in ['developer', 'user', 'assistant', 'function'] %}"
    "{{ raise_exception('no such role') }}{% endif %}<",
)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (TREATED, "<dev>brief<user>a<fn>r"),
        (LISTED, "<developer>brief<user>a<function>r"),
        (EVERY_ROLE, "<system>brief<user>a<tool>r"),
        ("{# tool['function'] and \"developer\" #}" + EVERY_ROLE, "<system>brief<user>a<tool>r"),
        (EVERY_ROLE.replace("m.role", "m.role | upper"), "<SYSTEM>brief<USER>a<TOOL>r"),
    ],
)
def test_a_role_stays_only_where_the_template_treats_it_as_no_other(template: str, text: str):
    assert rendered(template, DEVELOPER, USER, FUNCTION) == text
