"""Goes on with a broken answer of vLLM as a completion of its prompt's and its sent tokens; pure, without I/O.

    POST /v1/completions  {"prompt": [prompt ids, sent ids], "max_tokens": what is left, ...}

Three things are not in the ids, and so are added here:

- *Text.* vLLM holds text back that may begin a stop string, and a new instance does not know that text. So the gateway
  looks for stop strings itself from then on, beginning with the held text. Characters that are cut in the middle
  are no problem: their tokens are computed again (`whole_characters`).
- *Penalties* count the answer's tokens, which are now prompt. `logit_bias` has the same effect as their counts;
  with `presence_penalty`, a token that occurs again is counted twice.
- *Form.* Chunks keep the id, the time and the kind of the first ones, and usage counts both parts.

A greedy answer goes on token for token. A sampled one goes on with fresh random numbers, also with a `seed`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from prfaas.errors import UNREADABLE, BadInputError
from prfaas_gateway.openai import DONE
from prfaas_gateway.request import Fields

CONTEXT_TOKENS: Final = 8
"""Tokens before a part of an answer that its text may depend on."""
CUT_CHARACTER: Final = "\ufffd"
_CHAT_FIELDS: Final = {
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "functions",
    "function_call",
    "max_completion_tokens",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "documents",
    "echo",
    "logprobs",
    "top_logprobs",
    "reasoning_effort",
    "include_reasoning",
    "response_format",
    "return_prompt_text",
    "media_io_kwargs",
    "mm_processor_kwargs",
}
# The prompt is token ids now, stop strings are looked for here, and a prompt may not be cut again.
_DONE_ALREADY: Final = {"prompt", "stop", "truncate_prompt_tokens", "truncation_side", "kv_transfer_params"}
# The range of logit_bias in OpenAI's API, which vLLM clamps to.
_MAX_BIAS: Final = 100.0
DEFAULT_MAX_TOKENS: Final = 16
"""vLLM's own for completions; a chat may fill the model's context."""


class SentAnswer(NamedTuple):
    """What the client has of an answer: its first event, and the tokens as they stand in JSON."""

    first: bytes
    prompt: bytes
    sent: bytes
    is_chat: bool

    @property
    def prompt_ids(self) -> list[int]:
        return numbers(self.prompt)

    @property
    def sent_ids(self) -> list[int]:
        return numbers(self.sent)


class Stops(NamedTuple):
    """A request's stop strings."""

    texts: tuple[str, ...] = ()
    is_included: bool = False
    min_tokens: int = 0

    @property
    def held_characters(self) -> int:
        """How many characters vLLM holds back while the answer runs."""
        return 0 if self.is_included else self.seen_characters

    @property
    def seen_characters(self) -> int:
        """How many characters before a text may belong to a stop string that ends in it."""
        return max(map(len, self.texts), default=1) - 1


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _Sampling(msgspec.Struct):
    """The fields of a request that a continuation changes."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None


def _sampling(fields: Fields) -> _Sampling:
    """Raises BadInputError for a field that an engine may have read and we cannot."""
    known = {name: fields[name] for name in _Sampling.__struct_fields__ if name in fields}
    try:
        return msgspec.json.decode(msgspec.json.encode(known), type=_Sampling)
    except UNREADABLE as error:
        raise BadInputError(f"a field of the request cannot be read: {error}") from error


def stops_of(fields: Fields) -> Stops:
    sampling = _sampling(fields)
    texts = (sampling.stop,) if isinstance(sampling.stop, str) else tuple(sampling.stop or ())
    return Stops(tuple(filter(None, texts)), bool(sampling.include_stop_str_in_output), sampling.min_tokens or 0)


def most_tokens(fields: Fields, *, is_chat: bool) -> int | None:
    """Return how many tokens the whole answer may have; None: as many as fit into the model's context."""
    sampling = _sampling(fields)
    if is_chat:
        return sampling.max_tokens if sampling.max_completion_tokens is None else sampling.max_completion_tokens
    return DEFAULT_MAX_TOKENS if sampling.max_tokens is None else sampling.max_tokens


