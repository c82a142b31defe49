"""What a model reads of a request, in counts: characters of its texts by kind, token ids, messages, tools, media.

Only the fields that make the prompt count. Of a message these are its texts, and the names and arguments of its calls.
Schemas for answers, metadata, biases and encoded images do not count. Nor do white space between JSON values and the
way of escaping: texts count as they are decoded, tools as a template would write them.

Each kind has its own tokens a unit, within bounds: `prfaas.routing.estimate` learns them. Of a long text short pieces
from all over it stand for the rest. A few calls of C take one kind of characters after the other out of their bytes.
The first byte of UTF-8 names the kind. What clients could make costly is bounded: the values of a large field,
and of messages and parts. Token ids are counted as they are written.
"""

import re
from collections.abc import Callable, Mapping, Set
from enum import IntEnum
from typing import Any, Final, NamedTuple, cast

import msgspec

from prfaas.errors import UNREADABLE, RequestError
from prfaas.util import count_marks


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
    MARK_RUN = 8
    """Punctuation marks of ASCII without anything between them: vocabularies have tokens for most of them."""
    TOKEN = 9
    """A token id, in place of text."""
    MESSAGE = 10
    """A message, and the start of the answer to a chat."""
    TOOL_BYTE = 11
    """A byte of the tools' JSON. A template may leave them out."""
    DOCUMENT_BYTE = 12
    """Likewise of the documents."""
    MEDIUM = 13
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
_MARKS: Final = _bytes((0x21, 0x2F), (0x3A, 0x40), (0x5B, 0x60), (0x7B, 0x7E))
_MARKS_ALONE: Final = bytes(b"!"[0] if one in _MARKS else b" "[0] for one in range(256))
_FIRST_BYTES: Final = (
    (Unit.LETTER, _bytes((0x41, 0x5A), (0x61, 0x7A))),
    (Unit.SPACE, b" \t\n\r\v\f"),
    (Unit.MARK, _MARKS),
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
_CUT: Final = "truncate_prompt_tokens"
LARGE_BYTES: Final = 4 << 20
"""About a million tokens."""
BYTES_A_VALUE: Final = 8
"""A large field with more values than this is not decoded: they would take many times its memory."""
MAX_VALUES: Final = 100_000
"""The most messages and parts to read: some tens of milliseconds. A context holds fewer; the others are one text."""
COUNTED_CHARACTERS: Final = 2048
"""Of a longer text pieces are counted."""
PIECE_CHARACTERS: Final = 32
PLACES: Final = tuple(number * (5**0.5 - 1) / 2 % 1 for number in range(32))
"""Where the pieces begin, as shares of the text: by the golden section, which meets no period of it."""
_value = msgspec.json.Decoder()


def prompt_values(fields: Mapping[str, Any], names: Set[str]) -> dict[str, Any]:
    """Return the values of the fields that make a prompt; `names` are those of its API.

    A field stays as it is written if it holds token ids, numbers that are not readable here, or too many values.

    Raises RequestError for text that is no UTF-8 or has half of a surrogate pair, and for values nested too deep.
    """
    return {name: _decoded(name, field) for name, field in fields.items() if name in names or name == _CUT}


def prompt_size(values: Mapping[str, Any], shift: float = 0.0) -> PromptSize:
    """Return the size of a prompt from its `prompt_values`.

    `shift`, 0 to 1, moves the places at which a long text is counted: a client that knew them could put there what
    counts for little.

    A field that is as it was written counts as a text: an engine may read what we do not.
    """
    reader = _Reader()
    for name, read in _READ_FIELDS.items():
        value = values.get(name)
        if isinstance(value, msgspec.Raw):
            reader.written(name, bytes(value))
        elif value:
            read(reader, value)
    most_tokens = values.get(_CUT)
    return PromptSize(reader.counts(shift), None if most_tokens is None else _most_tokens(most_tokens), reader.is_whole)


class _Reader:
    """Collects what a body's fields hold. Its readers take no empty value."""

    def __init__(self) -> None:
        self.is_whole = True
        self._texts: list[str] = []
        self._left = MAX_VALUES
        self._tokens = self._messages = self._tool_bytes = self._document_bytes = self._media = 0

    def counts(self, shift: float) -> tuple[int, ...]:
        characters = _count_characters(self._texts[0] if len(self._texts) == 1 else "".join(self._texts), shift)
        # A template begins the answer, too.
        messages = self._messages + (self._messages > 0)
        return (*characters, self._tokens, messages, self._tool_bytes, self._document_bytes, self._media)

    def written(self, name: str, field: bytes) -> None:
        """Read a field as it is written: a completion's prompt of token ids or a batch of them, else a text."""
        if _holds_token_ids(name, field):
            self._tokens = field.count(b",") + 1  # of a batch, too: commas stand between its lists as well
        else:
            self._texts.append(field.decode(errors="replace"))

    def messages(self, value: Any) -> None:
        """Read the messages of a chat, the items of the Responses API, or one text in their place."""
        items = cast(list[Any], value) if isinstance(value, list) else [value]
        self._messages += len(items)
        for one in self._some(items):
            self.texts(one)

    def instructions(self, value: Any) -> None:
        """Read what stands before the messages."""
        self._messages += 1
        self.texts(value)

    def tools(self, value: Any) -> None:
        self._tool_bytes = len(_json(value))

    def documents(self, value: Any) -> None:
        self._document_bytes = len(_json(value))

    def earlier(self, _value: Any) -> None:
        self.is_whole = False

    def texts(self, value: Any) -> None:
        """Read what stands in a message, an item, a part, or a list of them: also a completion's prompt, or a batch."""
        waiting = [value]  # no recursion: clients choose the depth
        while waiting:
            one = waiting.pop()
            if isinstance(one, str):
                self._texts.append(one)
            elif isinstance(one, list):
                for part in self._some(cast(list[Any], one)):
                    if _is_medium(part):
                        self._media += 1
                    else:
                        waiting.append(part)
            elif isinstance(one, dict):
                for name, member in cast(dict[str, Any], one).items():
                    if name not in _READ:
                        continue
                    if isinstance(member, str):
                        self._texts.append(member)
                    else:
                        waiting.append(_json(member).decode() if name in _VALUES else member)

    def _some(self, values: list[Any]) -> list[Any]:
        """Return as many values as may still be read; the others count as the JSON that they are."""
        some, others = values[: self._left], values[self._left :]
        self._left -= len(some)
        if others:
            self._texts.append(_json(others).decode())
        return some


_READ_FIELDS: Final[Mapping[str, Callable[[_Reader, Any], None]]] = {
    "prompt": _Reader.texts,
    "messages": _Reader.messages,
    "input": _Reader.messages,
    "system": _Reader.instructions,
    "instructions": _Reader.instructions,
    "tools": _Reader.tools,
    "documents": _Reader.documents,
    "previous_response_id": _Reader.earlier,
}


def _holds_token_ids(name: str, field: bytes) -> bool:
    return name == "prompt" and _TOKEN_IDS.match(field) is not None


def _has_too_many_values(field: msgspec.Raw) -> bool:
    """Return whether a field is large and has a mark before a value in every few bytes, in its texts or beside them."""
    if len(field) <= LARGE_BYTES or memoryview(field)[0] == ord('"'):
        return False
    return count_marks(bytes(field)) > len(field) // BYTES_A_VALUE


def _decoded(name: str, field: Any) -> Any:
    """Return a field's value; the field itself if it was decoded before, or is to stay as it is written."""
    if not isinstance(field, msgspec.Raw):
        return field
    if _holds_token_ids(name, field) or _has_too_many_values(field):
        return field
    try:
        return _value.decode(field)
    except msgspec.ValidationError:  # a number out of range
        return field
    except UNREADABLE as error:
        raise RequestError(f"{name} cannot be read: {error}", param=name) from error
    except ValueError:  # a number of thousands of digits
        return field


def _is_medium(part: Any) -> bool:
    """Return whether a part holds nothing to read: an image, or anything else that is encoded."""
    return isinstance(part, dict) and _READ.isdisjoint(cast(dict[str, Any], part))


def _json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (OverflowError, RecursionError, ValueError):
        return b""  # no template writes it either


def _count_characters(text: str, shift: float) -> list[int]:
    """Return the number of characters and runs by `Unit`, up to MARK_RUN; of a long text about so many."""
    if len(text) <= COUNTED_CHARACTERS:
        return _count_all(text)
    last = len(text) - PIECE_CHARACTERS
    starts = [int(last * ((place + shift) % 1)) for place in PLACES]
    sample = "".join([text[at : at + PIECE_CHARACTERS] for at in starts])
    return [round(count * len(text) / len(sample)) for count in _count_all(sample)]


def _count_all(text: str) -> list[int]:
    counts = [0] * (Unit.MARK_RUN + 1)
    rest = text.encode(errors="replace")
    counts[Unit.MARK_RUN] = (b" " + rest.translate(_MARKS_ALONE)).count(b" !")
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


def _most_tokens(value: Any) -> int | None:
    """Return the length of `truncate_prompt_tokens`; None if the engine cuts nothing, or to its own limit."""
    try:
        tokens = msgspec.convert(value, int | None)
    except msgspec.ValidationError:
        return None
    return tokens if tokens is not None and tokens > 0 else None
