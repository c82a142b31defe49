"""Keeps what another vLLM instance needs to go on with a broken stream: the ids of the prompt and of the sent tokens.

vLLM names them if a request asks for them (`return_token_ids`). A client that did not ask does not see them: the log
puts `null` in their place, as vLLM itself would. So a relayed stream is what it would be without the gateway.

    data: {..."choices":[{"index":0,"text":"lo",..."prompt_token_ids":[7,8],"token_ids":[104,105]}]}     from vLLM
    data: {..."choices":[{"index":0,"text":"lo",..."prompt_token_ids":null,"token_ids":null}]}           to the client

An id list is found by its key without parsing. No text can hold such a key: JSON escapes its quotation marks. vLLM ends
a failed stream with an error event and `[DONE]`. That error is not relayed: it is the sign of a broken stream.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from prfaas.engines import ResumedBy
from prfaas.errors import UNREADABLE, BadInputError
from prfaas.wire.resume import DONE
from prfaas_gateway.engines.shared import ERROR_EVENT, prompts
from prfaas_gateway.engines.vllm_resume import AnswerWriter, SentAnswer
from prfaas_gateway.openai import read_error
from prfaas_gateway.request import Fields

MAX_HELD_BYTES: Final = 16 << 20
"""The longest event: the first one names a prompt's tokens."""
CHATS: Final = "/v1/chat/completions"
UNREAD_BYTES: Final = 64 << 10
STREAMS: Final = ("/v1/completions", CHATS)
_END: Final = b"\n\n"
_IDS: Final = b'token_ids":['
_PROMPT: Final = b'"prompt_'
_FINISHED: Final = b'"finish_reason":"'
_USAGE: Final = b'"choices":[],'
# A chunk of vLLM that names no ids although they were asked for: what the client has is not known any more.
_HIDDEN: Final = b',"token_ids":null'
_PARSED: Final = (b'"reasoning":"', b'"reasoning_content":"', b'"tool_calls":[')
_NULL: Final = b"null"
_PLAIN: Final[Mapping[str, tuple[Any, ...]]] = {
    "stream": (True,),
    "n": (None, 1),
    "use_beam_search": (None, False),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None,),
    "logprobs": (None, False),
    "echo": (None, False),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "tools": (None, []),
    "functions": (None, []),
}
"""What a request may say of these fields if its stream is to go on elsewhere; all else has its own state."""


def can_resume(path: str, fields: Fields) -> bool:
    """Return whether another vLLM instance could go on with the stream of such a request."""
    if path not in STREAMS or not fields.get("stream") or prompts(fields) not in (None, 1):
        return False
    return all(_value(fields, name) in plain for name, plain in _PLAIN.items()) and not any(
        name.startswith("guided_") for name in fields
    )


def _value(fields: Fields, name: str) -> Any:
    """Return a field's value, or the field where only the engine may be able to read it."""
    try:
        return msgspec.json.decode(fields[name]) if name in fields else None
    except (*UNREADABLE, ValueError):
        return fields[name]


