"""Keeps what another instance needs to continue a broken stream: the ids of the prompt and of the sent tokens.

vLLM and our worker name them if a request asks for them (`return_token_ids`). A client that did not ask does not see
them: the log puts `null` in their place, as the engine itself would. So a relayed stream is what it would be without
the gateway.

    data: {..."choices":[{"index":0,"text":"lo",..."prompt_token_ids":[7,8],"token_ids":[104,105]}]}    from the engine
    data: {..."choices":[{"index":0,"text":"lo",..."prompt_token_ids":null,"token_ids":null}]}          to the client

An id list is found by its key without parsing. No text can hold such a key: JSON escapes its quotation marks. An engine
ends a failed stream with an error event, vLLM with `[DONE]` behind it. That error is not relayed: it is the sign of a
broken stream.
"""

import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec

from prfaas.engines import ResumedBy
from prfaas.errors import UNREADABLE, BadInputError
from prfaas.wire.streams import SEED_BITS, STREAM_FIELD, StreamParams
from prfaas_gateway.engines.shared import ERROR_EVENT, prompts
from prfaas_gateway.engines.vllm_resume import AnswerWriter, SentAnswer, chunk_of, numbers
from prfaas_gateway.openai import DONE, read_error
from prfaas_gateway.request import Fields

MAX_HELD_BYTES: Final = 16 << 20
"""The longest event: the first one names a prompt's tokens."""
CHATS: Final = "/v1/chat/completions"
UNREAD_BYTES: Final = 16 << 10
STREAMS: Final = ("/v1/completions", CHATS)
_END: Final = b"\n\n"
_IDS: Final = b'token_ids":['
_PROMPT: Final = b'"prompt_'
_CHOICE: Final = b'"choices":[{"index":'
_OF_IDS: Final = b"0123456789,"
_INDEX_DIGITS: Final = 8
_FINISHED: Final = b'"finish_reason":"'
_USAGE: Final = b'"choices":[],'
# A chunk that names no ids although they were asked for: what the client has is not known any more.
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
    if path not in STREAMS or prompts(fields) not in (None, 1):
        return False
    return all(value_of(fields, name) in plain for name, plain in _PLAIN.items()) and not any(
        name.startswith("guided_") for name in fields
    )


def value_of(fields: Fields, name: str) -> Any:
    """Return a field's value, or the field where only the engine may be able to read it."""
    try:
        return msgspec.json.decode(fields[name]) if name in fields else None
    except (*UNREADABLE, ValueError):
        return fields[name]


