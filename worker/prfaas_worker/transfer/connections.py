"""Connections to givers, kept for the next transfer: their congestion window is open and their handshake is done.

A kept connection may have died unnoticed; whoever takes it finds out at once, and asks for a fresh one. All methods may
be called from any thread.
"""

import threading
import time
from typing import NamedTuple

from prfaas.errors import UnreachableError
from prfaas_worker.transfer import sockets
from prfaas_worker.transfer.door import CONNECT_SECONDS, Door
from prfaas_worker.transfer.streams import Stream

KEEP_SECONDS = 20.0
"""Less than a giver waits for the next HELLO."""
KEEP_AT_MOST = 8
"""Idle connections to one giver."""


class Giver(NamedTuple):
    """A data port, and the cluster that must answer there; empty when that is not known."""

    host: str
    port: int
    cluster: str = ""


class _Idle(NamedTuple):
    stream: Stream
    until: float


class Connections:
    """Opens and keeps connections."""

    def __init__(self, door: Door):
        self._door = door
        self._lock = threading.Lock()
        self._idle: dict[Giver, list[_Idle]] = {}
        self._used: dict[Giver, set[Stream]] = {}

    def take(self, giver: Giver) -> Stream | None:
        """Return a kept connection, if there is one."""
        with self._lock:
            self._sweep()
            kept = self._idle.get(giver)
            if not kept:
                return None
            stream = kept.pop().stream
            self._used.setdefault(giver, set()).add(stream)
        if self._door.is_reusable(stream):
            return stream
        self.drop(giver, stream)
        return None

    def open(self, giver: Giver) -> Stream:
        """Return a fresh connection.

        Raises:
            PeerError: nobody, or somebody else, answers there.

        """
        try:
            sock = sockets.connect(giver.host, giver.port, CONNECT_SECONDS)
        except OSError as error:
            raise UnreachableError(f"cannot connect to {giver.host}:{giver.port}: {error}") from error
        try:
            stream = self._door.connect(sock, giver.cluster)
        except BaseException:
            sock.close()
            raise
        with self._lock:
            self._used.setdefault(giver, set()).add(stream)
        return stream

    def keep(self, giver: Giver, stream: Stream) -> None:
        """Keep a connection whose transfer ended well."""
        with self._lock:
            self._forget(giver, stream)
            self._sweep()
            kept = self._idle.setdefault(giver, [])
            if len(kept) < KEEP_AT_MOST:
                kept.append(_Idle(stream, time.monotonic() + KEEP_SECONDS))
                return
        stream.close()

    def drop(self, giver: Giver, stream: Stream) -> None:
        """Close a connection."""
        with self._lock:
            self._forget(giver, stream)
        stream.close()

    def silent_seconds(self, giver: Giver) -> float:
        """How long none of the connections to a giver brought a byte."""
        with self._lock:
            heard = [stream.heard_at for stream in self._used.get(giver, ())]
        return time.monotonic() - max(heard) if heard else float("inf")

    def _forget(self, giver: Giver, stream: Stream) -> None:
        used = self._used.get(giver, set())
        used.discard(stream)
        if not used:
            self._used.pop(giver, None)

    def _sweep(self) -> None:
        """Close what was kept for too long; under the lock."""
        now = time.monotonic()
        for giver, kept in list(self._idle.items()):
            for idle in [one for one in kept if one.until < now]:
                kept.remove(idle)
                idle.stream.close()
            if not kept:
                del self._idle[giver]
