"""The gateway's fixed bounds: sizes, waits, attempts, connections, and the bytes of all bodies under way."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple, Self

from prfaas.http_server import DEFAULT_BOUNDS, PROBED_BOUNDS, ConnectionBounds
from prfaas.memory import gateway_budgets
from prfaas_gateway.openai import SaturatedError

CLIENT_PART: Final = 2
"""The bodies of one client may have half of what all may have; without keys, those that still arrive from one address.
Whole ones may then have it all, since all clients may have the address of one proxy."""


class Limits(NamedTuple):
    """The bounds of one gateway. They protect the process; users tune the policy instead."""

    request_bytes: int = 16 * 1024 * 1024
    """A larger request body is refused with 413. A prompt of 128 K tokens takes well under 1 MB."""
    all_requests_bytes: int = gateway_budgets(None).bodies_bytes
    """All bodies of requests under way together, as they are unpacked. What exceeds it is refused with 429."""
    index_blocks: int = gateway_budgets(None).index_blocks
    """Blocks of tokens, and of bytes, in the prefix index."""
    connections: ConnectionBounds = DEFAULT_BOUNDS
    admin_connections: ConnectionBounds = PROBED_BOUNDS
    """Of the other port: so clients that take all of theirs keep no probe out, nor does who takes these."""
    buffered_answer_bytes: int = 4 * 1024 * 1024
    """An answer of known length up to this is read whole before relaying, so that a worker's death costs nothing."""
    connect_seconds: float = 1.0
    first_byte_seconds: float = 600.0
    """Timeout of the worker's response headers: queueing, prefill, and without streaming the whole generation."""
    liveness_interval_seconds: float = 5.0
    """Interval of liveness probes to a worker that has not answered yet."""
    liveness_timeout_seconds: float = 2.0
    """Timeout of a liveness probe; the second failure in a row gives the worker up."""
    idle_seconds: float = 60.0
    """Timeout of the request body, and between two pieces of a stream, from the worker or to the client."""
    stall_seconds: float = 15.0
    """Timeout between two pieces of a resumable stream; then another worker resumes it."""
    recover_seconds: float = 15.0
    """How long the gateway tries to resume a broken stream."""
    hold_seconds: float = 2.0
    """How long a request waits if every decode instance is ejected: one may return."""
    poll_seconds: float = 0.1
    """The poll interval of both waits."""
    attempts: int = 4
    """Most legs of one request."""
    eject_seconds: float = 0.5
    """Duration of an instance's first ejection; it doubles with every further failure in a row."""
    eject_max_seconds: float = 5.0
    drain_lead_seconds: float = 1.0
    """After SIGTERM, how long new connections are still accepted, until load balancers know of the drain."""

    def within(self, memory_bytes: int | None) -> Self:
        """Return the same with the budgets of a container of this memory; None: of the usual one."""
        bodies_bytes, index_blocks = gateway_budgets(memory_bytes)
        return self._replace(all_requests_bytes=max(self.request_bytes, bodies_bytes), index_blocks=index_blocks)


class HeldBytes:
    """The bytes of all bodies under way: a request holds its own until it ends.

    A client counts by the name of its key, as long as its requests are under way. Without keys it counts by its
    address, as long as its bodies arrive. So who holds bodies back has half of the room at most, and a proxy, which
    passes them on, has all of it.
    """

    def __init__(self, most_bytes: int):
        self.left_bytes = most_bytes
        self.most_of_client_bytes = most_bytes // CLIENT_PART
        self.by_client: Counter[str] = Counter()

    @contextmanager
    def place(self, name: str, address: str) -> Iterator["BodyPlace"]:
        """Give a request its place for its body; what it took comes back when the block ends. `name` is that of its
        key's client, empty without keys.
        """
        place = BodyPlace(self, name, address)
        try:
            yield place
        finally:
            place.leave_client()
            self.left_bytes += place.taken_bytes


class BodyPlace:
    def __init__(self, held: HeldBytes, name: str, address: str):
        self._held = held
        self._has_key = bool(name)
        self._client = name or address
        self._of_client_bytes = 0
        self.taken_bytes = 0

    def expect(self, size_bytes: int) -> None:
        """Raise SaturatedError if a body of this size has no room now. A client's only body may have all of it."""
        if size_bytes > self._held.left_bytes:
            raise SaturatedError("the gateway holds as many bytes of requests as it may; try again in a moment")
        of_client_bytes = self._held.by_client[self._client]
        has_others = of_client_bytes > self._of_client_bytes
        if has_others and of_client_bytes + size_bytes > self._held.most_of_client_bytes:
            raise SaturatedError("the gateway holds as many bytes of this client as it may; try again in a moment")

    def take(self, size_bytes: int) -> None:
        """Take room for another piece that has come; raises SaturatedError if there is none."""
        self.expect(size_bytes)
        self._held.left_bytes -= size_bytes
        self._held.by_client[self._client] += size_bytes
        self._of_client_bytes += size_bytes
        self.taken_bytes += size_bytes

    def arrived(self) -> None:
        """Note that the body is whole."""
        if not self._has_key:
            self.leave_client()

    def leave_client(self) -> None:
        """Count no more for the client."""
        by_client = self._held.by_client
        by_client[self._client] -= self._of_client_bytes
        self._of_client_bytes = 0
        if not by_client[self._client]:
            del by_client[self._client]
