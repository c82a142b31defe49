"""Proves that a client gets the events that it asked for and nothing else, however a stream is cut on its way, and
wherever its worker dies. The streams are those of our worker's own writer and recorded ones of vLLM.
"""

import json
import re
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import BadInputError
from prfaas.wire.engine import TokenLogprob, Tokens
from prfaas.wire.streams import STREAM_FIELD
from prfaas_gateway.engines.token_log import DrawnLog, TokenLog
from prfaas_gateway.engines.vllm_resume import AnswerWriter, SentAnswer, numbers
from prfaas_gateway.openai import DONE
from prfaas_gateway.request import Fields, read_fields
from prfaas_worker.assets import model_directory
from prfaas_worker.front.openai_in import RequestReader
from prfaas_worker.front.openai_out import ChoiceDetokenizer, ResponseFormatter, usage_body
from prfaas_worker.front.serving import ServedModel
from prfaas_worker.tokenizer import load_tokenizer

from .speaker import BODY, LENGTH, STREAM, WHOLE, read, speak

TINY = load_tokenizer(model_directory("builtin:kimi-linear-tiny"))
SERVED = ServedModel(model_name="tiny", fingerprint="", vocab_size=264, max_context=500, max_choices=8)
WITHOUT_TEXT = 262
RECORDED = json.loads((Path(__file__).parent / "vllm_streams.json").read_text())
ODD = b'"token_ids":[7],"finish_reason":"stop"\r\n: t 0 1 5;\n\n' + DONE + '}"\u2028é日😀'.encode()
FIXED = {"seed": 1, "created": 1_795_425_279}


class Case(NamedTuple):
    """A stream of a worker, and what its client is to get."""

    make_log: Callable[[], TokenLog]
    stream: bytes
    shown: bytes

    def passed(self, *places: int) -> bytes:
        """Return what the client gets of a stream that is cut at these places."""
        log, passed = self.make_log(), b""
        for start, end in zip((0, *places), (*places, len(self.stream)), strict=True):
            passed += log.take(self.stream[start:end])
            assert self.shown.startswith(passed), "what was sent cannot be taken back"
            assert passed.endswith(b"\n\n") or not passed, "whole events only"
        assert log.is_whole
        return passed


def fields_of(body: bytes) -> Fields:
    return read_fields(body, every=True)[1]


