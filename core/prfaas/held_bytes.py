"""The bytes that bodies of requests hold: bounded in all, of each client, and of all bodies that still arrive.

A body counts until its place is left, which a gateway does when the answer has ended. Until it is whole it counts in a
smaller room, too: who holds bodies back leaves the rest to others. Large bodies are read in turns, a piece in each
round of the event loop: a kilobyte of gzip unpacks to a megabyte, and whoever else is served waits for a piece of it.
"""

import asyncio
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from prfaas.errors import CapacityError

CLIENT_PART: Final = 2
"""One client may have half of a room."""
AT_ONCE_BYTES: Final = 64 << 10
"""A body of so much is read without turns."""


class HeldBytes:
    """The bytes of all bodies under way, of which those that still arrive may have `arriving_bytes`.

    A client counts by its name as long as its requests hold any. Without one it counts by its address as long as its
    bodies arrive: so who holds bodies back has half of that room at most, and a proxy, which passes them on, has all
    of the other one. Whoever has neither name nor address counts for nobody.
    """

    def __init__(self, most_bytes: int, arriving_bytes: int | None = None):
        self.all = ByteRoom(most_bytes)
        self.arriving = ByteRoom(most_bytes if arriving_bytes is None else arriving_bytes)
        self.turns = asyncio.Lock()

    @contextmanager
    def place(self, name: str, address: str) -> Generator["BodyPlace"]:
        """Give a request its place for its body; what it took comes back when the block ends."""
        place = BodyPlace(self, name, address)
        try:
            yield place
        finally:
            place.leave()


class BodyPlace:
    """The room that one request has for its body, and whom it counts for."""

    def __init__(self, held: HeldBytes, name: str, address: str):
        self._turns = held.turns
        self._in_all = _Part(held.all, name)
        self._arriving = _Part(held.arriving, name or address)

    @property
    def taken_bytes(self) -> int:
        return self._in_all.taken_bytes

    def expect(self, size_bytes: int) -> None:
        """Raise CapacityError if a body of this size has no room now. A client's only body may have all of it."""
        self._in_all.expect(size_bytes)
        self._arriving.expect(size_bytes)

    def take(self, size_bytes: int) -> None:
        """Take room for another piece that has come; raises CapacityError if there is none."""
        self.expect(size_bytes)
        self._in_all.add(size_bytes)
        self._arriving.add(size_bytes)

    async def turn(self) -> None:
        """Wait until the next piece may be read."""
        if self.taken_bytes > AT_ONCE_BYTES:
            async with self._turns:
                await asyncio.sleep(0)  # all that is ready runs before the lock is free

    def arrived(self) -> None:
        """Note that the body is whole."""
        self._arriving.leave()

    def leave(self) -> None:
        self._in_all.leave()
        self._arriving.leave()


class ByteRoom:
    """So many bytes, half of which one client may hold."""

    def __init__(self, most_bytes: int):
        self.most_bytes = most_bytes
        self.taken_bytes = 0
        self.most_of_client_bytes = most_bytes // CLIENT_PART
        self.by_client: Counter[str] = Counter()


class _Part:
    """What one body takes of a room. An empty client is nobody's."""

    def __init__(self, room: ByteRoom, client: str):
        self._room = room
        self._client = client
        self.taken_bytes = 0

    def expect(self, size_bytes: int) -> None:
        room = self._room
        if room.taken_bytes + size_bytes > room.most_bytes:
            raise CapacityError("as many bytes of requests are held here as may be; try again in a moment")
        of_client_bytes = room.by_client[self._client]
        has_others = of_client_bytes > self.taken_bytes
        if self._client and has_others and of_client_bytes + size_bytes > room.most_of_client_bytes:
            raise CapacityError("as many bytes of this client are held here as may be; try again in a moment")

    def add(self, size_bytes: int) -> None:
        self._room.taken_bytes += size_bytes
        self._room.by_client[self._client] += size_bytes
        self.taken_bytes += size_bytes

    def leave(self) -> None:
        """Give all of it back."""
        by_client = self._room.by_client
        self._room.taken_bytes -= self.taken_bytes
        by_client[self._client] -= self.taken_bytes
        self.taken_bytes = 0
        if not by_client[self._client]:
            del by_client[self._client]
