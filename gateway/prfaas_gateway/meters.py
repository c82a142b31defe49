"""What each client has used: requests in flight, requests and prompt tokens a minute.

Both rates are buckets that refill steadily and hold one minute's worth. A request may take the last token of its bucket
and more: the bucket then stands below zero and lets nobody in until it is paid back, so that a prompt longer than a
minute's tokens waits its turn and is not refused for ever. Each gateway counts for itself.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prfaas_gateway.keys import Client
from prfaas_gateway.openai import LimitError

MINUTE_SECONDS = 60.0


class Bucket:
    """A rate. `level` is what may still be used; it never exceeds a minute's worth.

    Args:
        per_minute: the rate, and the most that stands ready.
        now_seconds: a monotonic clock's.

    """

    def __init__(self, per_minute: int, now_seconds: float):
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_seconds = now_seconds

    def wait_seconds(self, least: float, now_seconds: float) -> float:
        """Return after how many seconds at least so much stands ready, 0 if it does."""
        return max(0.0, least - self._now(now_seconds)) * MINUTE_SECONDS / self.per_minute

    def take(self, amount: int, now_seconds: float) -> None:
        """Use so much, be it there or not."""
        self._level = self._now(now_seconds) - amount
        self._at_seconds = now_seconds

    def _now(self, now_seconds: float) -> float:
        refilled = (now_seconds - self._at_seconds) * self.per_minute / MINUTE_SECONDS
        return min(float(self.per_minute), self._level + refilled)


class Meter:
    """One client's use.

    Args:
        client: has the limits.
        clock: monotonic seconds.

    """

    def __init__(self, client: Client, clock: Callable[[], float]):
        self._clock = clock
        self.in_flight = 0
        self.limit(client)

    def limit(self, client: Client) -> None:
        """Apply these limits from now on; both rates start afresh."""
        self.client = client
        now = self._clock()
        self._requests = Bucket(client.requests_per_minute, now) if client.requests_per_minute else None
        self._tokens = Bucket(client.tokens_per_minute, now) if client.tokens_per_minute else None

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count one request while it lasts.

        Raises:
            LimitError: a limit is reached; nothing was counted.

        """
        now, client = self._clock(), self.client
        if client.max_in_flight is not None and self.in_flight >= client.max_in_flight:
            raise _reached("requests", f"{client.max_in_flight} requests in flight", 1.0)
        if self._requests and (wait_seconds := self._requests.wait_seconds(1.0, now)):
            raise _reached("requests", f"{client.requests_per_minute} requests a minute", wait_seconds)
        if self._tokens and (wait_seconds := self._tokens.wait_seconds(1.0, now)):
            raise _reached("tokens", f"{client.tokens_per_minute} prompt tokens a minute", wait_seconds)
        if self._requests:
            self._requests.take(1, now)
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def charge(self, prompt_tokens: int) -> None:
        """Count the tokens of a request that was let in."""
        if self._tokens:
            self._tokens.take(prompt_tokens, self._clock())


class Meters:
    """The meters of all clients that have come: never more than there have been names of files.

    Args:
        clock: monotonic seconds.

    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._meters: dict[str, Meter] = {}

    def of(self, client: Client) -> Meter:
        """Return a client's meter, under the limits that they have now."""
        meter = self._meters.get(client.name)
        if meter is None:
            meter = self._meters[client.name] = Meter(client, self._clock)
        elif meter.client != client:
            meter.limit(client)
        return meter


def _reached(kind: str, limit: str, wait_seconds: float) -> LimitError:
    return LimitError(
        f"this API key's limit of {limit} is reached; try again in {math.ceil(wait_seconds)} s", kind, wait_seconds
    )
