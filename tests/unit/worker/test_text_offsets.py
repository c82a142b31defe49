"""`text_offset` of a completion: however the text is cut into tokens and pieces, each offset is where a token begins in
the text of its choice, in characters.
"""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prfaas.wire.engine import TokenLogprob, Tokens
from prfaas_worker.assets import model_directory
from prfaas_worker.front.openai_in import RequestReader
from prfaas_worker.front.openai_out import ChoiceDetokenizer, ResponseFormatter, TextOffsets
from prfaas_worker.front.serving import ServedModel
from prfaas_worker.tokenizer import load_tokenizer

TINY = load_tokenizer(model_directory("builtin:kimi-linear-tiny"))
SERVED = ServedModel(model_name="tiny", fingerprint="", vocab_size=264, max_context=100, max_choices=8)
EOT = 262


class Pieces:
    """A tokenizer whose tokens are the numbered byte strings it was made of."""

    def __init__(self, pieces: list[bytes]):
        self.token_bytes = pieces.__getitem__


def places(*tokens: bytes, start: int = 0) -> list[int]:
    return TextOffsets(Pieces([*tokens]), start).push(range(len(tokens)))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        ([b"ab", b"", b"c"], [0, 2, 2]),
        (["é".encode(), b"x"], [0, 1]),
        ([b"a", b"\xe2\x82", b"\xac", b"b"], [0, 1, 1, 2]),
        ([b"\xf0", b"\x9f", b"\x98", b"\x80!", b"?"], [0, 0, 0, 0, 2]),
        ([b"\xe2\x82", b"a", b"b"], [0, 1, 2]),  # a damaged character shows as one U+FFFD
        ([b"\xe2\x82", b"\xe2\x82\xac", b"b"], [0, 1, 2]),
        ([b"\xe0", b"\x80", b"b"], [0, 1, 2]),
        (["\ufffd".encode(), b"b"], [0, 1]),
    ],
)
def test_a_token_is_where_its_first_byte_is(tokens: list[bytes], wanted: list[int]):
    assert places(*tokens) == wanted
    assert places(*tokens, start=7) == [7 + place for place in wanted]


@given(st.lists(st.binary(max_size=4), max_size=12))
@example([b"\xed\xa0", b""])
def test_whatever_the_bytes_the_text_before_a_token_ends_at_its_place(tokens: list[bytes]):
    whole = b"".join(tokens).decode("utf-8", "replace")
    before = b""
    for token, place in zip(tokens, places(*tokens), strict=True):
        # Ended by a letter, what stands before is itself; unended, its last bytes may begin what the token ends. They
        # are one character, or two: b"\xed\xa0" begins a surrogate, which no text may have.
        ended = len((before + b"x").decode("utf-8", "replace")) - 1
        assert ended - 2 <= place <= ended
        assert whole[:place] == before.decode("utf-8", "replace")[:place]
        before += token


def logprobs(parts: list[list[int]], **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole answer's choice, and a stream's choices, for tokens that come in these parts."""
    body = {"model": "tiny", "prompt": "x", "logprobs": 0, "max_tokens": 50} | fields
    job = RequestReader(SERVED, TINY).completion_job(msgspec.json.encode(body))
    choice, answers = ChoiceDetokenizer(0, job, TINY), ResponseFormatter(job, SERVED, TINY)
    pieces = []
    for number, part in enumerate(parts):
        reason = "length" if number == len(parts) - 1 else None
        pieces.append(choice.piece(Tokens(1, 0, part, [TokenLogprob(-1.0, [])] * len(part), reason)))
        if pieces[-1].reason is not None:
            break
    events = b"".join(answers.event(piece, None) for piece in pieces).split(b"\n\n")[:-1]
    return answers.whole_choice(pieces), [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]


def test_tokens_without_text_are_named_after_a_while_in_a_stream_that_may_continue():
    """To a gateway, a stream without events is one of a dead worker."""
    events = []
    for more in ({}, {"prfaas_stream": {"seed": 1, "created": 1}}):
        job = RequestReader(SERVED, TINY).completion_job(msgspec.json.encode({"model": "tiny", "prompt": "x"} | more))
        choice, answers = ChoiceDetokenizer(0, job, TINY), ResponseFormatter(job, SERVED, TINY)
        pieces = [choice.piece(Tokens(1, 0, [one], [], None)) for one in [*b"ab", *[EOT] * 70]]
        events.append([answers.event(piece, None) for piece in pieces])
    assert [sum(map(bool, some)) for some in events] == [2, 4]
    named = [json.loads(one[6:])["choices"][0]["token_ids"] for one in events[1] if one]
    assert [len(ids) for ids in named] == [1, 1, 32, 32]


def test_a_stream_counts_on_where_it_was():
    whole, stream = logprobs([[*b"a\xe2\x82"], [0xAC], [*b"bc", EOT], [*b"d"]])
    assert whole["text"] == "a€bcd"
    assert whole["logprobs"]["text_offset"] == [0, 1, 1, 1, 2, 3, 4, 4]
    assert [place for part in stream for place in part["logprobs"]["text_offset"]] == [0, 1, 1, 1, 2, 3, 4, 4]


def test_tokens_of_a_stop_string_stand_behind_the_text():
    whole, _ = logprobs([[*b"ab"], [*b"END"], [*b"x"]], stop="END")
    assert (whole["text"], whole["finish_reason"]) == ("ab", "stop")
    assert whole["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert whole["logprobs"]["tokens"] == ["a", "b", "E", "N", "D"]
