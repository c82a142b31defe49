"""The metrics as a scheduler gets them from Prometheus: late and coarse.

Every SCRAPE_SECONDS the counters of each link are read, with the queues of the instances. What is asked in between gets
the latest reading, with its age. A rate is the slope from the first to the last reading in its window, and no rate is
known of fewer than two. What a member cluster cannot send over a link that is down is missed. That is known when the
scrape times out.
"""

from collections import deque
from typing import Final, NamedTuple

from prfaas.names import HUB
from prfaas.routing.links import LinkSample
from prfaas.simulate.link import MBIT_BYTES
from prfaas.simulate.request_process import RequestProcess

SCRAPE_SECONDS: Final = 1.0
"""The interval, and the timeout, of the charts' PodMonitors."""
TRAFFIC_SECONDS: Final = 5
"""The window of a MemberCluster's own utilisationQuery, as it is by default."""


class _Reading(NamedTuple):
    at_seconds: float
    sent_bytes: float
    backlogged_seconds: float
    unsent_bytes: float
    waiting_prefills: int


class _Slope(NamedTuple):
    """The rates between two readings. No delivery where no data waited."""

    traffic_mbps: float
    delivery_mbps: float | None
    backlogged_fraction: float

    @classmethod
    def between(cls, first: _Reading, last: _Reading) -> "_Slope":
        seconds = last.at_seconds - first.at_seconds
        sent_mbit = (last.sent_bytes - first.sent_bytes) / MBIT_BYTES
        backlogged_seconds = last.backlogged_seconds - first.backlogged_seconds
        delivery_mbps = sent_mbit / backlogged_seconds if backlogged_seconds > 0 else None
        return cls(sent_mbit / seconds, delivery_mbps, min(1.0, backlogged_seconds / seconds))


class Scrapes:
    """Reads a run's counters from now on. `window_seconds` is that of the scheduler's rates."""

    def __init__(self, process: RequestProcess, window_seconds: int):
        self._process = process
        self._window_seconds = window_seconds
        self._kept_seconds = max(window_seconds, TRAFFIC_SECONDS) + SCRAPE_SECONDS
        self._readings: dict[str, deque[_Reading]] = {name: deque() for name in process.links}
        self._missed_since_seconds: dict[str, float] = {}
        self.local_waiting_prefills = 0
        """In the hub."""
        self.began = False
        # In the middle between two looks of the short loop: as old as a reading is on average.
        process.events.after(SCRAPE_SECONDS / 2, self._scrape)

    def sample(self, cluster: str) -> LinkSample | None:
        """Return what Prometheus knows of a cluster's link now; None: its latest scrape was missed, or none was yet."""
        now, readings = self._process.events.now, self._readings[cluster]
        missed_since_seconds = self._missed_since_seconds.get(cluster, now)
        if not readings or now - missed_since_seconds >= SCRAPE_SECONDS:
            return None
        last = readings[-1]
        traffic, window = self._slope(readings, TRAFFIC_SECONDS), self._slope(readings, self._window_seconds)
        latest = _Slope.between(readings[-2], last) if window is not None else None
        return LinkSample(
            sampled_at_seconds=last.at_seconds,
            age_seconds=now - last.at_seconds,
            instances_age_seconds=now - last.at_seconds,
            traffic_mbps=traffic.traffic_mbps if traffic else None,
            delivery_mbps=window.delivery_mbps if window else None,
            backlogged_fraction=window.backlogged_fraction if window else 0.0,
            latest_delivery_mbps=latest.delivery_mbps if latest else None,
            latest_backlogged_fraction=latest.backlogged_fraction if latest else 0.0,
            unsent_bytes=last.unsent_bytes,
            waiting_prefills=float(last.waiting_prefills),
        )

    def _slope(self, readings: deque[_Reading], window_seconds: int) -> _Slope | None:
        since_seconds = self._process.events.now - window_seconds
        within = [one for one in readings if one.at_seconds > since_seconds]
        return _Slope.between(within[0], within[-1]) if len(within) > 1 else None

    def _scrape(self, _: None) -> None:
        now = self._process.events.now
        self._process.events.after(SCRAPE_SECONDS, self._scrape)
        self.began = True
        self.local_waiting_prefills = self._waiting(HUB)
        for name, link in self._process.links.items():
            if link.down:
                self._missed_since_seconds.setdefault(name, now)
                continue
            self._missed_since_seconds.pop(name, None)
            readings, counted = self._readings[name], link.to_hub
            readings.append(_Reading(now, counted.served, counted.busy_seconds, counted.unserved, self._waiting(name)))
            while readings[0].at_seconds < now - self._kept_seconds:
                readings.popleft()

    def _waiting(self, cluster: str) -> int:
        instances, table = self._process.instances, self._process.table
        return sum(instances[one.name].waiting_prefills for one in table.instances if one.cluster == cluster)
