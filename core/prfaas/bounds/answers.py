"""Reads answers of servers to a bound.

A kilobyte of gzip may hold a megabyte, and aiohttp unpacks all that the network brings at once, whoever waits for it.
So our sessions with servers of others ask for ACCEPTED, leave an answer packed (`auto_decompress=False`), and read it
here. What is unpacked and not yet taken is UNPACKED_BYTES at most.
"""

import asyncio
import zlib
from collections.abc import AsyncIterable, AsyncIterator
from typing import Final

import aiohttp

from prfaas.errors import ProtocolError

ACCEPTED: Final = {"Accept-Encoding": "gzip"}
"""The header of a request whose answer is read here."""
UNPACKED_BYTES: Final = 1 << 16
_PLAIN: Final = frozenset({"", "identity"})
_PACKED: Final = frozenset({"gzip", "deflate"})
_EITHER_HEAD: Final = 32 + zlib.MAX_WBITS
"""Of zlib: it finds out by itself which of the two it is."""


async def read_at_most(pieces: AsyncIterable[bytes], limit_bytes: int, begun: bytearray | None = None) -> bytearray:
    """Return a body by its pieces, or so much of a longer one that it exceeds the limit: nothing longer is held.

    A body that has `begun` grows, and is not copied: it may be a large part of a process's memory.
    """
    body = bytearray() if begun is None else begun
    async for piece in pieces:
        body += piece
        if len(body) > limit_bytes:
            break
    return body


def unpacked(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the body of an answer that was left packed, as `unpack`."""
    encoding = ",".join(response.headers.getall("Content-Encoding", ()))
    # The stream's own methods for a number of bytes raise its limits to that number.
    return unpack(response.content.iter_any(), encoding, f"the answer of {response.url.host}")


async def unpack(pieces: AsyncIterable[bytes], encoding: str, what: str) -> AsyncIterator[bytes]:
    """Yield what pieces hold by their Content-Encoding, at most UNPACKED_BYTES at a time if they are packed.

    Raises ProtocolError, which names `what`: it is packed otherwise than by gzip or deflate, damaged, cut off, or
    followed by more.
    """
    encoding = encoding.strip().lower()
    if encoding in _PLAIN:
        async for piece in pieces:
            yield piece
        return
    if encoding not in _PACKED:
        raise ProtocolError(f"{what} is packed by {encoding[:40]!r}, but only gzip was asked for: is there a proxy?")
    unpacking, is_empty = zlib.decompressobj(_EITHER_HEAD), True
    async for packed in pieces:
        is_empty, left, part = False, packed, b""
        while left or len(part) == UNPACKED_BYTES:  # after a full one, zlib may hold more of what it has taken
            try:
                part = unpacking.decompress(left, UNPACKED_BYTES)
            except zlib.error as error:
                raise ProtocolError(f"{what} is packed and damaged: {error}") from error
            if unpacking.unused_data:
                raise ProtocolError(f"{what} goes on after the end of what is packed")
            left = unpacking.unconsumed_tail
            if part:
                yield part
            if len(part) == UNPACKED_BYTES:
                await asyncio.sleep(0)  # one packed piece may hold thousands of these: others have their turn
    if not is_empty and not unpacking.eof:
        raise ProtocolError(f"{what} ends in the middle of what is packed")
