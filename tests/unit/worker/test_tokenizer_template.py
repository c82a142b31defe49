"""Chat templates: the dialect of public checkpoints is understood, whatever a template refuses is a 400, and neither a
user's letters nor a user's variables become special tokens.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.errors import ConfigError, RequestError
from prfaas_worker.tokenizer import Conversation, Tokenizer, load_tokenizer
from prfaas_worker.tokenizer.base import ByteTokenizer
from prfaas_worker.tokenizer.chat_template import ChatTemplate, Special

SPECIALS = {"256": {"content": "<s>"}, "257": {"content": "[END]"}, "258": {"content": "[END]]"}}
HELLO = [{"role": "user", "content": "hello"}]


def tokenizer(directory: Path, template: Any = None, **config: Any) -> Tokenizer:
    known = {"tokenizer_class": "byte", "added_tokens_decoder": SPECIALS, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(known | config))
    return load_tokenizer(directory)


def rendered(directory: Path, template: Any, messages: Any = HELLO, **settings: Any) -> str:
    """What the template makes of a conversation, special tokens written out."""
    model = tokenizer(directory, template)
    return model.decode(model.encode_chat(Conversation(messages, **settings)))


def test_the_file_wins_over_the_configuration(tmp_path: Path):
    (tmp_path / "chat_template.jinja").write_text("file")
    assert rendered(tmp_path, "configuration") == "file"


def test_of_several_templates_the_default_is_used(tmp_path: Path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert rendered(tmp_path, named) == "plain"
    with pytest.raises(RequestError, match="this model has no chat template"):
        rendered(tmp_path, named[:1])


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}{% if true %}{% continue %}{% endif %}x{% endfor %}ok", "ok"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hello!"),
        ("{{ ['<é>'] | tojson }}", '["<é>"]'),
        ("{{ messages[0] | tojson(indent=1) }}", '{\n "role": "user",\n "content": "hello"\n}'),
        ("{{ strftime_now('%') }}{{ tools is none }}", "%True"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ bos_token }}{{ eos_token }}", "<s>[END]"),
    ],
)
def test_the_dialect_of_public_checkpoints(tmp_path: Path, template: str, text: str):
    model = tokenizer(tmp_path, template, bos_token="<s>", eos_token={"content": "[END]"})
    assert model.decode(model.encode_chat(Conversation(HELLO))) == text


def test_the_callers_variables_reach_the_template_as_letters(tmp_path: Path):
    model = tokenizer(tmp_path, "{{ mood }}{{ deep.list[0] }}<s>")
    token_ids = model.encode_chat(Conversation(HELLO, variables={"mood": "<s>", "deep": {"list": ["[END]]"]}}))
    assert token_ids == [*b"<s>[END]]", 256]


GUARDED = ByteTokenizer(
    {"<s>": Special(256), "[END]": Special(257), "[END]]": Special(258)},
    None,
    ChatTemplate("{% for m in messages %}<s>{{ m.content }}[END]]{% endfor %}", {}, Path("here")),
)


@given(st.lists(st.text(st.sampled_from("<s>[END]]"), max_size=12), min_size=1, max_size=3))
@settings(deadline=None)
def test_no_letters_of_users_become_special_tokens(contents: list[str]):
    messages = [{"role": "user", "content": content} for content in contents]
    token_ids = GUARDED.encode_chat(Conversation(messages))
    wanted: list[int] = []
    for content in contents:
        wanted += [256, *content.encode(), 258]
    assert token_ids == wanted


def test_without_the_guard_they_would(tmp_path: Path):
    """The control: letters of the template itself, spelled as a user's are, do become special tokens."""
    model = tokenizer(tmp_path, "<s>[END]][END]")
    assert model.encode_chat(Conversation(HELLO)) == [256, 258, 257]


@pytest.mark.parametrize("mark", ["\ufdd0", "\ufdd1"])
@pytest.mark.parametrize("field", ["content", "name"])
def test_the_two_marks_cannot_be_sent(tmp_path: Path, mark: str, field: str):
    model = tokenizer(tmp_path, "x")
    with pytest.raises(RequestError, match=f"U\\+{ord(mark):04X}"):
        model.encode_chat(Conversation([{"role": "user", "content": "", field: f"a{mark}"}]))


DEEP = {
    "brackets": "{{" + "(" * 3000 + "1" + ")" * 3000 + "}}",
    "signs": "{{" + "-" * 3000 + "1}}",
    "blocks for Jinja": "{% if x %}" * 3000 + "{% endif %}" * 3000,
    "loops for Python": "{% for x in messages %}" * 30 + "{% endfor %}" * 30,
}


@pytest.mark.parametrize("source", DEEP.values(), ids=DEEP)
def test_a_template_that_is_nested_too_deeply_is_none(tmp_path: Path, source: str):
    with pytest.raises(ConfigError, match="not a chat template"):
        tokenizer(tmp_path, source)


def test_a_macro_that_calls_itself_is_a_refusal(tmp_path: Path):
    with pytest.raises(RequestError, match="refuses the messages"):
        rendered(tmp_path, "{% macro turn() %}{{ turn() }}{% endmacro %}{{ turn() }}")