def continued(fields: Fields, answered: SentAnswer, left_tokens: int) -> Fields:
    """Return the fields of the request to /v1/completions that continues an answer.

    Raises BadInputError if no token is left to generate.
    """
    if left_tokens < 1:
        raise BadInputError("the answer has all the tokens that it may have")
    sampling, sent_ids = _sampling(fields), answered.sent_ids
    kept = {name: raw for name, raw in fields.items() if name not in _CHAT_FIELDS | _DONE_ALREADY}
    ids = b",".join(filter(None, (answered.prompt, answered.sent)))
    added: dict[str, Any] = {
        "prompt": msgspec.Raw(b"[" + ids + b"]"),
        "max_tokens": left_tokens,
        "stream": True,
        "return_token_ids": True,
    }
    if sampling.min_tokens:
        added["min_tokens"] = max(0, sampling.min_tokens - len(sent_ids))
    if bias := _bias(sampling, sent_ids):
        added["logit_bias"] = bias
    return kept | {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in added.items()}


def _bias(sampling: _Sampling, sent_ids: Sequence[int]) -> dict[str, float]:
    """Return the request's logit bias with the penalties of the tokens that were sent."""
    bias = dict(sampling.logit_bias or {})
    frequency, presence = sampling.frequency_penalty or 0.0, sampling.presence_penalty or 0.0
    if frequency or presence:
        for token_id, count in Counter(sent_ids).items():
            biased = bias.get(str(token_id), 0.0) - frequency * count - presence
            bias[str(token_id)] = max(-_MAX_BIAS, min(_MAX_BIAS, biased))
    return bias


def without_last(sent: bytes, count: int) -> bytes:
    """Return sent ids without the last ones."""
    for _ in range(count):
        sent = sent[: max(0, sent.rfind(b","))]
    return sent


def numbers(ids: bytes) -> list[int]:
    """Return the token ids of the inside of a list. Raises BadInputError if it is none."""
    try:
        return [int(one) for one in ids.split(b",")] if ids else []
    except ValueError as error:
        raise BadInputError("an event of a stream names tokens that are no numbers") from error


class _Choice(msgspec.Struct):
    """What is read of a choice that continues an answer; nothing else of it goes to the client."""

    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Chunk(msgspec.Struct):
    """What is read of a chunk; all else goes to the client as it is written."""

    choices: list[_Choice]
    usage: dict[str, msgspec.Raw] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_chunk = msgspec.json.Decoder(_Chunk)
_prompt_details = msgspec.json.Decoder(_PromptDetails)
_Kind = TypeVar("_Kind")


