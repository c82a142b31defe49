"""Text to tokens and back: bytes survive exactly, special tokens come only from the template, and streams never show
half a character or any part of a stop string.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.errors import ConfigError, RequestError
from prfaas_worker.assets import model_directory
from prfaas_worker.front.openai_out import TextStream
from prfaas_worker.tokenizer import Conversation, Tokenizer, load_tokenizer
from prfaas_worker.tokenizer.base import ByteTokenizer

BOS, USER, ASSISTANT, END = 256, 259, 260, 262
TINY = load_tokenizer(model_directory("builtin:kimi-linear-tiny"))


def chat(messages: list[dict], tokenizer: Tokenizer = TINY, **settings: Any) -> list[int]:
    return tokenizer.encode_chat(Conversation(messages, **settings))


@given(st.text())
@settings(deadline=None)
def test_a_prompt_is_its_bytes_after_the_beginning_token(text: str):
    assert TINY.encode(text) == [BOS, *text.encode()]


def test_a_conversation_is_rendered_with_special_tokens():
    messages = [
        {"role": "user", "content": "hé"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": ""},
    ]
    assert chat(messages) == [*(BOS, USER, *"hé".encode(), END), *(ASSISTANT, ord("x"), END), *(USER, END, ASSISTANT)]


def test_a_role_that_the_template_refuses_is_quoted():
    with pytest.raises(RequestError, match="not 'wizard'"):
        chat([{"role": "wizard", "content": "x"}])


@pytest.mark.parametrize("config", ["", "{", "[]", "{}", '{"tokenizer_class": "byte"}', '{"tokenizer_class": "bpe"}'])
def test_a_directory_without_a_byte_tokenizer_is_refused_by_file(tmp_path: Path, config: str):
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ConfigError, match=str(tmp_path / "tokenizer_config.json")):
        load_tokenizer(tmp_path)


def streamed(data: bytes, cuts: list[int], *stop: str) -> list[str]:
    """Texts that a stream shows when the tokens come in pieces."""
    stream = TextStream(TINY, stop)
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    texts = [stream.push(data[start:end], final=False) for start, end in itertools.pairwise(edges)]
    return [*texts, stream.push([], final=True)]


@given(st.text(), st.lists(st.integers(0, 100)))
@settings(deadline=None)
def test_streamed_text_is_the_whole_text_without_damaged_characters(text: str, cuts: list[int]):
    assert "".join(streamed(text.encode(), cuts)) == text


@given(st.binary(), st.lists(st.integers(0, 100)))
@settings(deadline=None)
def test_bytes_that_are_no_utf8_become_replacement_characters_wherever_they_are_cut(data: bytes, cuts: list[int]):
    assert "".join(streamed(data, cuts)) == data.decode("utf-8", "replace")


@given(st.text(st.sampled_from("abé")), st.lists(st.text(st.sampled_from("abé"), min_size=1), min_size=1, max_size=3))
@settings(deadline=None)
def test_text_ends_right_before_the_first_stop_string(text: str, stops: list[str]):
    """Cut token by token, so that "first" is the one completed first, as an unhurried stream finds it."""
    shown = "".join(streamed(text.encode(), list(range(len(text.encode()))), *stops))
    ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    if not ends:
        assert shown == text
    else:
        first_end = min(end for end, _ in ends)
        assert shown == text[: min(start for end, start in ends if end == first_end)]


def test_the_first_stop_string_does_not_depend_on_how_many_tokens_come_at_once():
    for text, stops in [("abcd", ["bcd", "c"]), ("xaby", ["ab", "b"])]:
        one_by_one = "".join(streamed(text.encode(), list(range(len(text))), *stops))
        assert "".join(streamed(text.encode(), [], *stops)) == one_by_one


@given(st.lists(st.integers(0, 100)), st.integers(0, 12))
@settings(deadline=None)
def test_tokens_that_may_not_stop_are_not_searched(cuts: list[int], free: int):
    data = "aab aab aéb".encode()
    stream = TextStream(TINY, ["ab"], unstopped_tokens=free)
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    shown = "".join(stream.push(data[start:end], final=False) for start, end in itertools.pairwise(edges))
    shown += stream.push([], final=True)
    place = data.find(b"ab", free)
    assert shown == (data if place < 0 else data[:place]).decode()
    assert stream.stopped == (place >= 0)


def test_special_tokens_add_no_text():
    assert TextStream(TINY, ()).push([ord("a"), END, ord("b"), USER], final=True) == "ab"


def test_a_tokenizer_without_template_says_where_to_go():
    with pytest.raises(RequestError, match="use /v1/completions"):
        chat([{"role": "user", "content": "x"}], ByteTokenizer({}, None, None))
