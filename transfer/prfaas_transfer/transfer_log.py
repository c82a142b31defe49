"""Logs each transfer with one line at its end, and counts it with one event for the front's metrics and spans.

A transfer without trouble leaves one INFO line on each side. What else happens is DEBUG, but a connection that broke:
that is rare, and explains a slow transfer. Every line carries the ids of request and transfer.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from prfaas.errors import MismatchError, PrfaasError
from prfaas.telemetry.logs import line
from prfaas.wire.engine import Direction, TransferEnded, TransferOutcome, TransferSubject
from prfaas.wire.frames import Codec
from prfaas.wire.transfer import Done

log = logging.getLogger(__name__)

TransferMark = Literal["announced", "connected", "first_byte", "computed"]
_ENDS = {"send": "transfer sent", "receive": "transfer received"}


class TransferTotals(NamedTuple):
    """Sent or received so far: payload bytes, the time since the first of them, and the codecs of the frames; then the
    source's account of a whole one."""

    payload_bytes: int = 0
    flow_seconds: float = 0.0
    codecs: Iterable[int] = ()
    account: Done | None = None


class TransferLog:
    """Starts when a source announces or a destination asks. Any thread may call."""

    def __init__(self, direction: Direction, subject: TransferSubject, transfer_id: str):
        self.transfer_id = transfer_id
        self.breaks = 0
        self._direction: Direction = direction
        self._subject = subject
        self._began_at = time.time()
        self._began = time.monotonic()
        self._marks: dict[str, float] = {}

    def mark(self, name: TransferMark, **fields: int) -> None:
        self._marks.setdefault(name, time.monotonic() - self._began)
        log.debug(self._line(f"transfer {name}", **fields))

    def record_break(self, breaks: int, reason: str) -> None:
        """Record a break: the number of breaks so far, and the reason; the largest number counts."""
        if breaks > self.breaks:
            self.breaks = breaks
            log.info(self._line("transfer resumes", breaks=breaks, reason=reason))

    def end(self, outcome: TransferOutcome, reason: str, carried: TransferTotals) -> TransferEnded:
        """Record the outcome, and return the whole; `reason` is empty after a delivery."""
        seconds, (payload_bytes, flow_seconds, codecs, account) = time.monotonic() - self._began, carried
        if flow_seconds:
            self._marks.setdefault("first_byte", max(0.0, seconds - flow_seconds))
        used = {Codec(codec) for codec in codecs}
        names = tuple(sorted(codec.name.lower() for codec in used if codec or len(used) == 1))
        log.log(
            logging.WARNING if outcome in ("failed", "mismatched", "expired") else logging.INFO,
            self._line(
                _ENDS[self._direction],
                outcome=outcome,
                bytes=payload_bytes,
                seconds=seconds,
                flow_seconds=flow_seconds,
                mbps=payload_bytes * 8 / flow_seconds / 1e6 if flow_seconds else None,
                first_byte_seconds=account.first_byte_seconds if account else None,
                computed_seconds=account.computed_seconds if account else None,
                codecs=",".join(names),
                breaks=self.breaks,
                reason=reason,
            ),
        )
        return TransferEnded(
            subject=self._subject,
            direction=self._direction,
            outcome=outcome,
            transfer_id=self.transfer_id,
            began_at=self._began_at,
            marks=tuple(sorted(self._marks.items(), key=lambda mark: mark[1])),
            seconds=seconds,
            flow_seconds=flow_seconds,
            payload_bytes=payload_bytes,
            codecs=names,
            breaks=self.breaks,
            reason=reason,
        )

    def _line(self, words: str, **fields: str | float | None) -> str:
        return line(
            words,
            request_id=self._subject.request_id,
            transfer_id=self.transfer_id,
            trace_id=self._subject.trace.trace_id,
            peer=self._subject.peer,
            **fields,
        )


def outcome_of(error: PrfaasError) -> TransferOutcome:
    """Return the outcome of a transfer that failed so."""
    return "mismatched" if isinstance(error, MismatchError) else "failed"


class TransferCounters:
    """Ended transfers by direction and outcome, and bytes. `on_end` gets every ended transfer, from its thread."""

    def __init__(self, on_end: Callable[[TransferEnded], None] = lambda _transfer: None):
        self._on_end = on_end
        self._lock = threading.Lock()
        self._ended: Counter[tuple[Direction, TransferOutcome]] = Counter()
        self._sent_bytes = 0
        self._received_bytes = 0

    def count_end(self, transfer: TransferEnded) -> None:
        with self._lock:
            self._ended[transfer.direction, transfer.outcome] += 1
        self._on_end(transfer)

    def count_sent(self, count_bytes: int) -> None:
        with self._lock:
            self._sent_bytes += count_bytes

    def count_received(self, count_bytes: int) -> None:
        with self._lock:
            self._received_bytes += count_bytes

    def snapshot(self) -> tuple[list[tuple[str, str, int]], int, int]:
        """Return (direction, outcome, count) rows, bytes sent and bytes received."""
        with self._lock:
            rows = [(direction, outcome, count) for (direction, outcome), count in sorted(self._ended.items())]
            return rows, self._sent_bytes, self._received_bytes
