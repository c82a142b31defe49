"""A link in the direction to the hub, which transfers share equally.

A transfer is on the link while bytes of it wait, whichever chunk they belong to. The link counts as sources do: bytes
that crossed, and the time in which some waited. Rates are those between two readings of these counters.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from prfaas.routing.links import LinkSample
from prfaas.simulate.events import EventQueue, FairShare
from prfaas.simulate.request import Request

MBIT_BYTES = 1e6 / 8


class _Reading(NamedTuple):
    at_seconds: float
    sent_bytes: float
    busy_seconds: float


class _Rates(NamedTuple):
    """The rates between two readings. No delivery where no data waited."""

    traffic_mbps: float
    delivery_mbps: float | None
    busy_fraction: float

    @classmethod
    def between(cls, first: _Reading, last: _Reading) -> "_Rates":
        seconds = max(1e-9, last.at_seconds - first.at_seconds)
        sent_mbit = (last.sent_bytes - first.sent_bytes) / MBIT_BYTES
        busy_seconds = last.busy_seconds - first.busy_seconds
        delivery_mbps = sent_mbit / busy_seconds if busy_seconds > 0 else None
        return cls(sent_mbit / seconds, delivery_mbps, min(1.0, busy_seconds / seconds))


class SharedLink:
    """One link, in the direction to the hub."""

    def __init__(self, events: EventQueue, mbps: float, round_trip_seconds: float, arrived: Callable[[Request], None]):
        self._events = events
        self.round_trip_seconds = round_trip_seconds
        self._mbps = mbps
        self._cut = False
        self.to_hub: FairShare[Request] = FairShare(events, self._bytes_per_second_each, arrived)
        self._readings = deque([_Reading(0.0, 0.0, 0.0)])

    @property
    def mbps(self) -> float:
        return 0.0 if self._cut else self._mbps

    @property
    def down(self) -> bool:
        return self._cut or self._mbps <= 0

    def set_mbps(self, mbps: float) -> None:
        """Carry so much from now on; 0: nothing."""
        self._mbps = mbps
        self._changed()

    def set_cut(self, cut: bool) -> None:
        """Cut the link, or mend it, whatever it would carry."""
        self._cut = cut
        self._changed()

    def sample(self, window_seconds: float, waiting_prefills: int) -> LinkSample:
        """Take a reading and return the sample that a scheduler would get now, with rates over a window."""
        now = self._events.now
        self._readings.append(_Reading(now, self.to_hub.served, self.to_hub.busy_seconds))
        while len(self._readings) > 2 and self._readings[1].at_seconds <= now - window_seconds:
            self._readings.popleft()
        window = _Rates.between(self._readings[0], self._readings[-1])
        latest = _Rates.between(self._readings[-2], self._readings[-1])
        return LinkSample(
            sampled_at_seconds=now,
            age_seconds=0.0,
            traffic_mbps=window.traffic_mbps,
            delivery_mbps=window.delivery_mbps,
            backlogged_fraction=window.busy_fraction,
            latest_delivery_mbps=latest.delivery_mbps,
            latest_backlogged_fraction=latest.busy_fraction,
            unsent_bytes=self.to_hub.unserved,
            waiting_prefills=float(waiting_prefills),
        )

    def _bytes_per_second_each(self, transfers: int) -> float:
        return 0.0 if self._cut else self._mbps * MBIT_BYTES / transfers

    def _changed(self) -> None:
        self.to_hub.rate_changed()
