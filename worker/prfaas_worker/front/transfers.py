"""Transfers as metrics: how long delivered ones took and how large they were, and connections that broke meanwhile."""

from collections import Counter
from typing import Final, get_args

from prfaas.wire.engine import Direction, TransferEnded
from prfaas_worker.front.latencies import REQUEST_BUCKETS, Histogram

SIZE_BUCKETS: Final = tuple(1 << power for power in range(16, 38, 2))
"""64 KiB to 64 GiB."""


class Transfers:
    """By direction. Only what was delivered is in the histograms: an end halfway says little of a link."""

    def __init__(self) -> None:
        directions: tuple[Direction, ...] = get_args(Direction)
        self.seconds = {direction: Histogram(REQUEST_BUCKETS) for direction in directions}
        self.payload_bytes = {direction: Histogram(SIZE_BUCKETS) for direction in directions}
        self.breaks: Counter[str] = Counter(dict.fromkeys(directions, 0))

    def ended(self, transfer: TransferEnded) -> None:
        """Take note of one."""
        self.breaks[transfer.direction] += transfer.breaks
        if transfer.outcome == "delivered":
            self.seconds[transfer.direction].observe(transfer.flow_seconds)
            self.payload_bytes[transfer.direction].observe(transfer.payload_bytes)
