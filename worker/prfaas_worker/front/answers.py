"""The OpenAI API's answers: whole bodies of both endpoints, and the events of their streams as bytes.

A stream's usual event, new text and nothing else, is written around the text without building the body anew: with many
streams that is most of what this process does.
"""

import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from prfaas.wire.engine import TokenLogprob
from prfaas_worker.front.openai import Job
from prfaas_worker.front.tools.events import Argued, Called, Event, Said
from prfaas_worker.tokenizer import Tokenizer

_encode: Final = msgspec.json.Encoder().encode
_HOLE: Final = "\0"
_ENCODED_HOLE: Final = _encode(_HOLE)


class Scored(NamedTuple):
    """A token whose log probability was asked for, and the place in the choice's text at which it begins."""

    token: int
    logprob: TokenLogprob
    offset_characters: int


class Piece(NamedTuple):
    """What is new of one choice; `reason` is None until its last piece. With tools, `events` stand in for `text`.

    `token_ids` are its tokens; `scored` are empty where nobody asked for log probabilities.
    """

    index: int
    text: str
    events: Sequence[Event]
    scored: Sequence[Scored]
    reason: str | None
    first: bool
    token_ids: Sequence[int] = ()

    @property
    def characters(self) -> int:
        """Characters of text and of calls' arguments."""
        return len(self.text) + sum(len(event.text) for event in self.events if not isinstance(event, Called))


class Answers:
    """Builds what is sent back for one request."""

    def __init__(self, job: Job, request_id: str, model: str, tokenizer: Tokenizer, created: int | None = None):
        self._chat = job.chat
        self._tokenizer = tokenizer
        self._with_usage = job.include_usage or job.continuous_usage
        prefix = "chatcmpl" if job.chat else "cmpl"
        self._head = {"id": f"{prefix}-{request_id}", "created": created or int(time.time()), "model": model}
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def whole(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        kind = "chat.completion" if self._chat else "text_completion"
        return self._head | {"object": kind, "choices": list(choices), "usage": usage}

    def whole_choice(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return one choice of such a body from all its pieces."""
        logprobs = self._logprobs([entry for piece in pieces for entry in piece.scored])
        events = [event for piece in pieces for event in piece.events]
        said = [event.text for event in events if isinstance(event, Said)]
        text = "".join([piece.text for piece in pieces] + said)
        content: dict[str, Any] = {"text": text}
        if self._chat:
            calls = _whole_calls(events)
            message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
            content = {"message": message | ({"tool_calls": calls} if calls else {})}
        last = pieces[-1]
        return {"index": last.index, **content, "finish_reason": last.reason, "logprobs": logprobs}

    def event(self, piece: Piece, usage: dict[str, Any] | None) -> bytes:
        """Return a piece as server-sent events, empty if there is nothing to tell yet.

        `usage` is for streams that report it all along.
        """
        index, text, events, scored, reason, first, _ = piece
        if reason is None and not (first or scored or events or usage):
            if not text:
                return b""
            before, after = self._frames.get(index) or self._frame(index)
            return before + _encode(text) + after
        logprobs = self._logprobs(scored)
        contents = self._contents(piece)
        last = len(contents) - 1
        choices = [
            {"index": index}
            | content
            | {"finish_reason": reason if place == last else None, "logprobs": logprobs if place == 0 else None}
            for place, content in enumerate(contents)
        ]
        return b"".join(sse(self._chunk([choice], usage)) for choice in choices)

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """Return the event that ends a stream with its usage."""
        return sse(self._chunk([], usage))

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """Return the bytes before and behind the text of a choice's usual event."""
        content = {"delta": {"content": _HOLE}} if self._chat else {"text": _HOLE}
        choice = {"index": index, **content, "finish_reason": None, "logprobs": None}
        before, _, after = sse(self._chunk([choice], None)).partition(_ENCODED_HOLE)
        self._frames[index] = before, after
        return before, after

    def _chunk(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        body = self._head | {"object": kind, "choices": list(choices)}
        return body | {"usage": usage} if self._with_usage else body

    def _contents(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the choice's content for each chunk that a piece makes, at least one."""
        if not self._chat:
            return [{"text": piece.text}]
        events = piece.events or ([Said(piece.text)] if piece.text else [])
        deltas = [_delta(event) for event in events] or [{}]
        if piece.first:
            deltas[0] = {"role": "assistant", "content": ""} | deltas[0]
        return [{"delta": delta} for delta in deltas]

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any] | None:
        """Return log probabilities in the endpoint's form, None where none were asked for."""
        if not scored:
            return None
        if self._chat:
            return {
                "content": [
                    self._named(token, entry.logprob)
                    | {"top_logprobs": [self._named(other, logprob) for other, logprob in entry.top]}
                    for token, entry, _ in scored
                ]
            }
        return {
            "tokens": [self._name(token) for token, _, _ in scored],
            "token_logprobs": [entry.logprob for _, entry, _ in scored],
            "top_logprobs": [{self._name(other): logprob for other, logprob in entry.top} for _, entry, _ in scored],
            "text_offset": [offset for _, _, offset in scored],
        }

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._name(token),
            "logprob": logprob,
            "bytes": list(self._tokenizer.token_bytes(token)),
        }

    def _name(self, token: int) -> str:
        """A token's text, or as the OpenAI API writes it, its bytes where they are no text by themselves."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode() if data else f"token_id:{token}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def sse(body: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: %b\n\n" % _encode(body)


def usage_body(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Return the usage object of a request."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def error_body(message: str, *, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    """Return an OpenAI-style error."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _delta(event: Event) -> dict[str, Any]:
    match event:
        case Said(text):
            return {"content": text}
        case Called(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case Argued(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _whole_calls(events: Sequence[Event]) -> list[dict[str, Any]]:
    calls = []
    for event in events:
        if isinstance(event, Called):
            arguments = "".join(other.text for other in events if type(other) is Argued and other.index == event.index)
            function = {"name": event.name, "arguments": arguments}
            calls.append({"id": event.call_id, "type": "function", "function": function})
    return calls
