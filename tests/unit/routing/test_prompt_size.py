"""Proves that a prompt's size is what the model reads: the way of writing the body and other fields do not count."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.kvindex.canonical import CHAT_FIELDS, COMPLETION_FIELDS, MESSAGES_FIELDS, RESPONSE_FIELDS
from prfaas.routing.prompt_size import (
    LARGE_BYTES,
    MAX_VALUES,
    PIECE_CHARACTERS,
    PLACES,
    PromptSize,
    Unit,
    prompt_size,
    prompt_values,
)

CHATS = {"model": "m", "messages": [{"role": "user", "content": "Bonjour, le café coûte 3 €."}]}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Où ?", "parameters": {"type": "object", "properties": {}}},
}
SCHEMA = {"type": "object", "properties": {f"field_{n}": {"type": "string", "x": "y" * 60} for n in range(60)}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5000}}
SOUND = {"type": "input_audio", "input_audio": {"data": "B" * 5000, "format": "wav"}}


def size_of(body: bytes | dict[str, Any], names: frozenset[str] = CHAT_FIELDS) -> PromptSize:
    raw = json.dumps(body).encode() if isinstance(body, dict) else body
    return prompt_size(prompt_values(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]), names))


def counted(body: bytes | dict[str, Any], names: frozenset[str] = CHAT_FIELDS) -> dict[str, int]:
    """Return what a prompt has, by the names of the units: each character once."""
    found = {unit.name: count for unit, count in zip(Unit, size_of(body, names).counts, strict=True) if count}
    return {name: count for name, count in found.items() if name != "MARK_RUN"}


def read(text: str) -> dict[str, int]:
    return counted({"prompt": text}, COMPLETION_FIELDS)


def chat(content: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}], **more}


def test_characters_count_by_their_kind():
    assert read("Ab c\t\n12,.") == {"LETTER": 3, "SPACE": 3, "DIGIT": 2, "MARK": 2}
    assert read("éßñ") == {"LATIN": 3}
    assert read("Привет") == {"ALPHABET": 6}
    assert read("中文。かな한글") == {"CJK": 7}
    assert read("“😀ไ\x01") == {"OTHER": 4}
    assert read("") == {}


def test_marks_count_as_runs_besides():
    for text, runs in (("", 0), ("a", 0), ("a.", 1), (".a", 1), ('{"a": [1, "b"]}', 6), ("“。é", 0), ("é.é", 1)):
        assert size_of({"prompt": text}, COMPLETION_FIELDS).counts[Unit.MARK_RUN] == runs


@given(st.text())
def test_every_character_counts_once(text):
    assert sum(read(text).values()) == len(text)


@pytest.mark.parametrize("parts", [("word, ", 90_000), ("word 12; ", 1000, "中文。", 3000), ("    x = 1\\n", 7777)])
def test_of_a_long_text_pieces_stand_for_the_whole(parts):
    text = "".join(part * times for part, times in zip(parts[::2], parts[1::2], strict=True))
    exact: dict[str, int] = {}
    for at in range(0, len(text), 1000):
        for name, count in read(text[at : at + 1000]).items():
            exact[name] = exact.get(name, 0) + count
    found = read(text)
    assert found.keys() == exact.keys()
    assert all(found[name] == pytest.approx(exact[name], rel=0.1, abs=0.01 * len(text)) for name in exact)
    assert sum(found.values()) == pytest.approx(len(text), abs=len(Unit))


@given(st.text(max_size=200))
def test_the_way_of_writing_the_body_does_not_count(text):
    body = chat(text, tools=[TOOL])
    forms = [
        json.dumps(body),
        json.dumps(body, ensure_ascii=False),
        json.dumps(body, indent=8),
        json.dumps(dict(reversed(body.items())), separators=(",", ":")),
        json.dumps(body).replace("m", "\\u006d"),
    ]
    assert len({size_of(form.encode()) for form in forms}) == 1


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        {"guided_json": SCHEMA},
        {"structured_outputs": {"json": SCHEMA}},
        {"metadata": {"t": "m" * 3000}},
        {"logit_bias": {str(token): -1 for token in range(200)}},
        {"stop": ["x" * 500] * 4},
        {"user": "u" * 1000, "prompt_cache_key": "k" * 1000, "safety_identifier": "s" * 1000},
        {"prompt": "x" * 3000, "input": "x" * 3000, "system": "x" * 3000, "instructions": "x" * 3000},
        {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"},
        {"tools": [], "documents": None, "tool_choice": "none"},
        {"unknown": {"messages": ["x" * 3000]}},
    ],
)
def test_fields_that_make_no_prompt_do_not_count(more):
    assert size_of({**CHATS, **more}) == size_of(CHATS)


def test_a_message_counts_with_its_texts_and_its_calls_and_not_with_its_identities():
    call = {"id": "call_" + "1" * 500, "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "hi", "id": "x" * 500, "annotations": ["x" * 500]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "ok"}], "tool_call_id": call["id"]},
    ]
    assert counted({"messages": messages}) == {"LETTER": 8, "MARK": 5, "SPACE": 1, "DIGIT": 1, "MESSAGE": 4}


def test_arguments_that_are_no_text_count_as_the_json_that_a_template_writes():
    texts = [{"a": [1, "b"]}, json.dumps({"a": [1, "b"]}, separators=(",", ":"))]
    chats = [{"messages": [{"tool_calls": [{"function": {"name": "f", "arguments": one}}]}]} for one in texts]
    assert counted(chats[0]) == counted(chats[1])


@pytest.mark.parametrize("choice", ["auto", "none", "required", {"type": "function", "function": {"name": "weather"}}])
def test_tools_count_as_plain_json_whatever_the_choice(choice):
    """vLLM writes them into the prompt even if none may be called."""
    found = counted({**CHATS, "tools": [TOOL], "tool_choice": choice})
    assert found["TOOL_BYTE"] == len(json.dumps([TOOL], ensure_ascii=False, separators=(",", ":")).encode())
    assert {**found, "TOOL_BYTE": 0} == {**counted(CHATS), "TOOL_BYTE": 0}


def test_documents_count_beside_the_texts():
    assert counted({**CHATS, "documents": [{"text": "a"}]})["DOCUMENT_BYTE"] == len('[{"text":"a"}]')


@pytest.mark.parametrize("medium", [PICTURE, SOUND, {"type": "file", "file": {"file_data": "C" * 5000}}])
def test_a_medium_counts_as_one_however_many_bytes_it_has(medium):
    text = {"type": "text", "text": "what is this"}
    assert counted(chat([text, medium, medium])) == {**counted(chat("what is this")), "MEDIUM": 2}


def test_token_ids_count_by_their_entries_in_a_batch_too():
    for form in ([1, 20, 300], [[1, 20], [300]], [[[1, 20, 300]]]):
        for indent in (None, 4):
            raw = json.dumps({"prompt": form}, indent=indent).encode()
            assert counted(raw, COMPLETION_FIELDS) == {"TOKEN": 3}
    assert counted({"prompt": []}, COMPLETION_FIELDS) == counted({"prompt": [[]]}, COMPLETION_FIELDS) == {}


def test_a_batch_of_texts_counts_them_all():
    assert counted({"prompt": ["ab", "c"]}, COMPLETION_FIELDS) == read("abc")
    assert read("[1,2,3]") == {"MARK": 4, "DIGIT": 3}, "a text that looks like a list"


def test_items_of_the_responses_api_count_as_messages_do():
    text = {"LETTER": 2, "MESSAGE": 2}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    assert counted({"input": "hi"}, RESPONSE_FIELDS) == counted({"input": items}, RESPONSE_FIELDS) == text
    assert counted({"input": "hi", "instructions": "ok"}, RESPONSE_FIELDS) == {"LETTER": 4, "MESSAGE": 3}
    items += [
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "x" * 500},
        {"type": "function_call_output", "output": "no", "call_id": "x" * 500},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "x" * 500},
    ]
    assert counted({"input": items}, RESPONSE_FIELDS) == {"LETTER": 7, "MARK": 2, "MESSAGE": 5}
    picture = {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}
    assert counted({"input": [picture]}, RESPONSE_FIELDS) == {"MEDIUM": 1, "MESSAGE": 2}


def test_an_earlier_answer_that_the_engine_keeps_makes_the_size_a_part():
    assert size_of({"input": "hi"}, RESPONSE_FIELDS).is_whole
    assert not size_of({"input": "hi", "previous_response_id": "r"}, RESPONSE_FIELDS).is_whole


def test_blocks_of_the_messages_api_count_as_messages_do():
    plain = {"messages": [{"role": "user", "content": "hi"}], "system": "ok", "max_tokens": 1}
    blocks = {
        "system": [{"type": "text", "text": "ok", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    }
    assert counted(plain, MESSAGES_FIELDS) == counted(blocks, MESSAGES_FIELDS) == {"LETTER": 4, "MESSAGE": 3}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 5000}}
    content = [
        image,
        {"type": "tool_use", "id": "x" * 500, "name": "f", "input": {"a": "b"}},
        {"type": "tool_result", "tool_use_id": "x" * 500, "content": [{"type": "text", "text": "no"}]},
        {"type": "thinking", "thinking": "hm", "signature": "x" * 500},
    ]
    found = counted({"messages": [{"role": "assistant", "content": content}]}, MESSAGES_FIELDS)
    assert found == {"LETTER": 7, "MARK": 7, "MESSAGE": 2, "MEDIUM": 1}


def test_a_prompt_that_the_engine_cuts_has_no_more_tokens_than_the_client_asks_for():
    assert size_of({"prompt": "x" * 3000, "truncate_prompt_tokens": 7}, COMPLETION_FIELDS).most_tokens == 7
    for plain in (None, -1, 0, "7", 1.5):
        body = {"prompt": "x", "truncate_prompt_tokens": plain}
        assert size_of(body, COMPLETION_FIELDS).most_tokens is None


DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["content", "text", "input", "tool_calls", "x"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from([*CHAT_FIELDS, "prompt", "input", "system", "instructions"]), DOCUMENTS))
def test_any_json_has_a_size(body):
    for names in (CHAT_FIELDS, COMPLETION_FIELDS, RESPONSE_FIELDS, MESSAGES_FIELDS):
        assert min(size_of(body, names).counts) >= 0


def test_lists_in_lists_hold_nothing():
    assert counted(b'{"messages":[{"content":' + b"[" * 500 + b"]" * 500 + b"}]}") == {"MESSAGE": 2}


@pytest.mark.parametrize(
    "raw",
    [
        b'{"messages":[{"tool_calls":[{"function":{"arguments":{"a":' + b"9" * 5000 + b"}}}]}]}",
        b'{"messages":[{"tool_calls":[{"function":{"arguments":{"a":1e99999}}}]}]}',
        b'{"tools":{"a":' + b"9" * 30 + b"}}",
    ],
)
def test_what_cannot_be_read_here_counts_as_it_is_written(raw):
    """Another engine may read it."""
    assert sum(counted(raw).values()) >= len(raw) // 2


def test_a_large_field_of_many_small_values_is_not_decoded_and_counts_as_it_is_written():
    many = b",".join([b"[]"] * (LARGE_BYTES // 3 + 1))
    for raw, names in (
        (b'{"messages":[' + many + b"]}", CHAT_FIELDS),
        (b'{"prompt":[' + many + b"]}", COMPLETION_FIELDS),
    ):
        assert sum(counted(raw, names).values()) == pytest.approx(len(many), abs=20)
    ids = b",".join([b"7"] * (LARGE_BYTES // 2 + 1))
    assert counted(b'{"prompt":[' + ids + b"]}", COMPLETION_FIELDS) == {"TOKEN": LARGE_BYTES // 2 + 1}
    text = "one, two " * (LARGE_BYTES // 9 + 1)
    assert sum(read(text).values()) == pytest.approx(len(text), abs=len(Unit))
    assert counted({**CHATS, "user": "," * 2 * LARGE_BYTES}) == counted(CHATS)
    assert sum(read("," * 2 * LARGE_BYTES).values()) == 2 * LARGE_BYTES
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * LARGE_BYTES}}
    assert counted(chat([picture])) == {"MEDIUM": 1, "MESSAGE": 2}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [{"text": ""}] * (MAX_VALUES - 1) + [{"text": "x"}]}]},
        {"messages": [{"role": "user", "content": ""}] * MAX_VALUES + [{"role": "user", "content": "x"}]},
    ],
)
def test_of_more_parts_than_a_context_can_hold_the_first_are_read_and_the_others_are_one_text(body):
    last = body["messages"][-1]
    written = json.dumps([last if len(body["messages"]) > 1 else last["content"][-1]], separators=(",", ":"))
    assert counted(body) == {**read(written), "MESSAGE": len(body["messages"]) + 1}


def test_whoever_knows_the_places_that_are_counted_cannot_hide_the_text_between_them():
    text = list("7" * 400_000)
    for place in PLACES:
        at = int((len(text) - PIECE_CHARACTERS) * place)
        text[at : at + PIECE_CHARACTERS] = " " * PIECE_CHARACTERS
    values = {"prompt": "".join(text)}
    assert prompt_size(values).counts[Unit.SPACE] == len(text), "the control"
    for shift in (0.1, 0.5, 0.9):
        assert prompt_size(values, shift).counts[Unit.SPACE] < 0.2 * len(text)
