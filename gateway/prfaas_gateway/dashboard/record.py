"""What the live page tells of the past: the last requests, and a moment of threshold, load and links every second.

Both are rings: however long the gateway serves, and however much, they stay as small as they are. No prompt, key or
answer is in them.
"""

import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final

import msgspec

from prfaas.wire.control import Bandwidth, LinkUse
from prfaas_gateway.account import Account
from prfaas_gateway.metrics import Outcome
from prfaas_gateway.state import GatewayState

REQUESTS: Final = 200
MOMENTS: Final = 600
MOMENT_SECONDS: Final = 1.0


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is over. `number` counts them since the start; times are seconds since 1970 and durations."""

    number: int
    at: float
    request_id: str
    decision: str
    why: str
    outcome: Outcome
    status: int | None
    tokens: int
    cached_tokens: int
    cluster: str
    prefill: str
    decode: str
    first_token_seconds: float | None
    seconds: float
    reason: str


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway at one second. `threshold_tokens` is None before the first table."""

    at: float
    threshold_tokens: int | None
    bandwidth: Bandwidth | None
    in_flight: int
    offloaded: int
    local: int
    links: tuple[LinkUse, ...]


class Record:
    """The rings of one gateway.

    Args:
        clock: seconds since 1970.

    """

    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock = clock
        self._placed: deque[Placed] = deque(maxlen=REQUESTS)
        self._moments: deque[Moment] = deque(maxlen=MOMENTS)
        self.count = 0
        self.started = clock()

    def now(self) -> float:
        """Return seconds since 1970."""
        return self._clock()

    def add(self, account: Account, decision: str, outcome: Outcome) -> None:
        """Take in a request that is over."""
        route = account.route
        prefilled_by = (route.prefill or route.decode) if route else None
        self.count += 1
        self._placed.append(
            Placed(
                number=self.count,
                at=self._clock(),
                request_id=account.request_id,
                decision=decision,
                why=route.reason if route else "",
                outcome=outcome,
                status=account.status,
                tokens=account.prompt_tokens or account.estimated_tokens,
                cached_tokens=account.cached_tokens,
                cluster=prefilled_by.cluster if prefilled_by else "",
                prefill=prefilled_by.name if prefilled_by else "",
                decode=route.decode.name if route else "",
                first_token_seconds=account.first_token_seconds,
                seconds=account.seconds,
                reason=account.reason,
            )
        )

    def look(self, state: GatewayState) -> None:
        """Take in the gateway as it is at this moment."""
        rule, counters = state.rule(), state.counters
        self._moments.append(
            Moment(
                at=self._clock(),
                threshold_tokens=rule.threshold_tokens if rule else None,
                bandwidth=rule.bandwidth if rule else None,
                in_flight=state.in_flight,
                offloaded=counters.offloaded,
                local=counters.local,
                links=state.links,
            )
        )

    def placed_after(self, number: int) -> list[Placed]:
        """Return the requests kept whose number is greater, oldest first."""
        known = len(self._placed) - (self.count - number) if number <= self.count else 0
        return list(islice(self._placed, max(0, known), None))

    def moments_after(self, at: float) -> list[Moment]:
        """Return the moments kept that came later, oldest first."""
        return [moment for moment in self._moments if moment.at > at]
