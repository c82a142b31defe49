"""Answers of the OpenAI API as types, whole or as a stream's chunks, and the decision that their headers report.

Unknown fields are ignored. A stream's bytes may be cut anywhere.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeVar

import msgspec

from prfaas.client.errors import BrokenStreamError, error_in_stream
from prfaas.errors import UNREADABLE, ProtocolError
from prfaas.util import decode_json
from prfaas.wire import headers as names

MAX_EVENT_BYTES: Final = 16 << 20


class ReportedDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request was served, as the gateway reports it; empty or None where it does not."""

    request_id: str = ""
    kind: str = ""
    """offload or local."""
    outcome: str = ""
    """ok, or fallback: the offload failed and the hub prefilled."""
    threshold_tokens: int | None = None
    prefill_cluster: str = ""
    prefill_instance: str = ""
    decode_instance: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    kv_bytes: int | None = None
    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    transfer_seconds: float | None = None


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """The tokens that a request used."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: CachedTokens | None = None


class Choice(msgspec.Struct, frozen=True):
    """One continuation of a prompt, or a piece of it."""

    index: int = 0
    text: str = ""
    finish_reason: str | None = None
    logprobs: Any = None


class Message(msgspec.Struct, frozen=True):
    """The assistant's message, or a piece of it."""

    role: str = "assistant"
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int = 0
    message: Message = Message()
    finish_reason: str | None = None
    logprobs: Any = None


class ChatDelta(msgspec.Struct, frozen=True):
    index: int = 0
    delta: Message = Message()
    finish_reason: str | None = None
    logprobs: Any = None


class Completion(msgspec.Struct, frozen=True):
    """The answer of POST /v1/completions."""

    id: str = ""
    model: str = ""
    choices: list[Choice] = []
    usage: Usage | None = None
    decision: ReportedDecision = ReportedDecision()

    @property
    def text(self) -> str:
        return self.choices[0].text if self.choices else ""


class CompletionChunk(Completion, frozen=True):
    """A piece of a Completion; its choices hold only new text."""


class ChatCompletion(msgspec.Struct, frozen=True):
    """The answer of POST /v1/chat/completions."""

    id: str = ""
    model: str = ""
    choices: list[ChatChoice] = []
    usage: Usage | None = None
    decision: ReportedDecision = ReportedDecision()

    @property
    def text(self) -> str:
        return (self.choices[0].message.content or "") if self.choices else ""


class ChatCompletionChunk(msgspec.Struct, frozen=True):
    """A piece of a ChatCompletion; its choices hold only new content."""

    id: str = ""
    model: str = ""
    choices: list[ChatDelta] = []
    usage: Usage | None = None

    @property
    def text(self) -> str:
        return (self.choices[0].delta.content or "") if self.choices else ""


class _Card(msgspec.Struct, frozen=True):
    id: str


class Models(msgspec.Struct, frozen=True):
    """The answer of GET /v1/models."""

    data: list[_Card] = []


_Answer = TypeVar("_Answer", Completion, ChatCompletion, CompletionChunk, ChatCompletionChunk, Models)
Whole = TypeVar("Whole", Completion, ChatCompletion)
ChunkT = TypeVar("ChunkT", CompletionChunk, ChatCompletionChunk)


def read_answer(body: bytes, kind: type[_Answer]) -> _Answer:
    """Return an answer's body as a type; raises ProtocolError where it does not fit."""
    return decode_json(body, kind, f"the answer is no {kind.__name__}", "; is the address a gateway's?")


def read_whole(body: bytes, kind: type[Whole], headers: Mapping[str, str]) -> Whole:
    return msgspec.structs.replace(read_answer(body, kind), decision=read_decision(headers))


def read_decision(headers: Mapping[str, str]) -> ReportedDecision:
    """Return the decision in an answer's headers, by lower-case names."""
    return ReportedDecision(
        request_id=headers.get(names.REQUEST_ID, ""),
        kind=headers.get(names.DECISION, ""),
        outcome=headers.get(names.OUTCOME, ""),
        threshold_tokens=_count(headers, names.THRESHOLD_TOKENS),
        prefill_cluster=headers.get(names.PREFILL_CLUSTER, ""),
        prefill_instance=headers.get(names.PREFILL_INSTANCE, ""),
        decode_instance=headers.get(names.DECODE_INSTANCE, ""),
        prompt_tokens=_count(headers, names.PROMPT_TOKENS),
        cached_tokens=_count(headers, names.CACHED_TOKENS),
        kv_bytes=_count(headers, names.KV_BYTES),
        queue_seconds=_number(headers, names.QUEUE_SECONDS),
        prefill_seconds=_number(headers, names.PREFILL_SECONDS),
        transfer_seconds=_number(headers, names.TRANSFER_SECONDS),
    )


def _number(headers: Mapping[str, str], name: str) -> float | None:
    try:
        return float(headers[name])
    except (KeyError, ValueError):
        return None


def _count(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None


class EventSplitter:
    """Splits a stream into the data of its events; comments and other fields are dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the data of every event that is whole with this piece; raises ProtocolError for one that never ends."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ProtocolError(f"an event of the stream has more than {MAX_EVENT_BYTES} bytes")
        for line in (whole.removesuffix(b"\r") for whole in lines):
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []


class ChunkReader:
    """Reads the chunks of one answer. `is_done` after the server has reported that it is whole."""

    def __init__(self, kind: type[Any]):
        self._kind = kind
        self._events = EventSplitter()
        self.is_done = False

    def feed(self, piece: bytes) -> Iterator[Any]:
        """Yield the chunks that are whole with this piece; raises the error that the server reports."""
        for data in self._events.feed(piece):
            if data == b"[DONE]":
                self.is_done = True
                return
            if (reported := _error_of(data)) is not None:
                raise error_in_stream(reported)
            yield read_answer(data, self._kind)

    def end(self) -> None:
        """Raise BrokenStreamError unless the answer is whole: a stream that simply ends is not."""
        if not self.is_done:
            raise BrokenStreamError("the stream ended before the answer was whole")


class _MaybeError(msgspec.Struct):
    error: Any = None


_maybe_error = msgspec.json.Decoder(_MaybeError)


def _error_of(data: bytes) -> object:
    try:
        return _maybe_error.decode(data).error
    except UNREADABLE as error:
        raise ProtocolError(f"an event of the stream is not JSON: {error}") from error
