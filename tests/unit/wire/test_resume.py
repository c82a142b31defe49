"""What a stream tells of its tokens is read as it was written, and what strangers write is refused."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import BadInputError
from prfaas.wire.resume import (
    COMMENT,
    CUT,
    ResumableHeader,
    Resume,
    SentChoice,
    TokenEntry,
    comment,
    decode_resume,
    encode_resume,
    read_comments,
    split_comments,
)

TOKENS = st.lists(st.integers(0, (1 << 32) - 1), max_size=9)
REASONS = st.sampled_from(["", "stop", "length"])
ENTRIES = st.builds(TokenEntry, st.integers(0, 127), st.integers(0, 1 << 40), TOKENS, REASONS)
EVENT = b"data: " + json.dumps({"text": (COMMENT + b"0 1 5" + CUT).decode()}).encode() + b"\n\n"


@given(st.lists(st.lists(ENTRIES, min_size=1)))
def test_comments_between_events_are_read_as_they_were_written(groups: list[list[TokenEntry]]):
    data = b"".join(EVENT + comment(entries) for entries in groups)
    events, comments = split_comments(data)
    assert events == EVENT * len(groups)
    for part in (data, comments):
        read = [one._replace(token_ids=list(one.token_ids)) for one in read_comments(part)]
        assert read == [entry for entries in groups for entry in entries]


def test_a_comment_is_one_line_that_readers_of_events_skip():
    assert comment([TokenEntry(0, 5, [104, 105])]) == b":\x1e0 5 104,105;\n\n"
    assert comment([TokenEntry(0, 5, [104]), TokenEntry(3, 7, [], "stop")]) == b":\x1e0 5 104;3 7 - stop;\n\n"
    assert comment([TokenEntry(3, 7, [1], "stop")]).endswith(CUT)


@pytest.mark.parametrize("ids", [b"4294967296", b"1,,2", b",", b"", b"-1", b"9" * 5000])
def test_a_comment_with_numbers_that_are_no_tokens_is_refused(ids: bytes):
    with pytest.raises(BadInputError):
        list(read_comments(COMMENT + b"0 5 " + ids + CUT))


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
