"""Turns the engine's tokens into answers of the OpenAI API: text of each choice, bodies, and events.

`ChoiceDetokenizer` makes pieces of a choice's tokens. `ResponseFormatter` makes whole bodies of pieces, or the events
of a stream as bytes. A stream's usual event has new text and its token ids, and nothing else. Such an event is written
around these without building the body again. With many streams that is most of what this process does.

Token ids stand where vLLM has them: those of an event's tokens in its choice, those of the prompt once, in the first
event of a completion's choice or of a chat. `null` is in their place unless they were requested.
"""

import codecs
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from prfaas.wire.engine import TokenLogprob, Tokens
from prfaas_worker.front.openai_in import Job
from prfaas_worker.front.serving import ServedModel
from prfaas_worker.tokenizer import Tokenizer

_encode: Final = msgspec.json.Encoder().encode
MAX_UNNAMED_TOKENS: Final = 32
_TEXT_HOLE: Final = "\0"
_IDS_HOLE: Final = "\1"


class Scored(NamedTuple):
    """A token with a requested log probability, and its position in the choice's text."""

    token: int
    logprob: TokenLogprob
    offset_characters: int


class Piece(NamedTuple):
    """New output of one choice; `reason` is None until its last piece. `token_ids` are its tokens; `scored` is empty
    unless log probabilities were requested."""

    index: int
    text: str
    scored: Sequence[Scored]
    reason: str | None
    first: bool
    token_ids: Sequence[int]


class ChoiceDetokenizer:
    """Turns the engine's tokens into pieces. `index` counts over all prompts of the request."""

    def __init__(self, index: int, job: Job, tokenizer: Tokenizer):
        place = index // job.choices
        prompt = job.prompts[place]
        self.index = index
        self.stream = TextStream(tokenizer, job.stop, unstopped_tokens=prompt.min_tokens)
        self._echo = job.echoes[place]
        self._offsets = TextOffsets(tokenizer, len(self._echo))
        self._scores = prompt.logprobs >= 0
        self._first = True

    def piece(self, tokens: Tokens) -> Piece:
        """Add tokens. The piece has a reason if the choice ended, by the engine or by a stop string."""
        final = tokens.finish_reason is not None
        text = self.stream.push(tokens.token_ids, final=final)
        reason = "stop" if self.stream.stopped else tokens.finish_reason
        if self._first:
            text = self._echo + text
        piece = Piece(self.index, text, self._scored(tokens), reason, self._first, tokens.token_ids)
        self._first = False
        return piece

    def replay(self, token_ids: Sequence[int]) -> Piece:
        """Add tokens whose text another instance has already sent."""
        if self._scores:
            self._offsets.push(token_ids)
        return self.piece(Tokens(0, 0, list(token_ids), [], None))

    def _scored(self, tokens: Tokens) -> list[Scored]:
        if not tokens.logprobs:
            return []
        places = self._offsets.push(tokens.token_ids)
        return [Scored(*one) for one in zip(tokens.token_ids, tokens.logprobs, places, strict=True)]


class TextStream:
    """Text of one choice. Holds back characters that may begin a stop string. `stop` are the strings that end the text.
    The first `unstopped_tokens` tokens end nothing."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, unstopped_tokens: int = 0):
        self._token_bytes = tokenizer.token_bytes
        self._stop = stop
        self._unstopped_tokens = unstopped_tokens if stop else 0
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._held = ""
        self.stopped = False

    def push(self, token_ids: Sequence[int], *, final: bool) -> str:
        """Add tokens; return the text that is certain now. Nothing follows a stop string."""
        if self.stopped:
            return ""
        if not self._unstopped_tokens:
            text = self._decode(self._bytes(token_ids), final)
            return self._cut(text, final=final) if self._stop else text
        free = min(self._unstopped_tokens, len(token_ids))
        self._unstopped_tokens -= free
        text = self._decode(self._bytes(token_ids[:free]), final and free == len(token_ids))
        return text + self.push(token_ids[free:], final=final) if free < len(token_ids) else text

    def _bytes(self, token_ids: Sequence[int]) -> bytes:
        if len(token_ids) == 1:
            return self._token_bytes(token_ids[0])
        return b"".join(map(self._token_bytes, token_ids))

    def _cut(self, text: str, *, final: bool) -> str:
        text = self._held + text
        # The one that is complete first, so that the number of tokens per call does not matter.
        ends = [(place + len(stop), place) for stop in self._stop if (place := text.find(stop)) >= 0]
        if ends:
            self.stopped = True
            self._held = ""
            return text[: min(ends)[1]]
        keep = 0 if final else _possible_beginning(text, self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


class TextOffsets:
    """Positions of the tokens of one choice in its text, in characters. A token that begins within a character has that
    character's position. Tokens from a stop string on are placed as if the text continued."""

    def __init__(self, tokenizer: Tokenizer, start: int):
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = start

    def push(self, token_ids: Sequence[int]) -> list[int]:
        return [self._place(self._token_bytes(token)) for token in token_ids]

    def _place(self, token: bytes) -> int:
        # The first byte shows if it continues an unfinished character, or if that is damaged.
        begun = self._decoder.decode(token[:1])
        unfinished, _ = self._decoder.getstate()
        place = self._characters + (len(begun) if unfinished else max(len(begun) - 1, 0))
        self._characters += len(begun) + len(self._decoder.decode(token[1:]))
        return place


