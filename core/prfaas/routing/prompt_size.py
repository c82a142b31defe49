"""What a model reads of a request, in counts: characters of its texts by kind, token ids, messages, tools, media.

Only the fields that make the prompt count. Of a message these are its texts, and the names and arguments of its calls.
Schemas for answers, metadata, biases and encoded images do not count. Nor do white space between JSON values and the
way of escaping: texts count as they are decoded, tools as a template would write them.

Each kind has its own tokens a unit, within bounds: `prfaas.routing.estimate` learns them. Of a long text short pieces
from all over it stand for the rest, so that it costs little more than its decoding. A few calls of C take one kind of
characters after the other out of their bytes. The first byte of UTF-8 names the kind.
"""

import re
from collections.abc import Callable, Mapping, Set
from enum import IntEnum
from typing import Any, Final, NamedTuple, cast

import msgspec

from prfaas.errors import UNREADABLE


class Unit(IntEnum):
    """What a prompt is counted in."""

    LETTER = 0
    """A letter of ASCII."""
    SPACE = 1
    MARK = 2
    """A punctuation mark of ASCII."""
    DIGIT = 3
    LATIN = 4
    """A letter of Latin beyond ASCII, and other characters below U+0300."""
    ALPHABET = 5
    """A character below U+0800: Greek, Cyrillic, Hebrew, Arabic."""
    CJK = 6
    """A character of Chinese, Japanese or Korean, and a wide mark."""
    OTHER = 7
    """Any other character."""
    TOKEN = 8
    """A token id, in place of text."""
    MESSAGE = 9
    """A message, and the start of the answer to a chat."""
    TOOL_BYTE = 10
    """A byte of the tools' JSON. A template may leave them out."""
    DOCUMENT_BYTE = 11
    """Likewise of the documents."""
    MEDIUM = 12
    """An image, a sound or a film."""


class PromptSize(NamedTuple):
    """How much of everything a prompt has."""

    counts: tuple[int, ...] = (0,) * len(Unit)
    """By `Unit`."""
    most_tokens: int | None = None
    """The client asks the engine to cut the prompt to this length."""
    is_whole: bool = True
    """Whether the engine reads nothing else: no earlier answer that it keeps."""


def _bytes(*ranges: tuple[int, int]) -> bytes:
    return bytes(one for first, last in ranges for one in range(first, last + 1))


_CONTINUATIONS: Final = _bytes((0x80, 0xBF))
_FIRST_BYTES: Final = (
    (Unit.LETTER, _bytes((0x41, 0x5A), (0x61, 0x7A))),
    (Unit.SPACE, b" \t\n\r\v\f"),
    (Unit.MARK, _bytes((0x21, 0x2F), (0x3A, 0x40), (0x5B, 0x60), (0x7B, 0x7E))),
    (Unit.DIGIT, b"0123456789"),
    (Unit.CJK, _bytes((0xE3, 0xED), (0xEF, 0xEF))),
    (Unit.LATIN, _bytes((0xC2, 0xCB))),
    (Unit.ALPHABET, _bytes((0xCC, 0xDF))),
)
"""The most frequent first: what is counted is taken out."""
_TOKEN_IDS: Final = re.compile(rb"\s*\[[\s\[]*-?[0-9]")
_READ: Final = frozenset(
    (
        "content",
        "text",
        "name",
        "arguments",
        "input",
        "output",
        "function",
        "function_call",
        "tool_calls",
        "reasoning",
        "reasoning_content",
        "refusal",
        "summary",
        "thinking",
    )
)
"""The members of a message, an item or a part that hold what the model reads; all others are identities and options."""
_VALUES: Final = frozenset(("arguments", "input"))
"""Members that may hold any JSON value; a template writes it as JSON."""
PIECE_CHARACTERS: Final = 128
PLACES: Final = tuple(number * (5**0.5 - 1) / 2 % 1 for number in range(32))
"""Where pieces of a long text begin, as shares of it: by the golden section, which meets no period of the text."""
SAMPLE_CHARACTERS: Final = len(PLACES) * PIECE_CHARACTERS
_value = msgspec.json.Decoder()


def prompt_size(fields: Mapping[str, msgspec.Raw], names: Set[str]) -> PromptSize:
    """Return the size of a request's prompt; `names` are the fields of its body that make prompts in its API.

    A field that cannot be read has no size: the engine refuses the request.
    """
    reader = _Reader()
    for name, read in _READ_FIELDS.items():
        if name in names and (raw := fields.get(name)) is not None:
            read(reader, raw)
    most_tokens = fields.get("truncate_prompt_tokens")
    return PromptSize(reader.counts(), None if most_tokens is None else _most_tokens(most_tokens), reader.is_whole)


