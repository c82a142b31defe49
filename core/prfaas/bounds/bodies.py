"""The room that bodies of requests have.

The bytes of requests are bounded in all, of each client, and of all bodies that still arrive. A body counts until its
place is left, which a gateway does when the answer has ended. While it arrives, all but its beginning counts in a
smaller room, too: who holds large bodies back keeps no short one out. Where there is no room, the body that has arrived
for longest makes it, as its sender may be holding it back. Large ones are read in turns: whoever else is served waits
in the event loop for one piece of a bomb and no more.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from prfaas.errors import CapacityError

CLIENT_PART: Final = 2
"""One client may have half of a room."""
BEGINNING_BYTES: Final = 64 << 10
"""So much of each body counts as arrived: short ones have room where large ones are held back."""
TURN_BYTES: Final = 64 << 10
"""The price of a turn: a body that has sent no more takes none, so who drips bytes takes no turn of others."""
SPARED_SECONDS: Final = 5.0
"""A body makes no room for others before it has arrived for so long."""
_OF_ALL: Final = "requests"
_OF_CLIENT: Final = "this client"


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
        self.begun: dict[BodyPlace, float] = {}
        """Bodies that arrive, and since when by the event loop's clock: the longest first."""

    @contextmanager
    def place(self, name: str, address: str) -> Generator["BodyPlace"]:
        """Give a request its place for its body; what it took comes back when the block ends."""
        place = BodyPlace(self, name, address)
        try:
            yield place
        finally:
            place.leave()

    def end_slowest(self, room: "ByteRoom", client: str, but: "BodyPlace") -> bool:
        """End the body that has arrived for longest, `but` one, of those that hold some of a room, of a client or, if
        that is empty, of all; return whether there was one."""
        for place, since_seconds in self.begun.items():
            if asyncio.get_running_loop().time() - since_seconds < SPARED_SECONDS:
                return False
            if place is not but and client in ("", place.client) and place.holds(room):
                place.make_room()
                return True
        return False


class BodyPlace:
    """The room that one request has for its body, and whom it counts for."""

    def __init__(self, held: HeldBytes, name: str, address: str):
        self.client = name or address
        self._held = held
        self._in_all = _Part(held.all, name)
        self._arriving = _Part(held.arriving, self.client)
        self._since_turn_bytes = 0
        self._patience: asyncio.Timeout | None = None
        self._made_room = False

    @property
    def taken_bytes(self) -> int:
        return self._in_all.taken_bytes

    @asynccontextmanager
    async def arriving(self, latest_seconds: float) -> AsyncGenerator[None]:
        """Have the body arrive in the block. Raises TimeoutError at `latest_seconds` of the event loop's clock, and
        CapacityError if it had to make room for another one."""
        begun = self._held.begun
        begun[self] = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(latest_seconds) as self._patience:
                yield
        except TimeoutError:
            if not self._made_room:
                raise
        finally:
            begun.pop(self, None)
        if self._made_room:
            raise CapacityError("this body came slowly, and others needed its room; try again in a moment")
        self._arriving.leave()

    def make_room(self) -> None:
        """Give the room back, and end the reading of the body."""
        self._held.begun.pop(self)
        self._made_room = True
        self.leave()
        if self._patience is not None and not self._patience.expired():
            self._patience.reschedule(asyncio.get_running_loop().time())

    def expect(self, size_bytes: int) -> None:
        """Have others make room for so many bytes more where it is needed. Raises CapacityError if there is none now.
        A client's only body may have all of it."""
        for part, more_bytes in ((self._in_all, size_bytes), (self._arriving, self._late_bytes(size_bytes))):
            while lacks := part.lacks(more_bytes):
                if not self._held.end_slowest(part.room, self.client if lacks == _OF_CLIENT else "", but=self):
                    raise CapacityError(f"as many bytes of {lacks} are held here as may be; try again in a moment")

    def holds(self, room: "ByteRoom") -> bool:
        """Return whether it takes some of a room."""
        return any(part.room is room and part.taken_bytes for part in (self._in_all, self._arriving))

    def take(self, size_bytes: int) -> None:
        """Take room for another piece that has come; raises CapacityError if there is none."""
        self.expect(size_bytes)
        self._arriving.add(self._late_bytes(size_bytes))
        self._in_all.add(size_bytes)
        self._since_turn_bytes += size_bytes

    def _late_bytes(self, size_bytes: int) -> int:
        """Return how many of so many bytes more are behind the beginning of the body."""
        return max(0, self.taken_bytes + size_bytes - BEGINNING_BYTES) - max(0, self.taken_bytes - BEGINNING_BYTES)

    async def turn(self) -> None:
        """Wait until the next piece may be read, where more than a turn's price has come since the last one."""
        if self._since_turn_bytes > TURN_BYTES:
            self._since_turn_bytes = 0
            async with self._held.turns:
                await asyncio.sleep(0)  # all that is ready runs before the lock is free

    def leave(self) -> None:
        self._arriving.leave()
        self._in_all.leave()


class ByteRoom:
    """So many bytes, half of which one client may hold."""

    def __init__(self, most_bytes: int):
        self.most_bytes = most_bytes
        self.most_of_client_bytes = most_bytes // CLIENT_PART
        self.taken_bytes = 0
        self.by_client: Counter[str] = Counter()


class _Part:
    """What one body takes of a room. An empty client is nobody's."""

    def __init__(self, room: ByteRoom, client: str):
        self.room = room
        self._client = client
        self.taken_bytes = 0

    def lacks(self, size_bytes: int) -> str:
        """Return whose bytes leave no room for so many more; empty if there is room."""
        room = self.room
        if room.taken_bytes + size_bytes > room.most_bytes:
            return _OF_ALL
        of_client_bytes = room.by_client[self._client]
        has_others = of_client_bytes > self.taken_bytes
        if self._client and has_others and of_client_bytes + size_bytes > room.most_of_client_bytes:
            return _OF_CLIENT
        return ""

    def add(self, size_bytes: int) -> None:
        self.room.taken_bytes += size_bytes
        self.room.by_client[self._client] += size_bytes
        self.taken_bytes += size_bytes

    def leave(self) -> None:
        """Give all of it back."""
        by_client = self.room.by_client
        self.room.taken_bytes -= self.taken_bytes
        by_client[self._client] -= self.taken_bytes
        self.taken_bytes = 0
        if not by_client[self._client]:
            del by_client[self._client]