class VllmStreamLog:
    """The client's part of one stream of vLLM."""

    resumed_by: ResumedBy = "TokenIds"

    def __init__(self, path: str, fields: Fields):
        self.fields = fields
        """The request's own."""
        self.is_chat = path == CHATS
        self.pieces = 0
        self.error_event = b""
        self.is_refused = False
        self.shows_ids = bool(_value(fields, "return_token_ids"))
        self._prompt = b""
        self._sent = bytearray()
        self._first = b""
        self._last = b""
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._finished = False
        self._has_usage = False
        self._is_opaque = False
        self._held = b""
        self._error = b""
        self._writer: AnswerWriter | None = None

    def take(self, piece: bytes) -> bytes:
        """Add a piece from an instance; return the bytes to send to the client now: whole events.

        Raises BadInputError for an event that is too long.
        """
        if self._held:
            piece = self._held + piece
            self._held = b""
        if self._error:
            return self._hold(piece)
        if not piece.endswith(_END):
            cut = piece.rfind(_END) + len(_END) if _END in piece else 0
            self._hold(piece[cut:])
            piece = piece[:cut]
        at = _error_at(piece)
        if at >= 0:
            self._error, piece = piece[at:], piece[:at]
        if not piece:
            return b""
        piece = self._writer.rewrite(piece) if self._writer is not None else self._read(piece)
        if piece:
            self.pieces += 1
            self._last = piece[-len(DONE) :]
        return piece

    def _hold(self, rest: bytes) -> bytes:
        self._held = rest
        if len(rest) > MAX_HELD_BYTES:
            raise BadInputError(f"an event of a stream has more than {MAX_HELD_BYTES} bytes")
        return b""

    def _read(self, events: bytes) -> bytes:
        """Keep the ids that whole events name; return the events as the client asked for them."""
        kept, end = [], 0
        at = events.find(_IDS)
        while at >= 0:
            first, after = at + len(_IDS), events.index(b"]", at)
            if events.endswith(_PROMPT, 0, at):
                self._prompt = events[first:after]
            else:
                self._add(events[first:after])
            kept += events[end : first - 1], _NULL
            end = after + 1
            at = events.find(_IDS, end)
        shown = b"".join((*kept, events[end:])) if kept else events
        if not self._first:
            self._first = shown[: shown.index(_END)]
        self._unread.append(events)
        self._unread_bytes += len(events)
        if self._unread_bytes > UNREAD_BYTES:
            self._read_unread()
        return events if self.shows_ids else shown

    def _read_unread(self) -> None:
        """Look for what nearly no event has; in many events at once that costs a tenth."""
        events, self._unread, self._unread_bytes = b"".join(self._unread), [], 0
        self._finished = self._finished or _FINISHED in events
        self._has_usage = self._has_usage or _USAGE in events
        self._is_opaque = self._is_opaque or _HIDDEN in events or any(key in events for key in _PARSED)

    def _add(self, ids: bytes) -> None:
        if ids:
            self._sent += b"," + ids if self._sent else ids

    @property
    def is_whole(self) -> bool:
        """Whether the client has the whole answer."""
        return self._last == DONE

    @property
    def has_enough(self) -> bool:
        """Whether the answer ended before its instance did: the gateway found a stop string."""
        return self._writer is not None and self._writer.has_stopped

    def worker_died(self) -> None:
        """Discard the beginning of an event; keep the instance's error."""
        error, self._error, self._held = self._error, b"", b""
        self._read_unread()
        if error:
            self.error_event = error.removesuffix(DONE)
            code = read_error(error.split(_END)[0].removeprefix(b"data: ")).get("code")
            self.is_refused = self.is_refused or (isinstance(code, int) and 400 <= code < 500)
        if self._writer is not None:
            self._add(self._writer.new_ids)
            self._finished, self._has_usage = self._writer.has_finished, self._writer.has_usage
            self._writer = None

    @property
    def can_go_on(self) -> bool:
        """Whether the tokens that the client has are known, and their text is the answer's whole state."""
        if not self._first:
            return True
        return bool(self._prompt) and not self._is_opaque and not self._finished and _is_text(self.fields)

    @property
    def sent_tokens(self) -> int:
        """Tokens of the answer to compute again, as a prompt."""
        return self._sent.count(b",") + 1 if self._sent else 0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt; 0: unknown."""
        return self._prompt.count(b",") + 1 if self._prompt else 0

    @property
    def answered(self) -> SentAnswer | None:
        """What the client has; None if it has nothing, so that another instance begins anew."""
        if not self._first:
            return None
        return SentAnswer(self._first, bytes(self._prompt), bytes(self._sent), self.is_chat)

    def ending(self) -> bytes:
        """Return what a stream lacks that broke after the last token of the answer: its usage and its end."""
        answered = self.answered
        if answered is None or not self._finished:
            return b""
        return DONE if self._has_usage else AnswerWriter(answered, self.fields, "").end()

    def expect_rest(self, sent: bytes, writer: AnswerWriter) -> None:
        """Expect the stream of an instance that continues after the tokens `sent`, given to `writer`."""
        self._sent = bytearray(sent)
        self._writer = writer


def _error_at(events: bytes) -> int:
    """Return where an error event begins; -1 if there is none."""
    if events.startswith(ERROR_EVENT):
        return 0
    if events.find(_END) >= len(events) - len(_END):  # one event, as nearly always
        return -1
    at = events.find(_END + ERROR_EVENT)
    return -1 if at < 0 else at + len(_END)


def _is_text(fields: Fields) -> bool:
    """Return whether a prompt is text or token ids alone: ids stand for an image, but do not hold it."""
    try:
        messages = msgspec.json.decode(fields.get("messages", b"[]"), type=list[dict[str, Any]])
    except UNREADABLE:
        return False
    contents = [part for one in messages if isinstance(parts := one.get("content"), list) for part in parts]
    return all(isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text") for part in contents)
