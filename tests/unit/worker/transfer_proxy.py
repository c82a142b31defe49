"""A proxy between a destination and a source's data port, which sees frames and does with them what a test says."""

import random
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from prfaas.errors import PrfaasError
from prfaas.wire.frames import DATA_KINDS, HEADER_BYTES, FrameHeader, Kind, parse_header, seal

JOIN_SECONDS = 60.0


class Seen(NamedTuple):
    """A frame on its way, and where: `connection` and `frame` count from 0, both in order of appearance."""

    connection: int
    frame: int
    header: FrameHeader
    raw: bytes


HEADER_FIELDS = {
    "magic": 0, "kind": 4, "codec": 5, "group": 6, "layer": 8, "flags": 10, "sequence": 12, "transfer id": 16,
    "epoch": 32, "start token": 40, "tokens": 44, "payload bytes": 48, "check": 52, "digest": 56,
}  # fmt: skip


class CutError(Exception):
    """Ends the connection after these bytes."""

    def __init__(self, last: bytes = b""):
        self.last = last


Change = Callable[[Seen], Sequence[bytes]]


def as_it_is(seen: Seen) -> Sequence[bytes]:
    return [seen.raw]


def at_frame(number: int, then: Callable[[Seen], Sequence[bytes]], kinds: frozenset[Kind] = DATA_KINDS) -> Change:
    """Do something once, at this frame of these kinds."""
    seen: list[Seen] = []

    def change(frame: Seen) -> Sequence[bytes]:
        if frame.header.kind in kinds:
            seen.append(frame)
        return then(frame) if frame.header.kind in kinds and len(seen) == number else [frame.raw]

    return change


def cut(_frame: Seen) -> Sequence[bytes]:
    raise CutError


class Proxy:
    """Relays connections; `down` sees what the source sends, `up` what the destination sends; each returns what passes.

    A frame may be passed on later too: what returns nothing keeps it. Ends are passed on like frames. CutError ends
    both directions, so that everything passed on before still arrives.
    """

    def __init__(self, source: tuple[str, int], down: Change = as_it_is, up: Change = as_it_is, port: int = 0):
        self._source = source
        self._down = down
        self._up = up
        self._listener = socket.create_server(("127.0.0.1", port))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self.connections = 0
        self._start(self._accept)

    def close(self) -> None:
        """End everything; the threads too."""
        with self._lock:
            self._closed = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)
            assert not thread.is_alive()
        self._listener.close()

    def cut(self) -> None:
        """End all connections now, with whatever is on its way."""
        with self._lock:
            for sock in self._sockets:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, run: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=run, args=args, name="proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                destination, _ = self._listener.accept()
            except ConnectionAbortedError:  # it left before its turn came
                continue
            except OSError:
                return
            number = self.connections
            try:
                source = socket.create_connection(self._source, 3)
            except OSError:
                destination.close()
                self.connections += 1
                continue
            source.settimeout(None)  # a source that is slow to answer is not lost
            with self._lock:
                closed = self._closed
                if not closed:
                    self._sockets |= {destination, source}
                    self.connections += 1  # a test that sees it counted can cut it
            if closed:  # nothing would cut it later
                destination.close()
                source.close()
                return
            self._start(self._relay, number, destination, source)

    def _relay(self, number: int, destination: socket.socket, source: socket.socket) -> None:
        up = threading.Thread(
            target=self._pump, args=(number, destination, source, self._up), name="proxy", daemon=True
        )
        up.start()
        self._pump(number, source, destination, self._down)
        up.join()
        with self._lock:
            self._sockets -= {destination, source}
        destination.close()
        source.close()

    def _pump(self, number: int, source: socket.socket, sink: socket.socket, change: Change) -> None:
        index = 0
        try:
            while True:
                raw = _read(source, HEADER_BYTES)
                header = parse_header(raw)
                seen = Seen(number, index, header, raw + _read(source, header.payload_bytes))
                for frame in change(seen):
                    sink.sendall(frame)
                index += 1
        except CutError as cut:
            with suppress(OSError):
                sink.sendall(cut.last)
            with suppress(OSError):
                source.shutdown(socket.SHUT_RDWR)
        except (OSError, PrfaasError):  # the end, or a frame that its source gave up in the middle
            pass
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
        with suppress(OSError):  # what it still sends is dropped: unread, it would make the close a reset
            while source.recv(1 << 16):
                pass


def flipped(raw: bytes, at: int, bit: int = 0) -> bytes:
    """The same bytes but one bit."""
    return raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :]


def flip_once(kind: Kind, at: int) -> Change:
    """Flip a bit of the first frame of a kind, in this byte."""
    left = [kind]

    def change(seen: Seen) -> Sequence[bytes]:
        if seen.header.kind in left:
            left.clear()
            return [flipped(seen.raw, at)]
        return [seen.raw]

    return change


def flip_at_random(seed: int, times: int, chance: float, spared: Sequence[Kind] = ()) -> Change:
    """Flip so many bits in frames taken by chance, but in none of the kinds that are spared."""
    rng, left = random.Random(seed), [times]

    def change(seen: Seen) -> Sequence[bytes]:
        if left[0] > 0 and seen.header.kind not in spared and rng.random() < chance:
            left[0] -= 1
            return [flipped(seen.raw, rng.randrange(len(seen.raw)), rng.randrange(8))]
        return [seen.raw]

    return change


def resealed(seen: Seen, **changes: Any) -> bytes:
    """A frame with other fields, honestly sealed."""
    payload = seen.raw[HEADER_BYTES:]
    return seal(seen.header._replace(**changes), [payload]).header + payload


def forged(rng: random.Random, seen: Seen) -> bytes:
    """What only a peer that knows the protocol can send: another value, honestly sealed."""
    name = rng.choice(["group", "layer", "start_token", "tokens", "sequence", "codec", "flags", "kind", "address"])
    if name == "kind":
        value: object = rng.choice(tuple(Kind))
    elif name == "address":
        value = seen.header.address._replace(epoch=rng.randrange(1 << 40))
    else:
        value = rng.randrange(1 << rng.randint(1, 8 if name in ("codec", "flags") else 16))
    return resealed(seen, **{name: value})


def _read(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise OSError("the end")
        data += piece
    return bytes(data)