class AnswerWriter:
    """Turns the stream of an instance that continues into the rest of the client's stream.

    Args:
        answered: what the client has.
        fields: the request's own.
        text: the last text of the sent tokens, at least `Stops.seen_characters` of it if there are so many.

    """

    def __init__(self, answered: SentAnswer, fields: Fields, text: str):
        sampling = _sampling(fields)
        options = sampling.stream_options or _StreamOptions()
        self._includes_usage = bool(options.include_usage)
        self._shows_ids = bool(sampling.return_token_ids)
        self._is_chat = answered.is_chat
        self._head = _head_of(answered.first)
        self._prompt_tokens = len(answered.prompt_ids)
        self._tokens = len(answered.sent_ids)
        self._stops = stops_of(fields)
        self._text = text[-self._stops.seen_characters :] if self._stops.seen_characters else ""
        self._shown = max(0, len(self._text) - self._stops.held_characters)
        self._new_ids: list[int] = []
        self.has_stopped = False
        """A stop string was found, and the stream is at its end."""
        self.has_finished = False
        """The client has the reason of the answer's end."""
        self.has_usage = False
        """The client has the usage of the whole answer."""

    @property
    def new_ids(self) -> bytes:
        """The tokens of this stream so far, as they stand in JSON."""
        return ",".join(map(str, self._new_ids)).encode()

    def rewrite(self, events: bytes) -> bytes:
        """Return the client's events for whole events of the instance.

        Raises BadInputError for an event that is no chunk of a completion.
        """
        return b"".join(self._event(one) for one in events.split(b"\n\n") if one)

    def _event(self, event: bytes) -> bytes:
        if self.has_stopped or not event.startswith(b"data: "):
            return b""
        if event == DONE[:-2]:
            return DONE
        try:
            fields, chunk = _fields.decode(event[6:]), _chunk.decode(event[6:])
        except UNREADABLE as error:
            raise BadInputError(f"an instance continues with an event that is no chunk: {error}") from error
        written = self._choice(chunk.choices[0]) if chunk.choices else None
        if chunk.choices and written is None:
            return b""
        shown: dict[str, Any] = {**fields, **self._head, "choices": [written] if written else []}
        self.has_usage = not chunk.choices
        if chunk.usage is not None:
            shown["usage"] = self._usage(chunk.usage)
        rest = self.end() if self.has_stopped else b""
        return _data(shown) + rest

    def _choice(self, choice: _Choice) -> dict[str, Any] | None:
        """Return the client's choice of a chunk; None if there is nothing to tell yet."""
        ids = choice.token_ids or []
        self._new_ids += ids
        self._tokens += len(ids)
        reason, stop_reason = choice.finish_reason, choice.stop_reason
        text, stop = self._until_stop(choice.text or "", is_last=reason is not None)
        if stop is not None:
            reason, stop_reason, self.has_stopped = "stop", stop, True
        self.has_finished = reason is not None
        if not text and reason is None and not self._shows_ids:
            return None
        shown_ids = {"token_ids": ids if self._shows_ids else None}
        if not self._is_chat:
            body = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": stop_reason}
            return body | {"prompt_token_ids": None} | shown_ids
        body = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": reason}
        return body | ({"stop_reason": stop_reason} if reason is not None else {}) | shown_ids

    def _until_stop(self, text: str, *, is_last: bool) -> tuple[str, str | None]:
        """Return the text that the client may see now, and the stop string that ended it."""
        known, self._text = len(self._text), self._text + text
        if self._tokens > self._stops.min_tokens and text:
            found = [(at + len(stop), stop) for stop in self._stops.texts if (at := self._find(stop, known)) >= 0]
            if found:
                end, stop = min(found)
                shown = self._text[self._shown : end if self._stops.is_included else end - len(stop)]
                return shown, stop
        end = len(self._text) if is_last else max(self._shown, len(self._text) - self._stops.held_characters)
        shown = self._text[self._shown : end]
        drop = max(0, min(end, len(self._text) - self._stops.seen_characters))
        self._text, self._shown = self._text[drop:], end - drop
        return shown, None

    def _find(self, stop: str, known: int) -> int:
        """Return where a stop string begins that ends behind the text that was searched already."""
        return self._text.find(stop, max(0, known - len(stop) + 1))

    def _usage(self, usage: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
        """Return usage with the sent tokens as part of the answer, not of the prompt."""
        total = {"prompt_tokens": self._prompt_tokens, "completion_tokens": self._tokens}
        changed = {**usage, **total, "total_tokens": self._prompt_tokens + self._tokens}
        details = usage.get("prompt_tokens_details", b"null")
        with suppress(*UNREADABLE):  # without such a number there is none to bound
            cached_tokens = min(_prompt_details.decode(details).cached_tokens, self._prompt_tokens)
            changed["prompt_tokens_details"] = {**_fields.decode(details), "cached_tokens": cached_tokens}
        return changed

    def end(self) -> bytes:
        """Return the end of a stream whose client has every token and the reason of the answer's end."""
        usage = _data(self._head | {"choices": [], "usage": self._usage({})}) if self._includes_usage else b""
        return usage + DONE


def chunk_of(event: bytes, kind: type[_Kind]) -> _Kind:
    """Read the first event of a stream. Raises BadInputError for one that is no such chunk."""
    try:
        return msgspec.json.decode(event.removeprefix(b"data: "), type=kind)
    except UNREADABLE as error:
        raise BadInputError(f"a stream begins with an event that is no chunk: {error}") from error


def _head_of(event: bytes) -> dict[str, msgspec.Raw]:
    """Return what all chunks of a stream have in common, as it is written."""
    chunk = chunk_of(event, dict[str, msgspec.Raw])
    return {name: chunk[name] for name in ("id", "object", "created", "model") if name in chunk}


def _data(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