def written(*writes: list[Tokens], chat: bool = False, **fields) -> Case:
    """Return the stream of a worker whose engine says this, each list in one write."""
    body = {"model": "tiny", "stream": True, "max_tokens": 200} | fields
    body |= {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    named, plain = (_stream(writes, body | more, chat) for more in ({STREAM_FIELD: FIXED}, {}))
    shown = re.sub(rb'"created":\d+', f'"created":{FIXED["created"]}'.encode(), plain)
    if WITHOUT_TEXT in writes[-2][0].token_ids:  # so many of them that two events have no text
        shown = re.sub(rb'"token_ids":\[[0-9,]*\]', b'"token_ids":null', named)
        assert shown.count(b"\n\n") == plain.count(b"\n\n") + 2
    return Case(lambda: DrawnLog(path, fields_of(msgspec.json.encode(body))), named, shown)


def _stream(writes: Sequence[list[Tokens]], body: dict, chat: bool) -> bytes:
    reader = RequestReader(SERVED, TINY)
    job = (reader.chat_job if chat else reader.completion_job)(msgspec.json.encode(body))
    choices = [ChoiceDetokenizer(index, job, TINY) for index in range(job.choices)]
    formatter, usage = ResponseFormatter(job, SERVED, TINY), usage_body(job.prompt_tokens, 7, 0)
    pieces = [choices[one.choice].piece(one) for write in writes for one in write]
    events = [formatter.event(piece, usage if job.has_continuous_usage else None) for piece in pieces]
    return b"".join(events) + (formatter.usage_event(usage) if job.has_usage else b"") + DONE


def say(token_ids: bytes | list[int], choice: int = 0, reason: str | None = None, **more) -> Tokens:
    return Tokens(1, choice, [*token_ids], more.get("logprobs", []), reason)


def one_by_one(text: bytes) -> list[list[Tokens]]:
    """Return writes of a token each."""
    return [[say([byte], reason="stop" if at == len(text) else None)] for at, byte in enumerate(text, 1)]


USAGE = {"include_usage": True, "continuous_usage_stats": True}
TWO = [
    [say(b"a"), say(b"\xc3", 1)],
    [say(b"b", reason="stop"), say(b"\xa9", 1)],
    [say(b"c", 1)],
    [say(b"", 1, "length")],
]
SCORED = [say(b"ab", reason=reason, logprobs=[TokenLogprob(-1.0, [(97, -1.0)])] * 2) for reason in (None, "length")]
STOPPED = written(*one_by_one(b"pub SECRET")[:-1], [say(b"T tail")], stop=["SECRET"])
CASES = {
    "odd text": written(*one_by_one(ODD)),
    "chat": written(*one_by_one(b"hello"), chat=True),
    "two choices": written(*TWO, n=2),
    "many events a write": written([say(b"a"), say(b"b"), say(b"\xc3")], [say(b"\xa9"), say(b"?", reason="stop")]),
    "tokens without text": written([say(b"a")], *[[say([WITHOUT_TEXT])]] * 70, [say(b"b", reason="stop")]),
    "usage": written(*one_by_one(b"hello"), stream_options=USAGE),
    "log probabilities": written(*[[one] for one in SCORED], logprobs=1),
    "a stop string": STOPPED,
}


def recorded(name: str) -> Case:
    asked, plain = ("".join(f"{one}\n\n" for one in RECORDED[each]["stream"]) for each in (f"{name}-ids", name))
    return Case(lambda: TokenLog(RECORDED[name]["path"], {}), asked.encode(), plain.encode())


CASES |= {f"vLLM, {name}": recorded(name) for name in RECORDED if not name.endswith("-ids")}


def events_by_the_standard(stream: bytes) -> list[str]:
    """Read a stream as the HTML standard says: a block without data is no event."""
    events, data = [], []
    for line in stream.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        name, _, value = line.partition(":")
        if name == "data":
            data.append(value.removeprefix(" "))
        elif not line and data:
            events.append("\n".join(data))
            data = []
    return events


def events_by_empty_lines(stream: bytes) -> list[str]:
    """Read a stream as openai-go before 3.43 does: every empty line ends an event, whose data are JSON or the end."""
    events, data = [], ""
    for line in stream.decode().removesuffix("\n").split("\n"):
        name, _, value = line.partition(":")
        if name == "data":
            data += value.removeprefix(" ")
        elif not line:
            if not data.startswith("[DONE]"):
                json.loads(data)
            events.append(data)
            data = ""
    return events


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_stream_in_two_pieces_shows_its_events_only(case: Case):
    for place in range(1, len(case.stream)):
        assert case.passed(place) == case.shown, f"cut behind byte {place}"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_stream_in_many_pieces_shows_its_events_only(case: Case):
    @given(st.lists(st.integers(1, len(case.stream) - 1), unique=True, max_size=60).map(sorted))
    def check(places: list[int]) -> None:
        assert case.passed(*places) == case.shown

    check()
    assert case.passed(*range(1, len(case.stream))) == case.shown
    assert case.passed() == case.shown


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_reader_reads_the_same_events(case: Case):
    events = events_by_the_standard(case.passed())
    assert events == events_by_empty_lines(case.passed())
    assert events[-1] == "[DONE]"
    assert all(json.loads(event)["object"] for event in events[:-1])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_log_knows_the_tokens_of_every_choice(case: Case):
    log = case.make_log()
    log.take(case.stream)
    log.worker_died()
    named: dict[int, list[int]] = {}
    for event in events_by_the_standard(case.stream)[:-1]:
        for choice in json.loads(event)["choices"]:
            named[choice["index"]] = named.get(choice["index"], []) + (choice.get("token_ids") or [])
    assert {choice: numbers(bytes(ids)) for choice, ids in log._sent.items()} == named
    assert any(named.values())
    assert log._ended == named.keys()


def test_odd_text_is_text():
    events = [json.loads(event) for event in events_by_empty_lines(CASES["odd text"].passed())[:-1]]
    assert "".join(event["choices"][0]["text"] for event in events).encode() == ODD


def test_a_stream_whose_worker_dies_anywhere_shows_its_events_only():
    for place in range(LENGTH):
        log = DrawnLog("/v1/chat/completions", fields_of(BODY))
        shown = log.take(STREAM[:place])
        log.worker_died()
        rest = speak(msgspec.structs.replace(log.asks[STREAM_FIELD], created=FIXED["created"]))
        assert read(shown + log.take(rest)) == WHOLE, f"died after byte {place}"


@pytest.mark.parametrize(("options", "ending"), [({}, b"data: [DONE]\n\n"), ({"include_usage": True}, b"")])
def test_a_stream_that_broke_behind_its_last_token_needs_no_worker_but_for_its_usage(options, ending: bytes):
    log = DrawnLog("/v1/completions", fields_of(msgspec.json.encode({"model": "m", "stream_options": options})))
    log.take(b'data: {"choices":[{"index":0,"text":"x","finish_reason":"stop","token_ids":[7]}]}\n\n')
    log.worker_died()
    assert log.ending() == ending


TORN = {
    "tokens of no choice": b'{"created":1,"token_ids":[7]}',
    "a choice that is no number": b'{"choices":[{"index":{},"token_ids":[7]}]}',
    "tokens that are texts": b'{"choices":[{"index":0,"token_ids":["7"]}]}',
    "tokens without an end": b'{"choices":[{"index":0,"token_ids":[7',
    "a prompt without an end": b'{"choices":[{"index":0,"prompt_token_ids":[7',
}


@pytest.mark.parametrize("event", TORN.values(), ids=TORN)
@pytest.mark.parametrize(
    "before", [b"", b'data: {"choices":[{"index":0,"token_ids":[5]}]}\n\n'], ids=["first", "later"]
)
def test_an_event_that_names_no_tokens_breaks_a_stream_that_nobody_continues(before: bytes, event: bytes):
    log = DrawnLog("/v1/chat/completions", fields_of(BODY))
    assert log.take(before) or not before
    with pytest.raises(BadInputError, match="an event of a stream names"):
        log.take(b"data: " + event + b"\n\n")
    log.worker_died()
    assert not log.can_go_on


def test_the_end_of_no_choice_breaks_nothing_that_was_sent_but_nobody_continues_it():
    log = DrawnLog("/v1/chat/completions", fields_of(BODY))
    event = b'data: {"choices":[],"finish_reason":"stop"}\n\n'
    assert log.take(event) == event
    log.worker_died()
    assert not log.can_go_on


@pytest.mark.parametrize("first", [b'{"finish_reason":"stop"', b'{"prompt_token_ids":[1,,2],"finish_reason":"stop"}'])
def test_an_answer_that_nobody_can_count_has_no_ending(first: bytes):
    log = TokenLog("/v1/completions", fields_of(b'{"model":"m","prompt":"x"}'))
    log.take(b"data: " + first + b"\n\n")
    log.worker_died()
    assert log.ending() == b""


@pytest.mark.parametrize(
    "choices", ['"x"', '{"a":1}', '[{"token_ids":["7"]}]', '[{"token_ids":7}]', '[{"text":7}]', "[7]"]
)
def test_what_an_instance_continues_with_is_checked(choices: str):
    sent = SentAnswer(b'data: {"id":"c"}', b"1", b"2", is_chat=False)
    with pytest.raises(BadInputError, match="no chunk"):
        AnswerWriter(sent, {}, "").rewrite(f'data: {{"choices":{choices}}}\n\n'.encode())


def test_a_log_of_a_long_stream_keeps_the_ids_and_no_event():
    log = DrawnLog("/v1/completions", {})
    event = b'data: {"choices":[{"index":0,"text":"' + 200 * b"x" + b'","token_ids":[70000]}]}\n\n'
    tracemalloc.start()
    for _ in range(20_000):
        log.take(bytes(bytearray(event)))
    size_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size_bytes < 15 * 20_000 < len(event) * 20_000 / 10
    assert log.sent_tokens == 20_000
