"""Bytes to text as they come, and the table from token ids to bytes."""

import codecs
from array import array
from collections.abc import Iterable

from prfaas.errors import RequestError


class Utf8Stream:
    """Bytes to text, piece by piece: a character comes out when its last byte came in, damaged ones as U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data: bytes, *, final: bool = False) -> str:
        """Return the characters that are complete now; with `final`, what is left too."""
        return self._decoder.decode(data, final)


class TokenTable:
    """The bytes of every token id in one block: a list of 130,000 small objects would cost ten times the memory."""

    def __init__(self, tokens: Iterable[bytes]):
        ends, parts, length = array("I", [0]), [], 0
        for token in tokens:
            parts.append(token)
            length += len(token)
            ends.append(length)
        self._ends, self._data = ends, b"".join(parts)
        self._last = len(ends) - 2

    def __len__(self) -> int:
        return self._last + 1

    def __getitem__(self, token_id: int) -> bytes:
        if not 0 <= token_id <= self._last:
            return b""  # a vocabulary padded beyond its tokenizer
        return self._data[self._ends[token_id] : self._ends[token_id + 1]]


def utf8(text: str) -> bytes:
    """Return the text's bytes.

    Raises:
        RequestError: the text has half of a surrogate pair.

    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the text has half of a surrogate pair at character {error.start}; send UTF-8") from error
