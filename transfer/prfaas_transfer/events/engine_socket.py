"""An engine's batches on their way to its mover: all that the engine still has, then each new one.

So the mover that follows one that died hears of the latest 32 MiB of batches again. Our worker passes its mover a
socket. vLLM's scheduler is another process than the one that starts movers: it opens a unix socket, to which its mover
connects. Threads carry the batches, so that an engine's step never waits for a mover.
"""

import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from prfaas.wire.engine import read_body
from prfaas_transfer.events.log import BatchLog, EventLog, LoggedBatch, frame

LOOK_SECONDS: Final = 1.0
"""Interval at which an end looks for the other."""

_decode = msgspec.msgpack.Decoder(LoggedBatch).decode


def tell(sock: socket.socket, log: BatchLog) -> None:
    """Say a log's batches from a thread, until the mover is gone."""
    threading.Thread(target=_tell, args=(sock, log), name="engine-events", daemon=True).start()


def tell_at(path: str, log: BatchLog) -> None:
    """Say a log's batches to each mover that connects to this path. Raises OSError."""
    Path(path).unlink(missing_ok=True)  # of an engine before this one
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # nobody else may read what is cached
    try:
        listener.bind(path)
    finally:
        os.umask(before)
    listener.listen()
    threading.Thread(target=_accept, args=(listener, log), name="engine-events", daemon=True).start()


def hear(sock: socket.socket, log: EventLog) -> None:
    """Note from a thread what the engine says."""
    threading.Thread(target=_hear, args=(sock, log), name="engine-events", daemon=True).start()


def hear_at(path: str, log: EventLog) -> None:
    """As `hear`, from the engine that opens this path."""
    threading.Thread(target=_connect, args=(path, log), name="engine-events", daemon=True).start()


def _accept(listener: socket.socket, log: BatchLog) -> None:
    while True:
        try:
            tell(listener.accept()[0], log)
        except (OSError, RuntimeError):  # no descriptor or no thread is free
            time.sleep(LOOK_SECONDS)


def _tell(sock: socket.socket, log: BatchLog) -> None:
    seq = 0
    with sock, suppress(OSError):
        while True:
            batches = log.read(seq, LOOK_SECONDS)
            sock.sendall(b"".join(map(frame, batches)))  # also of nothing: it fails when the mover is gone
            if batches:
                seq = batches[-1].seq + 1


def _connect(path: str, log: EventLog) -> None:
    while True:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(path)
            _hear(sock, log)
        time.sleep(LOOK_SECONDS)


def _hear(sock: socket.socket, log: EventLog) -> None:
    with sock, sock.makefile("rb") as reader:
        while body := read_body(reader):
            log.add(_decode(body))
