"""A link in the direction to the hub, which transfers share equally.

A transfer is on the link while bytes of it wait, whichever chunk they belong to. The link counts as sources do: bytes
that crossed, and the time in which some waited.
"""

from collections.abc import Callable

from prfaas.simulate.events import EventQueue, FairShare
from prfaas.simulate.request import Request

MBIT_BYTES = 1e6 / 8


class SharedLink:
    """One link, in the direction to the hub."""

    def __init__(self, events: EventQueue, mbps: float, round_trip_seconds: float, arrived: Callable[[Request], None]):
        self._events = events
        self.round_trip_seconds = round_trip_seconds
        self._mbps = mbps
        self._cut = False
        self.to_hub: FairShare[Request] = FairShare(events, self._bytes_per_second_each, arrived)

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

    def _bytes_per_second_each(self, transfers: int) -> float:
        return 0.0 if self._cut else self._mbps * MBIT_BYTES / transfers

    def _changed(self) -> None:
        self.to_hub.rate_changed()
