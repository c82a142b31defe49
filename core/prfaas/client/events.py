"""Server-sent events out of bytes, cut anywhere; and the pieces of an answer out of events."""

from collections.abc import Iterator
from typing import Any, Final, TypeVar

import msgspec

from prfaas.client.answers import UNREADABLE, ChatCompletionChunk, CompletionChunk, read_answer
from prfaas.client.errors import BrokenStreamError, error_in_stream
from prfaas.errors import ProtocolError

MAX_EVENT_BYTES: Final = 16 << 20

Chunk = TypeVar("Chunk", CompletionChunk, ChatCompletionChunk)


class Events:
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


class Chunks:
    """Reads the pieces of one answer. `is_done` once the server has said that it is whole."""

    def __init__(self, kind: type[Any]):
        self._kind = kind
        self._events = Events()
        self.is_done = False

    def feed(self, piece: bytes) -> Iterator[Any]:
        """Yield the chunks that are whole with this piece; raises the error that the server tells."""
        for data in self._events.feed(piece):
            if data == b"[DONE]":
                self.is_done = True
                return
            if (told := _error(data)) is not None:
                raise error_in_stream(told)
            yield read_answer(data, self._kind)

    def end(self) -> None:
        """Raise BrokenStreamError unless the answer is whole: a stream that simply ends is not."""
        if not self.is_done:
            raise BrokenStreamError("the stream ended before the answer was whole")


class _MaybeError(msgspec.Struct):
    error: Any = None


_maybe_error = msgspec.json.Decoder(_MaybeError)


def _error(data: bytes) -> object:
    try:
        return _maybe_error.decode(data).error
    except UNREADABLE as error:
        raise ProtocolError(f"an event of the stream is not JSON: {error}") from error