class TokenLog:
    """The client's part of one stream of several `choices`; vLLM continues one alone."""

    resumed_by: ResumedBy = "TokenIds"

    def __init__(self, path: str, fields: Fields, choices: int = 1):
        self.fields = fields
        """The request's own."""
        self.is_chat = path == CHATS
        self.pieces = 0
        self.error_event = b""
        self.is_refused = False
        self.shows_ids = bool(value_of(fields, "return_token_ids"))
        self._choices = choices
        self._prompt = b""
        self._sent: dict[int, bytearray] = {}
        self._ended: set[int] = set()
        self._first = b""
        self._last = b""
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._has_usage = False
        self._is_opaque = False
        self._held = b""
        self._error = b""
        self._writer: AnswerWriter | None = None

    def take(self, piece: bytes) -> bytes:
        """Add a piece from an instance; return the bytes to send to the client now: whole events.

        Raises BadInputError for an event that is too long, or names no tokens where it says so.
        """
        at = piece.find(_IDS)
        if at > 0 and self._first and not (self._held or self._error or self._writer):
            first, after = at + len(_IDS), piece.find(b"]", at)
            is_one = piece.find(_END) == len(piece) - len(_END) and piece.find(_IDS, after) < 0
            if is_one and not piece.endswith(_PROMPT, 0, at):  # the tokens of one event, as nearly always
                ids = self._checked(piece[first:after])
                self._add(0 if self._choices == 1 else self._choice_of(piece, at), ids)
                self._keep_unread(piece)
                self.pieces += 1
                self._last = piece
                return piece if self.shows_ids else piece[: first - 1] + _NULL + piece[after + 1 :]
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
            self._last = piece
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
            first, after = at + len(_IDS), events.find(b"]", at)
            ids = self._checked(events[first:after])
            if not events.endswith(_PROMPT, 0, at):
                self._add(self._choice_of(events, at), ids)
            elif self._choices == 1:
                self._prompt = ids
            kept += events[end : first - 1], _NULL
            end = after + 1
            at = events.find(_IDS, end)
        shown = b"".join((*kept, events[end:])) if kept else events
        if not self._first:
            self._first = shown[: shown.index(_END)]
        self._keep_unread(events)
        return events if self.shows_ids else shown

    def _keep_unread(self, events: bytes) -> None:
        self._unread.append(events)
        self._unread_bytes += len(events)
        if self._unread_bytes > UNREAD_BYTES:
            self._read_unread()

    def _read_unread(self) -> None:
        """Look for what nearly no event has; in many events at once that costs a tenth."""
        events, self._unread, self._unread_bytes = b"".join(self._unread), [], 0
        if _FINISHED in events:
            self._ended |= {self._choice_of(one, len(one)) for one in events.split(_END) if _FINISHED in one}
        self._has_usage = self._has_usage or _USAGE in events
        self._is_opaque = self._is_opaque or _HIDDEN in events or any(key in events for key in _PARSED)

    def _choice_of(self, events: bytes, end: int) -> int:
        """Return the choice of the last event that begins before `end`. Raises BadInputError if it names none."""
        if self._choices == 1:
            return 0
        at = events.rfind(_CHOICE, 0, end)
        first = at + len(_CHOICE)
        index, comma, _ = events[first : first + _INDEX_DIGITS].partition(b",")
        if at < 0 or not comma or not index.isdigit():
            raise self._unreadable("no choice")
        return int(index)

    def _checked(self, ids: bytes) -> bytes:
        """Return the inside of a list of token ids. Raises BadInputError for what is none, or has no end."""
        if ids.translate(None, _OF_IDS):
            raise self._unreadable("tokens that are no numbers")
        return ids

    def _unreadable(self, what: str) -> BadInputError:
        """Return the error for an event that names such things. What the client has is not known from here on."""
        self._is_opaque = True
        return BadInputError(f"an event of a stream names {what}")

    def _add(self, choice: int, ids: bytes) -> None:
        sent = self._sent.get(choice)
        if sent:
            sent += b"," + ids if ids else b""
        else:
            self._sent[choice] = bytearray(ids)

    @property
    def is_whole(self) -> bool:
        """Whether the client has the whole answer."""
        return self._last.endswith(DONE)

    @property
    def has_enough(self) -> bool:
        """Whether the answer ended before its instance did: the gateway found a stop string."""
        return self._writer is not None and self._writer.has_stopped

    def worker_died(self) -> None:
        """Discard the beginning of an event; keep the instance's error."""
        error, self._error, self._held = self._error, b"", b""
        with suppress(BadInputError):
            self._read_unread()
        if error:
            self.error_event = error.removesuffix(DONE)
            words = read_error(error.split(_END)[0].removeprefix(b"data: "))
            code, kind = words.get("code"), words.get("type")
            is_refusal = kind == "invalid_request_error" or (isinstance(code, int) and 400 <= code < 500)
            self.is_refused = self.is_refused or is_refusal
        if self._writer is not None:
            self._add(0, self._writer.new_ids)
            self._ended |= {0} if self._writer.has_finished else set()
            self._has_usage = self._writer.has_usage
            self._writer = None

    @property
    def can_go_on(self) -> bool:
        """Whether the tokens that the client has are known, and their text is the answer's whole state."""
        if not self._first:
            return not self._is_opaque
        return bool(self._prompt) and not self._is_opaque and not self._has_ended and _is_text(self.fields)

    @property
    def _has_ended(self) -> bool:
        """Whether the client has the end of every choice."""
        return len(self._ended) >= self._choices

    @property
    def sent_tokens(self) -> int:
        """Tokens of the answer to compute again, as a prompt."""
        sent = (ids for choice, ids in self._sent.items() if choice not in self._ended)
        return sum(ids.count(b",") + 1 for ids in sent if ids)

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the prompt; None: unknown."""
        return self._prompt.count(b",") + 1 if self._prompt else None

    @property
    def answer_tokens(self) -> int | None:
        """Tokens of all answers that the client has; None: unknown, as before the first id."""
        sent = (*self._sent.values(), self._writer.new_ids if self._writer is not None else b"")
        return sum(ids.count(b",") + 1 for ids in sent if ids) or None

    @property
    def answered(self) -> SentAnswer | None:
        """What the client has; None if it has nothing, so that another instance begins anew."""
        if not self._first:
            return None
        return SentAnswer(self._first, bytes(self._prompt), bytes(self._sent.get(0, b"")), self.is_chat)

    def ending(self) -> bytes:
        """Return what a stream lacks that broke after the last token of the answer: its usage and its end."""
        answered = self.answered
        if answered is None or not self._has_ended:
            return b""
        if self._has_usage:
            return DONE
        with suppress(BadInputError):  # the answer was whole, but its engine wrote what nobody can count
            return AnswerWriter(answered, self.fields, "").end()
        return b""

    def expect_rest(self, sent: bytes, writer: AnswerWriter) -> None:
        """Expect the stream of an instance that continues after the tokens `sent`, given to `writer`."""
        self._sent = {0: bytearray(sent)}
        self._writer = writer


class _Begun(msgspec.Struct):
    """What is read of the first chunk of our worker's stream."""

    system_fingerprint: str | None = None


class DrawnLog(TokenLog):
    """The client's part of one stream of our worker, which continues all choices of any request.

    It draws the next tokens as the first worker would have, since it knows the seed and the drawn tokens.
    """

    resumed_by: ResumedBy = "DrawnTokens"

    def __init__(self, path: str, fields: Fields):
        answers = value_of(fields, "n")
        super().__init__(path, fields, (answers if isinstance(answers, int) else 1) * (prompts(fields) or 1))
        self._seed = secrets.randbits(SEED_BITS)
        self._created_seconds = int(time.time())

    @property
    def asks(self) -> dict[str, Any]:
        """The fields that ask for the stream, or for the rest of it. Raises BadInputError for unreadable events."""
        stream = StreamParams(
            seed=self._seed,
            created=self._created_seconds,
            model=(chunk_of(self._first, _Begun).system_fingerprint or "") if self._first else "",
            drawn={choice: numbers(bytes(ids)) for choice, ids in self._sent.items()},
            ended=tuple(sorted(self._ended)),
        )
        return {STREAM_FIELD: stream}

    @property
    def can_go_on(self) -> bool:
        return not self._is_opaque

    def ending(self) -> bytes:
        options = value_of(self.fields, "stream_options")
        wants_usage = isinstance(options, dict) and options.get("include_usage") is True  # then the next worker says it
        return DONE if self._has_ended and (self._has_usage or not wants_usage) else b""


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
