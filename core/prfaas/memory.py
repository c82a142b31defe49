"""The memory limits of containers, the budgets of a gateway that are parts of its own, and what bodies hold of theirs.

This is the one place for all of them. The operator gives a gateway's container the limit here, unless its policy names
another one, and the gateway divides the limit that it finds itself under. So whoever changes the limit changes the
budgets. Gateways and workers bound the bodies that they hold in the same way, in all and of each client.
"""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from prfaas.errors import CapacityError

CGROUP: Final = Path("/sys/fs/cgroup")
LIMIT_FILES: Final = ("memory.max", "memory/memory.limit_in_bytes")
"""Of version 2 of the kernel's control groups, and of version 1."""
NO_LIMIT_BYTES: Final = 1 << 60
"""So much is no limit: version 1 says about 2**63 where there is none."""
GATEWAY_LIMIT_GIB: Final = 4
"""Of a gateway's container. A busy gateway takes 80 MiB besides its budgets."""
BODIES_PART: Final = 16
"""A sixteenth for the bodies of requests under way: each is there twice for a moment, and takes more when parsed."""
INDEX_PART: Final = 5
"""Likewise for the prefix index."""
INDEX_ENTRY_BYTES: Final = 80
"""Of a token block of the prefix index and the byte block that is mapped to it."""
MAX_INDEX_BLOCKS: Final = 10_000_000
"""400 MB: 24 bytes a block in its tree, and about 16 in the table of keys."""
CLIENT_PART: Final = 2
"""The bodies of one client may have half of what all may have; where nobody names it, those that still arrive from one
address. Whole ones may then have it all, since all clients may have the address of one proxy."""


class GatewayBudgets(NamedTuple):
    bodies_bytes: int
    index_blocks: int


def gateway_budgets(limit_bytes: int | None) -> GatewayBudgets:
    """Return what a gateway may hold under a limit; None: the one that its container usually has."""
    limit_bytes = limit_bytes or GATEWAY_LIMIT_GIB << 30
    blocks = min(MAX_INDEX_BLOCKS, limit_bytes // INDEX_PART // INDEX_ENTRY_BYTES)
    return GatewayBudgets(limit_bytes // BODIES_PART, blocks)


def container_limit_bytes(cgroup: Path = CGROUP) -> int | None:
    """Return the limit of the container that this process is in; None without one."""
    for name in LIMIT_FILES:
        with suppress(OSError, ValueError):  # the latter for `max`
            limit_bytes = int((cgroup / name).read_text())
            return limit_bytes if limit_bytes < NO_LIMIT_BYTES else None
    return None


class HeldBytes:
    """The bytes of all bodies under way: a request holds its own until its place is left.

    A client counts by its name, as long as its requests hold any. Without one it counts by its address, as long as its
    bodies arrive. So who holds bodies back has half of the room at most, and a proxy, which passes them on, has all of
    it. Whoever has neither name nor address counts for nobody.
    """

    def __init__(self, most_bytes: int):
        self.left_bytes = most_bytes
        self.most_of_client_bytes = most_bytes // CLIENT_PART
        self.by_client: Counter[str] = Counter()

    @contextmanager
    def place(self, name: str, address: str) -> Generator["BodyPlace"]:
        """Give a request its place for its body; what it took comes back when the block ends."""
        place = BodyPlace(self, name, address)
        try:
            yield place
        finally:
            place.leave_client()
            self.left_bytes += place.taken_bytes


class BodyPlace:
    """The room that one request has for its body, and whom it counts for."""

    def __init__(self, held: HeldBytes, name: str, address: str):
        self._held = held
        self._is_named = bool(name)
        self._client = name or address
        self._of_client_bytes = 0
        self.taken_bytes = 0

    def expect(self, size_bytes: int) -> None:
        """Raise CapacityError if a body of this size has no room now. A client's only body may have all of it."""
        if size_bytes > self._held.left_bytes:
            raise CapacityError("as many bytes of requests are held here as may be; try again in a moment")
        of_client_bytes = self._held.by_client[self._client]
        has_others = of_client_bytes > self._of_client_bytes
        if self._client and has_others and of_client_bytes + size_bytes > self._held.most_of_client_bytes:
            raise CapacityError("as many bytes of this client are held here as may be; try again in a moment")

    def take(self, size_bytes: int) -> None:
        """Take room for another piece that has come; raises CapacityError if there is none."""
        self.expect(size_bytes)
        self._held.left_bytes -= size_bytes
        self._held.by_client[self._client] += size_bytes
        self._of_client_bytes += size_bytes
        self.taken_bytes += size_bytes

    def arrived(self) -> None:
        """Note that the body is whole."""
        if not self._is_named:
            self.leave_client()

    def leave_client(self) -> None:
        """Count no more for the client."""
        by_client = self._held.by_client
        by_client[self._client] -= self._of_client_bytes
        self._of_client_bytes = 0
        if not by_client[self._client]:
            del by_client[self._client]