CONTINUED = "{% for m in messages %}{{ m.role }}:{{ m.content | trim }}[END]{% endfor %}" + (
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_an_answer_can_be_continued(tmp_path: Path):
    messages = [*HELLO, {"role": "assistant", "content": "hello and "}]
    assert rendered(tmp_path, CONTINUED, messages, continued=True) == "user:hello[END]assistant:hello and "
    whole = "user:hello[END]assistant:hello and[END]"
    assert rendered(tmp_path, CONTINUED, messages, add_generation_prompt=False) == whole
    assert rendered(tmp_path, CONTINUED, messages) == whole + "assistant:"


def test_a_template_that_hides_the_answer_cannot_continue_it(tmp_path: Path):
    with pytest.raises(RequestError, match="cannot be continued"):
        rendered(tmp_path, "{{ messages[0].role }}", continued=True)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no such role') }}",
        "{{ messages[9].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].content.nothing.nothing }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 'x' | strptime }}",
    ],
)
def test_what_a_template_cannot_render_is_the_callers_400(tmp_path: Path, template: str):
    if "strptime" in template:
        with pytest.raises(ConfigError, match="not a chat template"):
            tokenizer(tmp_path, template)
        return
    with pytest.raises(RequestError, match="refuses the messages") as raised:
        rendered(tmp_path, template)
    assert (raised.value.status, raised.value.param) == (400, "messages")


@pytest.mark.parametrize("template", ["{% for %}", 7, [{"name": "default"}]])
def test_what_is_no_template_is_refused_at_the_start(tmp_path: Path, template: Any):
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        tokenizer(tmp_path, template)


def called(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]


def over_calls(body: str) -> str:
    """A template that renders the functions of all past calls."""
    calls = "{% for call in m.tool_calls or [] %}{% set f = call.function %}" + body + "{% endfor %}"
    return "{% for m in messages %}" + calls + "{% endfor %}"


LOOP = "{% for key, value in f.arguments.items() %}{{ key }}={{ value }};{% endfor %}"
AS_TEXT = over_calls("{{ f.arguments }}")
ADDED = over_calls("{{ '' + f.arguments + '' }}")
AS_JSON = over_calls("{{ f.arguments | tojson }}")
EITHER = over_calls("{{ f.arguments if f.arguments is string else f.arguments | tojson }}")
WHOLE = over_calls("{{ f | tojson }}")
ITEMS = over_calls(LOOP)
FILTERED = over_calls(LOOP.replace(".items()", " | items"))
TEXT_OR_ITEMS = over_calls("{% if f.arguments is string %}{{ f.arguments }}{% else %}" + LOOP + "{% endif %}")
CUT = '{"city": "Par'
HALF = '{"a": "\\ud83d"}'


@pytest.mark.parametrize(
    ("arguments", "text", "json_text", "items"),
    [
        ('{"a" :1}', '{"a" :1}', '{"a": 1}', "a=1;"),
        ({"a": 1, "b": "é<"}, '{"a": 1, "b": "é<"}', '{"a": 1, "b": "é<"}', "a=1;b=é<;"),
        (CUT, CUT, json.dumps({"arguments": CUT}), f"arguments={CUT};"),
        ("no JSON", "no JSON", '{"arguments": "no JSON"}', "arguments=no JSON;"),
        ("[1]", "[1]", '{"arguments": "[1]"}', "arguments=[1];"),
        ([1], "[1]", '{"arguments": "[1]"}', "arguments=[1];"),
        (HALF, HALF, json.dumps({"arguments": HALF}), f"arguments={HALF};"),
        ("", "{}", "{}", ""),
        (" ", "{}", "{}", ""),
        (None, "{}", "{}", ""),
        ("null", "{}", "{}", ""),
        ({}, "{}", "{}", ""),
    ],
)
def test_past_arguments_are_rendered_in_the_form_that_the_template_takes(
    tmp_path: Path, arguments: Any, text: str, json_text: str, items: str
):
    for template, wanted in (
        (AS_TEXT, text),
        (ADDED, text),
        (EITHER, text),
        (AS_JSON, json_text),
        (WHOLE, f'{{"name": "f", "arguments": {json_text}}}'),
        (ITEMS, items),
        (FILTERED, items),
        (TEXT_OR_ITEMS, items if not items.startswith("arguments=") else text),
    ):
        assert rendered(tmp_path, template, called(arguments)) == wanted, template


def test_arguments_may_be_as_deep_as_a_client_likes(tmp_path: Path):
    deep = '{"a":' * 5000
    assert rendered(tmp_path, EITHER, called(deep)) == deep
    whole = '{"a":' * 300 + "1" + "}" * 300
    assert rendered(tmp_path, AS_JSON, called(whole)) == json.dumps({"arguments": whole})


def test_arguments_hold_no_special_tokens(tmp_path: Path):
    model = tokenizer(tmp_path, AS_JSON)
    for arguments in ('{"a": "<s>"}', "<s>", {"<s>": 1}):
        assert 256 not in model.encode_chat(Conversation(called(arguments)))


def test_a_call_without_arguments_or_in_a_flat_form_is_rendered_too(tmp_path: Path):
    bare = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}]
    assert rendered(tmp_path, AS_JSON, bare) == "{}"
    flat = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": '{"a": 1}'}]}]
    assert rendered(tmp_path, AS_JSON.replace("call.function", "call"), flat) == '{"a": 1}'
