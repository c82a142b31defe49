"""Tells cache events to followers: GET /v1/kv-events at the data port, inside the same TLS as caches.

The answer is one endless stream of frames, which docs/extend/events.md describes. A follower's place is the number of
the batch that it wants next. Where the log does not have it, a snapshot replaces what is missing: at the beginning, and
later for a follower that was too slow. One that knows the numbers of another epoch begins anew.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import msgspec

from prfaas.errors import IdentityError, ProtocolError, RequestError, UnreachableError
from prfaas.util import Deadline
from prfaas.wire.kvevents import EVENTS_CONTENT_TYPE, EVENTS_PATH
from prfaas_transfer.events.log import EventLog, LoggedBatch, frame
from prfaas_transfer.net import DataStream, OnWait

GET: Final = b"GET "
"""How a request begins, where a transfer begins with the magic of a frame."""
ALIVE_SECONDS: Final = 5.0
STALL_SECONDS: Final = 30.0
"""A follower that takes nothing at all for this long is disconnected: it may apply another instance's events first."""
MAX_FOLLOWERS: Final = 64
MAX_REQUEST_BYTES: Final = 8 << 10
MAX_DIGITS: Final = 19
_END_OF_HEADERS: Final = b"\r\n\r\n"


class Wanted(NamedTuple):
    """The first number that a follower wants, of the log of this `epoch`; empty: of any."""

    seq: int = 0
    epoch: str = ""


class Followers:
    """Answers the followers of a log at one data port, MAX_FOLLOWERS at a time, so that transfers keep the other
    connections. Without a log the engine publishes no events through this mover."""

    def __init__(self, log: EventLog | None):
        self._log = log
        self._free = threading.BoundedSemaphore(MAX_FOLLOWERS)

    def answer(self, stream: DataStream, on_wait: OnWait, check: Callable[[], None]) -> None:
        """Answer a request that began with `GET` on a connection, until the follower leaves. Raises UnreachableError
        then, or if it takes nothing for too long; ProtocolError for what is no request. `check` raises IdentityError if
        the follower may not read events, or its certificate is no longer valid."""
        try:
            wanted = read_wanted(_read_target(stream, on_wait))
            check()
        except RequestError as error:
            stream.send([_head("400 Bad Request", "text/plain"), f"{error}\n".encode()])
            return
        except IdentityError as error:
            stream.send([_head("403 Forbidden", "text/plain"), f"{error}\n".encode()])
            raise
        if self._log is None:
            stream.send([_head("404 Not Found", "text/plain"), b"this engine publishes no cache events here\n"])
        elif not self._free.acquire(blocking=False):
            stream.send([_head("503 Service Unavailable", "text/plain"), b"too many follow this mover already\n"])
        else:
            try:
                _send_events(stream, self._log, wanted, check)
            finally:
                self._free.release()


def _send_events(stream: DataStream, log: EventLog, wanted: Wanted, check: Callable[[], None]) -> None:
    stream.send([_head("200 OK", EVENTS_CONTENT_TYPE)])
    checked = Deadline(ALIVE_SECONDS)
    for frames in follow(log, wanted, ALIVE_SECONDS):
        if checked.is_over:
            check()
            checked.renew(ALIVE_SECONDS)
        stream.send(frames, on_wait=_stalled)


def read_wanted(target: str) -> Wanted:
    """Read what a request asks for. Raises RequestError for another path, or a number that is none."""
    try:
        url = urlsplit(target)
    except ValueError as error:
        raise RequestError(f"the target of the request is no path: {error}") from error
    fields = dict(parse_qsl(url.query))
    number = fields.get("from", "0")
    if url.path != EVENTS_PATH:
        raise RequestError(f"the data port answers GET {EVENTS_PATH} alone")
    if not (number.isascii() and number.isdecimal()) or len(number) > MAX_DIGITS:
        raise RequestError(f"from is {number[:40]!r}; give the number of the first batch wanted", param="from")
    return Wanted(int(number), fields.get("epoch", ""))


def follow(log: EventLog, wanted: Wanted, alive_seconds: float) -> Iterator[list[bytes]]:
    """Yield frames for ever, those of one write together; wait for events in between."""
    yield [_message("hello", {"epoch": log.epoch, "first_seq": log.first_seq, "next_seq": log.next_seq})]
    seq = wanted.seq if wanted.epoch in ("", log.epoch) else 0
    while True:
        if not log.reaches(seq):
            found = log.snapshot()
            yield [_message("snapshot", {"seq": found.seq, "batches": found.batches, "is_whole": found.is_whole})]
            for topic, payload in found.payloads:
                yield [frame(LoggedBatch(topic, found.seq, payload))]
            seq = found.seq + 1
        batches = log.read(seq, alive_seconds)
        if not batches:
            yield [_message("alive", {})]
        elif batches[0].seq == seq:  # else the log moved on meanwhile
            yield list(map(frame, batches))
            seq += len(batches)


def _stalled(silent_seconds: float) -> None:
    if silent_seconds > STALL_SECONDS:
        raise UnreachableError(f"the follower took no byte for {silent_seconds:.1f} s: given up")


def _message(kind: str, content: dict[str, object]) -> bytes:
    return frame(LoggedBatch(f"prfaas.{kind}", 0, msgspec.msgpack.encode(content)))


def _read_target(stream: DataStream, on_wait: OnWait) -> str:
    """Read the rest of a request, byte by byte: nothing may follow it, but its end is known only when it came."""
    request, byte = bytearray(), bytearray(1)
    while not request.endswith(_END_OF_HEADERS):
        if len(request) == MAX_REQUEST_BYTES:
            raise ProtocolError(f"a request of more than {MAX_REQUEST_BYTES} bytes")
        stream.receive_into(byte, on_wait=on_wait)
        on_wait(0.0)  # bytes that keep coming are no reason to wait for ever
        request += byte
    return request.partition(b" ")[0].decode("latin-1")


def _head(status: str, content_type: str) -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\nconnection: close\r\n\r\n".encode()
