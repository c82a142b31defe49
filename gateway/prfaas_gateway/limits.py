"""The gateway's fixed bounds: sizes, waits, attempts, connections, and the bytes of all bodies under way."""

from typing import NamedTuple, Self

from prfaas.http_server import PROBED_BOUNDS, ConnectionBounds, bounds_within
from prfaas.memory import ARRIVING_PART, gateway_budgets


class Limits(NamedTuple):
    """The bounds of one gateway. They protect the process; users tune the policy instead."""

    request_bytes: int = 16 * 1024 * 1024
    """A larger request body is refused with 413. A prompt of 128 K tokens takes well under 1 MB."""
    all_requests_bytes: int = gateway_budgets(None).bodies_bytes
    """All bodies of requests under way together, as they are unpacked. What exceeds it is refused with 429."""
    index_blocks: int = gateway_budgets(None).index_blocks
    """Blocks of tokens, and of bytes, in the prefix index."""
    connections: ConnectionBounds = bounds_within(gateway_budgets(None).heads_bytes)
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
    """After SIGTERM, new connections are accepted until no request has come for so long."""

    @property
    def arriving_bytes(self) -> int:
        """Of `all_requests_bytes`, what bodies that still arrive may have: a quarter, but room for the largest one."""
        return max(min(self.request_bytes, self.all_requests_bytes), self.all_requests_bytes // ARRIVING_PART)

    def within(self, memory_bytes: int | None) -> Self:
        """Return the same with the budgets of a container of this memory; None: of the usual one."""
        budgets = gateway_budgets(memory_bytes)
        return self._replace(
            all_requests_bytes=max(self.request_bytes, budgets.bodies_bytes),
            index_blocks=budgets.index_blocks,
            connections=bounds_within(budgets.heads_bytes),
        )
