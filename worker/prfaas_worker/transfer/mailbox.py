"""A queue from the engine's thread to one connection's thread, whose reader also notices when its peer goes away."""

import os
import select
import socket
import threading
from collections import deque

from prfaas.errors import UnreachableError
from prfaas_worker.transfer.layout import Frame


class Finish:
    """The last entry of a mailbox: everything was put in; `prefill_seconds` is P's compute time."""

    def __init__(self, prefill_seconds: float):
        self.prefill_seconds = prefill_seconds


class Failed:
    """The last entry of a mailbox: the prefill will not end; `message` says why."""

    def __init__(self, message: str):
        self.message = message


Entry = Frame | Finish | Failed


class Mailbox:
    """Entries in order. `put` never blocks; frames only view memory, so a full mailbox costs none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: deque[Entry] = deque()
        self._queued_bytes = 0
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False

    @property
    def queued_bytes(self) -> int:
        """Payload bytes of the entries that wait."""
        return self._queued_bytes

    def put(self, entry: Entry) -> None:
        """Append an entry and wake the reader. After `close` it is dropped."""
        with self._lock:
            if self._closed:
                return
            self._entries.append(entry)
            self._queued_bytes += _payload_bytes(entry)
            os.eventfd_write(self._bell, 1)

    def take(self, sock: socket.socket, patience_seconds: float) -> Entry | None:
        """Return the next entry, or None after `patience_seconds` without one.

        Raises:
            UnreachableError: the peer of `sock` closed the connection, or sent something out of turn, meanwhile.

        """
        entry = self._pop()
        if entry is not None:
            return entry
        poller = select.poll()
        poller.register(self._bell, select.POLLIN)
        poller.register(sock, select.POLLIN | select.POLLRDHUP)
        for descriptor, _ in poller.poll(patience_seconds * 1000):
            if descriptor == sock.fileno():
                raise UnreachableError("the receiver closed the connection before everything was sent")
        return self._pop()

    def close(self) -> None:
        """Drop what waits, and with it the memory that it views. Only its reader's end may call this."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._entries.clear()
                self._queued_bytes = 0
                os.close(self._bell)

    def _pop(self) -> Entry | None:
        with self._lock:
            if not self._entries:
                return None
            entry = self._entries.popleft()
            self._queued_bytes -= _payload_bytes(entry)
            if not self._entries:
                os.eventfd_read(self._bell)
            return entry


def _payload_bytes(entry: Entry) -> int:
    return entry.header.payload_bytes if isinstance(entry, Frame) else 0
