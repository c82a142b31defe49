"""Proves that a stream is read the same however its bytes are cut, and that hostile ones end in an error of ours."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.client.answers import MAX_EVENT_BYTES, ChunkReader, CompletionChunk, EventSplitter, read_decision
from prfaas.client.errors import error_of
from prfaas.errors import PrfaasError, ProtocolError

STREAM = b': note\ndata: {"a":1}\r\n\r\nevent: x\ndata: b\ndata:c\n\n\n\ndata: [DONE]\n\n'


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_cut_points_do_not_matter(cuts):
    events, found, at = EventSplitter(), [], 0
    for cut in sorted([*cuts, len(STREAM)]):
        found += events.feed(STREAM[at:cut])
        at = max(at, cut)
    assert found == [b'{"a":1}', b"b\nc", b"[DONE]"]


@given(st.lists(st.binary(max_size=50)))
def test_any_bytes_are_read_or_end_in_an_error_of_ours(pieces):
    chunks = ChunkReader(CompletionChunk)
    try:
        for piece in pieces:
            for chunk in chunks.feed(b"data: " + piece + b"\n\n"):
                assert isinstance(chunk.text, str)
        chunks.end()
    except PrfaasError:
        pass


def test_an_event_that_never_ends_is_cut_off():
    events = EventSplitter()
    assert list(events.feed(b"x" * MAX_EVENT_BYTES)) == []
    with pytest.raises(ProtocolError, match="more than"):
        list(events.feed(b"x"))


@given(st.integers(400, 599), st.binary(max_size=100), st.text(max_size=20))
def test_any_refusal_is_an_error_of_ours(status, body, waiting):
    assert isinstance(error_of(status, {"retry-after": waiting}, body), PrfaasError)


@given(st.text(max_size=30))
def test_headers_that_are_no_numbers_are_left_out(text):
    decision = read_decision({"x-prfaas-cached-tokens": text, "x-prfaas-queue-seconds": text})
    assert decision.cached_tokens is None or text.isdecimal()
