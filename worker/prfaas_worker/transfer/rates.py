"""What the link to each peer cluster delivered lately, while data waited: the monitor's totals, turned into rates."""

import threading
import time
from typing import Final, NamedTuple

from prfaas_worker.transfer.accounting import Monitor

BYTES_PER_MBIT: Final = 125_000
RENEW_SECONDS: Final = 0.25
"""How often a link's figures are looked at, and how much waiting they must cover."""


class _Rate(NamedTuple):
    """Totals of the monitor when they were last used, the rate up to there, and when to look again."""

    backlogged_bytes: int
    backlogged_seconds: float
    mbps: float | None
    renew_at: float


class Rates:
    """Rates of all links of an instance. Any thread may call."""

    def __init__(self, monitor: Monitor):
        self._monitor = monitor
        self._lock = threading.Lock()
        self._rates: dict[str, _Rate] = {}

    def mbps(self, peer: str) -> float | None:
        """Return what the link to a peer cluster delivers, in Mbit/s; None before data waited for long enough."""
        now = time.monotonic()
        with self._lock:
            rate = self._rates.get(peer) or _Rate(0, 0.0, None, 0.0)
            if now >= rate.renew_at:
                rate = self._rates[peer] = self._renewed(peer, rate)._replace(renew_at=now + RENEW_SECONDS)
            return rate.mbps

    def round_trip_seconds(self, peer: str) -> float | None:
        """Return the least round trip to it of the last minutes; None while there were no connections lately."""
        return next((one.min_rtt_seconds for one in self._monitor.links() if one.peer == peer), None)

    def _renewed(self, peer: str, rate: _Rate) -> _Rate:
        """Take the rate anew, when data waited for long enough since the last time."""
        stats = next((one for one in self._monitor.links() if one.peer == peer), None)
        if stats is None or stats.backlogged_seconds - rate.backlogged_seconds < RENEW_SECONDS:
            return rate
        delivered = stats.backlogged_bytes - rate.backlogged_bytes
        mbps = delivered / BYTES_PER_MBIT / (stats.backlogged_seconds - rate.backlogged_seconds)
        return _Rate(stats.backlogged_bytes, stats.backlogged_seconds, mbps, rate.renew_at)