class ResponseFormatter:
    """Makes the body, or the events, that answer one request."""

    def __init__(self, job: Job, served: ServedModel, tokenizer: Tokenizer):
        request_id, stream = job.prompts[0].request_id, job.body.prfaas_stream
        self._job = job
        self._chat = job.is_chat
        self._tokenizer = tokenizer
        self._with_usage = job.has_usage or job.has_continuous_usage
        self._with_prompt_ids = bool(job.body.return_token_ids)
        self._with_ids = self._with_prompt_ids or stream is not None
        prefix = "chatcmpl" if job.is_chat else "cmpl"
        created = stream.created if stream else int(time.time())
        self._head = {"id": f"{prefix}-{request_id}", "created": created, "model": served.model_name}
        self._fingerprint = {"system_fingerprint": served.fingerprint}
        self._frames: dict[int, tuple[bytes, bytes, bytes]] = {}
        self._unnamed: dict[int, list[int]] = {}
        begun = () if stream is None else (*stream.drawn, *stream.ended)
        self._named_prompts = {index // job.choices for index in begun}

    def whole(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion" if self._chat else "text_completion"
        body = self._head | {"object": kind, "choices": list(choices), "usage": usage} | self._fingerprint
        return body | ({"prompt_token_ids": self._prompt_ids(0)} if self._chat else {})

    def whole_choice(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        logprobs = self._logprobs([entry for piece in pieces for entry in piece.scored])
        text = "".join(piece.text for piece in pieces)
        content = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        last = pieces[-1]
        choice = {"index": last.index, **content, "finish_reason": last.reason, "logprobs": logprobs}
        token_ids = [token for piece in pieces for token in piece.token_ids] if self._with_ids else None
        return choice | self._ids_of_prompt(last.index) | {"token_ids": token_ids}

    def event(self, piece: Piece, usage: dict[str, Any] | None) -> bytes:
        """Return a piece as server-sent events, empty if there is no text yet. Ids of many tokens without text make an
        event: to a gateway, a stream without events is one of a dead worker."""
        index, text, scored, reason, first, token_ids = piece
        if reason is None and not (first or scored or usage):
            if not text:
                if not self._with_ids:
                    return b""
                unnamed = self._unnamed.setdefault(index, [])
                unnamed.extend(token_ids)
                if len(unnamed) < MAX_UNNAMED_TOKENS:
                    return b""
                token_ids = ()
            before, between, after = self._frames.get(index) or self._frame(index)
            return before + _encode(text) + between + _encode(self._ids(index, token_ids)) + after
        content = {"delta": _delta(piece)} if self._chat else {"text": text}
        choice = {"index": index, **content, "finish_reason": reason, "logprobs": self._logprobs(scored)}
        ids, body = {"token_ids": self._ids(index, token_ids)}, self._fingerprint if first else {}
        if first and self._chat:
            body = body | {"prompt_token_ids": self._prompt_ids(index)}
        elif first:
            choice |= self._ids_of_prompt(index)
        return sse(self._chunk([choice | ids], usage) | body)

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        return sse(self._chunk([], usage))

    def _frame(self, index: int) -> tuple[bytes, bytes, bytes]:
        """Return the bytes before, between and after the text and the token ids of a choice's usual event."""
        content = {"delta": {"content": _TEXT_HOLE}} if self._chat else {"text": _TEXT_HOLE}
        choice = {"index": index, **content, "finish_reason": None, "logprobs": None, "token_ids": _IDS_HOLE}
        before, _, rest = sse(self._chunk([choice], None)).partition(_encode(_TEXT_HOLE))
        between, _, after = rest.partition(_encode(_IDS_HOLE))
        self._frames[index] = before, between, after
        return before, between, after

    def _ids(self, index: int, token_ids: Sequence[int]) -> Sequence[int] | None:
        """Return the ids of an event's tokens, with those before that had no text; None if none were requested."""
        if not self._with_ids:
            return None
        return [*self._unnamed.pop(index, ()), *token_ids] if self._unnamed else token_ids

    def _ids_of_prompt(self, index: int) -> dict[str, Any]:
        return {} if self._chat else {"prompt_token_ids": self._prompt_ids(index)}

    def _prompt_ids(self, index: int) -> list[int] | None:
        """Return the ids of a choice's prompt, once; else None."""
        place = index // self._job.choices
        if not self._with_prompt_ids or place in self._named_prompts:
            return None
        self._named_prompts.add(place)
        return self._job.prompts[place].token_ids

    def _chunk(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        body = self._head | {"object": kind, "choices": list(choices)}
        return body | {"usage": usage} if self._with_usage else body

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any] | None:
        """Return log probabilities in the endpoint's form, None if none were requested."""
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
        return {"token": self._name(token), "logprob": logprob, "bytes": list(self._tokenizer.token_bytes(token))}

    def _name(self, token: int) -> str:
        """A token's text, or its bytes as the OpenAI API writes them if they are not text."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode() if data else f"token_id:{token}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def sse(body: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % _encode(body)


def usage_body(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _delta(piece: Piece) -> dict[str, str]:
    if piece.first:
        return {"role": "assistant", "content": piece.text}
    return {"content": piece.text} if piece.text else {}


def _possible_beginning(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of `stops` without completing it."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
