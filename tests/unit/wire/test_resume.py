"""What a stream tells of its tokens is read as it was written, and what strangers write is refused."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import BadInputError
from prfaas.wire.resume import (
    CUT,
    ResumableHeader,
    Resume,
    SentChoice,
    comment,
    decode_resume,
    encode_resume,
    read_comments,
)

TOKENS = st.lists(st.integers(0, (1 << 32) - 1), max_size=9)
COMMENT = st.tuples(st.integers(0, 127), st.integers(0, 1 << 40), TOKENS, st.sampled_from(["", "stop", "length"]))


@given(st.lists(COMMENT))
def test_comments_between_events_are_read_as_they_were_written(comments):
    event = b'data: {"text": ": t 0 1 5;"}\n\n'
    data = b"".join(event + comment(*one) for one in comments)
    assert [(one.choice, one.characters, one.token_ids.tolist(), one.reason) for one in read_comments(data)] == comments


def test_a_comment_is_one_line_that_readers_of_events_skip():
    assert comment(0, 5, [104, 105]) == b": t 0 5 104,105;\n\n"
    assert comment(3, 7, [], "stop") == b": t 3 7 - stop;\n\n"
    assert comment(3, 7, [1], "stop").endswith(CUT)


@pytest.mark.parametrize("ids", [b"4294967296", b"1,,2", b",", b"9" * 5000])
def test_a_comment_with_numbers_that_are_no_tokens_is_refused(ids: bytes):
    with pytest.raises(BadInputError):
        list(read_comments(b": t 0 5 " + ids + b";\n\n"))


@given(st.dictionaries(st.integers(0, 127), st.builds(SentChoice, TOKENS, st.integers(0, 1 << 40), st.just("stop"))))
def test_a_document_comes_back(choices):
    resume = Resume("f", 3, choices)
    assert decode_resume(encode_resume(resume)) == resume


@given(st.binary(max_size=40))
def test_a_document_of_strangers_is_refused_or_one(data: bytes):
    with contextlib.suppress(BadInputError):
        decode_resume(data)


def test_a_document_counts_what_is_to_be_computed_again():
    assert Resume("f", 0, {0: SentChoice([1, 2], 2), 1: SentChoice([1, 2, 3], 3, "stop")}).sent_tokens == 2


@pytest.mark.parametrize("text", ["", "1", "1 2 3", "-1 2", "1 x", f"{1 << 63} 2", "1" * 30 + " 2", "\u0661 2"])
def test_a_header_of_another_form_is_refused(text: str):
    with pytest.raises(BadInputError):
        ResumableHeader.read(text)


def test_a_header_comes_back():
    assert ResumableHeader.read(ResumableHeader((1 << 63) - 1, 1_700_000_000).encode()) == (
        (1 << 63) - 1,
        1_700_000_000,
    )
