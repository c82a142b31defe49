"""The canonical bytes of a request, which routers compare without a tokenizer, and the tokens in a byte prefix.

Requests with equal beginnings of canonical bytes have prompts with equal beginnings. Gateway and worker compute the
same bytes. A completion's bytes are its prompt in UTF-8, or its token ids as 32-bit integers. A chat's bytes are lines
of JSON: first the fields that templates put before the messages, above all tools. Then each message has a line, role
first and content last, as in the prompt. Requests of the Responses and Messages APIs have such lines, too, but no known
place in the prompt. `root` starts the hash chain, so kinds, models and cache salts never match.

There is no exact way from bytes to tokens. A chat template adds text around the contents, and a tokenizer may merge
tokens across a cut. `tokens_before` finds the contents in the prompt's own bytes and ends behind the last one that it
found. The function leaves out the tokens next to the cut.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple, cast

import msgspec

CUT_TOKENS: Final = 1
"""Tokens before a cut that do not count: other text after the cut might change them."""
TOKEN_BYTES: Final = 4
"""Bytes of a token id in the canonical bytes of a prompt that was sent as token ids."""


class Text(NamedTuple):
    """A text in the prompt: its start in the canonical bytes, itself, and its JSON form there."""

    start: int
    data: bytes
    escaped: bytes


class Canonical(NamedTuple):
    """`root` names kind, model and salt; `texts` lie in `data` in order, None if `data` holds token ids."""

    root: bytes
    data: bytes
    texts: tuple[Text, ...] | None
    salt: str = ""


class _Completion(msgspec.Struct, frozen=True):
    model: str
    prompt: str | list[Any]
    cache_salt: str | None = None


class _Chat(msgspec.Struct, frozen=True):
    model: str
    messages: list[dict[str, Any]]
    cache_salt: str | None = None
    tools: list[Any] | None = None
    documents: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class _Response(msgspec.Struct, frozen=True):
    model: str
    input: str | list[Any]
    cache_salt: str | None = None
    instructions: str | None = None
    tools: list[Any] | None = None
    reasoning: dict[str, Any] | None = None
    previous_response_id: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _Messages(msgspec.Struct, frozen=True):
    model: str
    messages: list[Any]
    cache_salt: str | None = None
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _Part(msgspec.Struct, frozen=True):
    text: str | None = None


# An escape of our JSON encoder stands for exactly one byte, because the encoder escapes nothing beyond ASCII.
_ESCAPE: Final = re.compile(rb"\\(?:u[0-9a-f]{4}|.)")
COMPLETION_FIELDS: Final = frozenset(_Completion.__struct_fields__)
"""The fields of a completion's body that its canonical bytes depend on."""
MAX_ITEMS: Final = 10_000
"""Messages or items of a prompt: some tens of milliseconds. A prompt of more, as few contexts hold, matches nothing."""
CHAT_FIELDS: Final = frozenset(_Chat.__struct_fields__)
RESPONSE_FIELDS: Final = frozenset(_Response.__struct_fields__)
MESSAGES_FIELDS: Final = frozenset(_Messages.__struct_fields__)
_SORTED: Final = msgspec.json.Encoder(order="sorted")


def canonical_completion(body: Mapping[str, Any]) -> Canonical | None:
    """Return the canonical bytes of a JSON body of POST /v1/completions; None for an invalid one."""
    try:
        parsed = msgspec.convert(body, _Completion)
    except msgspec.ValidationError:
        return None
    prompt: str | list[Any] = parsed.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = cast(str | list[Any], prompt[0])  # a batch of one
    if isinstance(prompt, str):
        data = prompt.encode()
        text = Text(0, data, b"")
        return Canonical(_root("text", parsed.model, parsed.cache_salt), data, (text,), parsed.cache_salt or "")
    try:
        data = b"".join(token.to_bytes(TOKEN_BYTES, "little") for token in msgspec.convert(prompt, list[int]))
    except (msgspec.ValidationError, OverflowError):
        return None
    return Canonical(_root("tokens", parsed.model, parsed.cache_salt), data, None, parsed.cache_salt or "")


def canonical_chat(body: Mapping[str, Any]) -> Canonical | None:
    """Return the canonical bytes of a JSON body of POST /v1/chat/completions; None for an invalid one."""
    try:
        parsed = msgspec.convert(body, _Chat)
    except msgspec.ValidationError:
        return None
    if len(parsed.messages) > MAX_ITEMS:
        return None
    before = [
        parsed.tools or [],
        parsed.documents or [],
        parsed.chat_template_kwargs or {},
        parsed.reasoning_effort or "",
    ]
    lines = [_SORTED.encode(before), b"\n"]
    texts: list[Text] = []
    at = len(lines[0]) + 1
    for message in parsed.messages:
        others = {key: value for key, value in message.items() if key not in ("role", "content") and value is not None}
        # The list stays open for the content, which comes last as in the prompt.
        head = _SORTED.encode([message.get("role"), others])[:-1] + b","
        content = _SORTED.encode(message.get("content"))
        if len(texts) < MAX_ITEMS:  # of the texts behind them the tokens are not known
            texts += _texts_in(message.get("content"), content, at + len(head))
        lines += head, content, b"]\n"
        at += len(head) + len(content) + 2
    root = _root("chat", parsed.model, parsed.cache_salt)
    return Canonical(root, b"".join(lines), tuple(texts), parsed.cache_salt or "")


