"""Links between clusters: shared by their transfers, and measured as a scheduler would see them.

A transfer is on the link while bytes of it wait, whichever chunk they belong to. The samples are what the live system
gets from its metrics: rates over a window, of which those of delivery count only the time in which data waited.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from prfaas.routing.links import LinkSample
from prfaas.simulate.events import Events
from prfaas.simulate.request import Request
from prfaas.simulate.sharing import FairShare

MBIT_BYTES = 1e6 / 8
Told = Callable[[Request], None]


class _Reading(NamedTuple):
    at_seconds: float
    sent_bytes: float
    busy_seconds: float


class _Rates(NamedTuple):
    """What two readings say together. No delivery where nobody waited."""

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
    """One link, in the direction to the hub.

    Args:
        events: the run's clock.
        mbps: what it carries at first.
        round_trip_seconds: there and back.
        arrived: called with a request all of whose bytes handed over so far have crossed to the hub.

    """

    def __init__(self, events: Events, mbps: float, round_trip_seconds: float, arrived: Told):
        self._events = events
        self.round_trip_seconds = round_trip_seconds
        self._mbps = mbps
        self._cut = False
        self.to_hub: FairShare[Request] = FairShare(events, self._bytes_per_second_each, arrived)
        self._readings = deque([_Reading(0.0, 0.0, 0.0)])

    @property
    def mbps(self) -> float:
        """What it carries now, each way."""
        return 0.0 if self._cut else self._mbps

    @property
    def down(self) -> bool:
        """Whether nothing crosses at all."""
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
        """Return what a scheduler would be told now, by rates over a window; a second call takes a new reading."""
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