class _Reader:
    """Collects what a body's fields hold."""

    def __init__(self) -> None:
        self.is_whole = True
        self._texts: list[str] = []
        self._tokens = self._messages = self._tool_bytes = self._document_bytes = self._media = 0

    def counts(self) -> tuple[int, ...]:
        characters = _count_characters(self._texts[0] if len(self._texts) == 1 else "".join(self._texts))
        # A template begins the answer, too.
        messages = self._messages + (self._messages > 0)
        return (*characters, self._tokens, messages, self._tool_bytes, self._document_bytes, self._media)

    def prompt(self, raw: msgspec.Raw) -> None:
        """Read a completion's prompt, or a batch of them."""
        if _TOKEN_IDS.match(raw):
            self._tokens = bytes(raw).count(b",") + 1  # of a batch, too: commas stand between its lists as well
        else:
            self._read(_decoded(raw))

    def messages(self, raw: msgspec.Raw) -> None:
        """Read the messages of a chat, the items of the Responses API, or one text in their place."""
        value = _decoded(raw)
        items = cast(list[Any], value) if isinstance(value, list) else [value] if value else []
        self._messages += len(items)
        for one in items:
            self._read(one)

    def instructions(self, raw: msgspec.Raw) -> None:
        """Read what stands before the messages."""
        value = _decoded(raw)
        self._messages += bool(value)
        self._read(value)

    def tools(self, raw: msgspec.Raw) -> None:
        self._tool_bytes = _json_bytes(raw)

    def documents(self, raw: msgspec.Raw) -> None:
        self._document_bytes = _json_bytes(raw)

    def earlier(self, raw: msgspec.Raw) -> None:
        self.is_whole = _decoded(raw) is None

    def _read(self, value: Any) -> None:
        """Read what stands in a message, an item, a part, or a list of them."""
        waiting = [value]  # no recursion: clients choose the depth
        while waiting:
            one = waiting.pop()
            if isinstance(one, str):
                self._texts.append(one)
            elif isinstance(one, list):
                for part in cast(list[Any], one):
                    if _is_medium(part):
                        self._media += 1
                    else:
                        waiting.append(part)
            elif isinstance(one, dict):
                for name, member in cast(dict[str, Any], one).items():
                    if name in _READ:
                        is_value = name in _VALUES and not isinstance(member, str)
                        waiting.append(_json(member).decode() if is_value else member)


_READ_FIELDS: Final[Mapping[str, Callable[[_Reader, msgspec.Raw], None]]] = {
    "prompt": _Reader.prompt,
    "messages": _Reader.messages,
    "input": _Reader.messages,
    "system": _Reader.instructions,
    "instructions": _Reader.instructions,
    "tools": _Reader.tools,
    "documents": _Reader.documents,
    "previous_response_id": _Reader.earlier,
}


def _is_medium(part: Any) -> bool:
    """Return whether a part holds nothing to read: an image, or anything else that is encoded."""
    return isinstance(part, dict) and _READ.isdisjoint(cast(dict[str, Any], part))


def _decoded(raw: msgspec.Raw) -> Any:
    """Return a field's value; None for one that is unreadable."""
    try:
        return _value.decode(raw)
    except (*UNREADABLE, ValueError):  # the latter for numbers of thousands of digits
        return None


def _json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (OverflowError, RecursionError, ValueError):
        return b""  # no template writes it either


def _json_bytes(raw: msgspec.Raw) -> int:
    """Return the bytes of a field's value in plain JSON; an empty value has none."""
    value = _decoded(raw)
    return len(_json(value)) if value else 0


def _count_characters(text: str) -> list[int]:
    """Return the number of characters by `Unit`, up to OTHER; of a long text about so many."""
    if len(text) <= SAMPLE_CHARACTERS:
        return _count_all(text)
    last = len(text) - PIECE_CHARACTERS
    sample = "".join([text[(at := int(last * place)) : at + PIECE_CHARACTERS] for place in PLACES])
    return [round(count * len(text) / len(sample)) for count in _count_all(sample)]


def _count_all(text: str) -> list[int]:
    counts = [0] * (Unit.OTHER + 1)
    rest = text.encode(errors="replace")
    if not text.isascii():
        rest = rest.translate(None, _CONTINUATIONS)
    for unit, first_bytes in _FIRST_BYTES:
        before = len(rest)
        if not before:
            break
        rest = rest.translate(None, first_bytes)
        counts[unit] = before - len(rest)
    counts[Unit.OTHER] = len(rest)
    return counts


def _most_tokens(raw: msgspec.Raw) -> int | None:
    """Return the length of `truncate_prompt_tokens`; None if the engine cuts nothing, or to its own limit."""
    try:
        tokens = msgspec.json.decode(raw, type=int | None)
    except msgspec.MsgspecError:
        return None
    return tokens if tokens is not None and tokens > 0 else None