def canonical_response(body: Mapping[str, Any]) -> Canonical | None:
    """Return the canonical bytes of a JSON body of POST /v1/responses; None for an invalid one."""
    try:
        parsed = msgspec.convert(body, _Response)
    except msgspec.ValidationError:
        return None
    before = [
        parsed.tools,
        parsed.instructions,
        parsed.reasoning,
        parsed.chat_template_kwargs,
        parsed.previous_response_id,
    ]
    items = [parsed.input] if isinstance(parsed.input, str) else parsed.input
    root = _root("response", parsed.model, parsed.cache_salt)
    return _in_lines(root, before, items, parsed.cache_salt or "")


def canonical_messages(body: Mapping[str, Any]) -> Canonical | None:
    """Return the canonical bytes of a JSON body of POST /v1/messages; None for an invalid one."""
    try:
        parsed = msgspec.convert(body, _Messages)
    except msgspec.ValidationError:
        return None
    before = [parsed.tools, parsed.system, parsed.thinking, parsed.output_config, parsed.chat_template_kwargs]
    root = _root("messages", parsed.model, parsed.cache_salt)
    return _in_lines(root, before, parsed.messages, parsed.cache_salt or "")


def _in_lines(root: bytes, before: Any, items: Sequence[Any], salt: str) -> Canonical | None:
    if len(items) > MAX_ITEMS:
        return None
    data = b"\n".join(map(_SORTED.encode, (before, *items)))
    return Canonical(root, data, (), salt)


def tokens_before(
    canonical: Canonical, cuts: Sequence[int], token_ids: Sequence[int], token_bytes: Callable[[int], bytes]
) -> list[int]:
    """Return the number of tokens of the prompt surely before each cut, an offset in the canonical bytes.

    Cuts ascend. `token_bytes` maps a token id to its bytes in the text; a special token has none.
    """
    if canonical.texts is None:
        return [min(cut // TOKEN_BYTES, len(token_ids)) for cut in cuts]
    known = {token: token_bytes(token) for token in set(token_ids)}
    pieces = list(map(known.__getitem__, token_ids))
    ends = list(accumulate(map(len, pieces)))
    places = _places(canonical.texts, b"".join(pieces))
    counts = (bisect_left(ends, offset) for offset in _offsets(places, cuts))
    return [max(0, count - CUT_TOKENS) for count in counts]


class _Place:
    """A text found in the prompt's bytes, perhaps without the white space around it."""

    def __init__(self, text: Text, found: int):
        bare = _bare(text.data)
        self.start = text.start
        self._first = text.data.index(bare)
        self._last = self._first + len(bare)
        self._found = found
        escapes = list(_ESCAPE.finditer(text.escaped))
        self._escape_starts = [escape.start() for escape in escapes]
        self._escape_ends = [escape.end() for escape in escapes]
        self._saved = [0, *accumulate(len(escape[0]) - 1 for escape in escapes)]

    def offset(self, cut: int) -> int:
        """Return the offset in the prompt's bytes that surely lies before a cut at or behind the text's beginning."""
        inside = cut - self.start
        passed = bisect_right(self._escape_ends, inside)
        if passed < len(self._escape_ends):
            inside = min(inside, self._escape_starts[passed])  # a cut through an escape is before it
        reached = min(inside - self._saved[passed], self._last)
        return self._found + max(0, reached - self._first)


def _places(texts: Sequence[Text], prompt: bytes) -> list[_Place]:
    """Find the texts in the prompt in order, up to the first that the template changed.

    A short text may match too early, in the template's own words. Then the result is too small, never too large.
    """
    places: list[_Place] = []
    at = 0
    for text in texts:
        bare = _bare(text.data)
        if not bare:
            continue
        at = prompt.find(bare, at)
        if at < 0:
            break
        places.append(_Place(text, at))
        at += len(bare)
    return places


def _bare(text: bytes) -> bytes:
    """Strip white space as templates do, beyond ASCII's."""
    return text.decode().strip().encode()


def _offsets(places: Sequence[_Place], cuts: Sequence[int]) -> list[int]:
    starts = [place.start for place in places]
    nearest = (bisect_right(starts, cut) - 1 for cut in cuts)
    return [places[i].offset(cut) if i >= 0 else 0 for i, cut in zip(nearest, cuts, strict=True)]


def _texts_in(content: Any, encoded: bytes, start: int) -> list[Text]:
    """Return the texts of a message's content (a string or a list of parts), given its JSON and its offset."""
    if isinstance(content, str):
        return [Text(start + 1, content.encode(), encoded[1:-1])]
    texts: list[Text] = []
    at = 0
    for part in _parts(content):
        escaped = _SORTED.encode(part)
        key = b'"text":'
        at = encoded.index(key + escaped, at) + len(key)
        texts.append(Text(start + at + 1, part.encode(), escaped[1:-1]))
        at += len(escaped)
    return texts


def _parts(content: Any) -> list[str]:
    try:
        parts = msgspec.convert(content or [], list[_Part])
    except msgspec.ValidationError:
        return []  # an unknown part: its bytes still count, its tokens do not
    return [part.text for part in parts[:MAX_ITEMS] if part.text is not None]


def _root(kind: str, model: str, cache_salt: str | None) -> bytes:
    return msgspec.msgpack.encode([kind, model, cache_salt or ""])
