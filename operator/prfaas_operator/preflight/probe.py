"""Measures the path between two clusters: a server in the member, where caches come from, and a client in the hub.

    probe.py serve  TOKEN ADDRESS PORT... SECONDS
    probe.py client TOKEN ADDRESS PORT... API_HOST:PORT [PROMETHEUS_URL]

`prfaas preflight` hands this text to the Python of any image. So an image of another version measures the same. It uses
the standard library only, needs no rights and writes no file. The client prints one JSON document. The server answers
only who knows TOKEN: where the pods' addresses of both clusters overlap, another program may listen at the member's
address, and must not be taken for ours.

Packets are measured with TCP, since a firewall that opens the data port may drop all else. A connection that was opened
with TCP_MAXSEG sends and asks for segments of that size at most, and Linux forbids routers to divide them. A path that
reports its limit makes the kernel send smaller packets, and nothing is lost. One that swallows large packets without a
word stalls transfers, and not the short requests with which people test. There, what arrives by such connections shows
the largest packet that crosses.
"""

import json
import re
import socket
import struct
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

CONNECT_SECONDS = 4.0
START_SECONDS = 15.0  # The server listens a moment after its pod is called running.
SILENT_SECONDS = 2.0  # What has not arrived then is lost: the kernel has sent it again more than once.
FAR_SECONDS = 0.002  # From this round trip on, transfers use BBR.
PIECE_BYTES = 16 << 10  # More than the largest packet; sixteen at once take a second of 2 Mbit/s.
SMALLEST_BYTES = 576  # Of packets: IPv4 promises no more.
TRIED_AT_ONCE = 16
PINGS = 10
WARM_UP_SECONDS, COUNT_SECONDS = 1.0, 2.0
CHUNK = memoryview(bytes(1 << 18))
RTT_AT, MSS_AT, OPTIONS_AT, TIMESTAMPS = 68, 16, 5, 1  # In the kernel's struct tcp_info.
SCRAPE = re.compile(r"^global:\n(?: .*\n)*? +scrape_interval: (\S+)$", re.MULTILINE)


def serve(token: str, address: str, ports: list[int], seconds: float) -> None:
    """Answer on all ports until time is up."""
    # All before one answers: a client takes a refusal after that as final.
    listeners = [socket.create_server((address, port), family=family_of(address), backlog=64) for port in ports]
    for listener in listeners:
        threading.Thread(target=accept, args=(listener, token), daemon=True).start()
    time.sleep(seconds)


def accept(listener: socket.socket, token: str) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=answer, args=(connection, token), daemon=True).start()


def answer(connection: socket.socket, token: str) -> None:
    """Do what the first line of a connection asks for, until the client ends it."""
    with connection, suppress(OSError, ValueError):
        connection.settimeout(CONNECT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        said, verb = read_line(connection).split()
        if said != token:
            return
        connection.sendall(f"{token}\n".encode())
        if verb == "who":
            connection.sendall(f"{connection.getpeername()[0]}\n".encode())
        elif verb == "echo":
            while byte := connection.recv(1):
                connection.sendall(byte)
        elif verb == "packets":
            connection.sendall(f"{packet_bytes(connection)}\n".encode())
            connection.sendall(CHUNK[:PIECE_BYTES])
            read_exactly(connection, PIECE_BYTES)
            # A path that reports its limit has changed it meanwhile.
            connection.sendall(f"{packet_bytes(connection)}\n".encode())
        elif verb == "stream":
            rtt_seconds = field_of(connection, RTT_AT) / 1e6
            with suppress(OSError):  # as transfers do, if the kernel has it
                name = b"bbr" if rtt_seconds >= FAR_SECONDS else b"cubic"
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            while True:
                connection.sendall(CHUNK)


class Path:
    """The client's end of the path to the server."""

    def __init__(self, token: str, address: str):
        self._token = token
        self._address = address
        self._limit_bytes = 0
        """Of packets; 0 while none is known."""
        self._answered = threading.Event()

    def open(self, port: int, verb: str, limit_bytes: int = 0) -> socket.socket:
        """Return a connection on which the server does what `verb` says; OSError, or ValueError for a stranger."""
        connection = socket.socket(family_of(self._address), socket.SOCK_STREAM)
        try:
            connection.settimeout(CONNECT_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if limit := limit_bytes or self._limit_bytes:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, limit - header_bytes(connection))
            connection.connect((self._address, port))
            connection.settimeout(SILENT_SECONDS)
            connection.sendall(f"{self._token} {verb}\n".encode())
            if read_line(connection) != self._token:
                raise ValueError("another program answers")  # noqa: TRY301
        except BaseException:
            connection.close()
            raise
        return connection

    def state(self, port: int) -> str:
        """Return whether a port is open, what else answers there, or how a connection fails."""
        until = time.monotonic() + START_SECONDS
        while True:
            is_last = self._answered.is_set() or time.monotonic() > until
            try:
                self.open(port, "echo").close()
            except ValueError:
                return "stranger"
            except OSError as error:
                if is_last or not isinstance(error, ConnectionRefusedError):
                    return failure_of(error)
                time.sleep(0.2)
            else:
                self._answered.set()
                return "open"

    def own_address(self, port: int) -> str:
        """Return the address that connections from here have in the member."""
        with self.open(port, "who") as connection:
            return read_line(connection)

    def packets(self, port: int) -> dict[str, Any]:
        """Measure the largest packet that crosses both ways; where larger ones vanish, send none from then on."""
        sent_bytes, lost = self.crossing(port, 0)
        largest = sent_bytes
        if lost:
            largest = largest_crossing(lambda size: not self.crossing(port, size)[1], sent_bytes)
            self._limit_bytes = largest
        return {"packet_bytes": largest, "sent_bytes": sent_bytes, "lost": lost}

    def crossing(self, port: int, limit_bytes: int) -> tuple[int, str]:
        """Return the size of the packets that were sent, and the direction in which they vanish, empty for neither."""
        size, lost = SMALLEST_BYTES, "member to hub"
        with suppress(OSError, ValueError), self.open(port, "packets", limit_bytes) as connection:
            size = int(read_line(connection))
            read_exactly(connection, PIECE_BYTES)
            size, lost = packet_bytes(connection), "hub to member"
            connection.sendall(CHUNK[:PIECE_BYTES])
            size, lost = int(read_line(connection)), ""
        return size, lost

    def round_trip_seconds(self, port: int) -> float:
        """Return the shortest of some round trips of one byte."""
        taken: list[float] = []
        with self.open(port, "echo") as connection:
            for _ in range(PINGS):
                started = time.perf_counter()
                connection.sendall(b".")
                read_exactly(connection, 1)
                taken.append(time.perf_counter() - started)
        return min(taken)

    def mbps(self, port: int, connections: int) -> float:
        """Return what arrives over so many connections together, in Mbit/s without headers."""
        received = [0] * connections
        over = threading.Event()

        def receive(place: int) -> None:
            buffer = bytearray(1 << 20)
            with suppress(OSError, ValueError), self.open(port, "stream") as connection:
                while not over.is_set() and (size := connection.recv_into(buffer)):
                    received[place] += size

        threads = [threading.Thread(target=receive, args=(place,), daemon=True) for place in range(connections)]
        for thread in threads:
            thread.start()
        time.sleep(WARM_UP_SECONDS)
        before, started = sum(received), time.monotonic()
        time.sleep(COUNT_SECONDS)
        rate = 8e-6 * (sum(received) - before) / (time.monotonic() - started)
        over.set()
        for thread in threads:
            thread.join(SILENT_SECONDS)
        return rate


def largest_crossing(crosses: Callable[[int], bool], lost_bytes: int) -> int:
    """Return the largest packet below `lost_bytes` that crosses, 0 if none does. Each trial may wait, so many run."""
    low, high = SMALLEST_BYTES - 1, lost_bytes
    while high - low > 1:
        sizes = range(low + 1, high, -(-(high - low - 1) // TRIED_AT_ONCE))
        with ThreadPoolExecutor(TRIED_AT_ONCE) as pool:
            crossed = {size for size, good in zip(sizes, pool.map(crosses, sizes), strict=True) if good}
        low = max(crossed, default=low)
        high = min((size for size in sizes if size > low), default=high)
    return low if low >= SMALLEST_BYTES else 0


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def header_bytes(connection: socket.socket) -> int:
    """Return the size of the headers of IP and TCP, without options."""
    return 60 if connection.family == socket.AF_INET6 else 40


def field_of(connection: socket.socket, offset: int) -> int:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return struct.unpack_from("=I", info, offset)[0]


def packet_bytes(connection: socket.socket) -> int:
    """Return the size of the full packets that a connection sends now."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return field_of(connection, MSS_AT) + header_bytes(connection) + (12 if info[OPTIONS_AT] & TIMESTAMPS else 0)


def read_exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("the peer ended the connection")
        data += piece
    return bytes(data)


def read_line(connection: socket.socket) -> str:
    """Return a line of ours without its end; ValueError for another. Nothing behind it is taken."""
    line = b""
    while not line.endswith(b"\n"):
        if len(line) > 100:
            raise ValueError("a line that is not ours")
        line += read_exactly(connection, 1)
    return line.decode().strip()


def failure_of(error: OSError) -> str:
    """Return in few words how a connection failed."""
    if isinstance(error, TimeoutError):
        return "silent"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, socket.gaierror):
        return "unknown name"
    return (error.strerror or str(error) or type(error).__name__).lower()


def api_state(target: str) -> str:
    """Return whether the port of an API server is open, or how a connection fails."""
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        return failure_of(error)
    return "open"


def scrape_interval(url: str) -> dict[str, str]:
    """Return the interval that a Prometheus scrapes with by default, or why it is not known."""
    try:
        address = f"{url.rstrip('/')}/api/v1/status/config"
        with urllib.request.urlopen(address, timeout=CONNECT_SECONDS) as answered:  # noqa: S310  # the person's own URL
            text = json.load(answered)["data"]["yaml"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = getattr(error, "reason", error)
        return {"failure": failure_of(reason) if isinstance(reason, OSError) else f"{type(error).__name__}: {reason}"}
    found = SCRAPE.search(text)
    return {"interval": found[1] if found else "1m"}  # Prometheus's own default


def measure(path: Path, ports: list[int], api: str, prometheus: Iterable[str]) -> dict[str, Any]:
    """Return all that the client sees; what needs an open port is left out where none is."""
    with ThreadPoolExecutor(len(ports)) as pool:
        states = dict(zip(ports, pool.map(path.state, ports), strict=True))
    seen: dict[str, Any] = {"ports": {str(port): state for port, state in states.items()}, "api": api_state(api)}
    for url in prometheus:
        seen["prometheus"] = scrape_interval(url)
    if usable := [port for port in ports if states[port] == "open"]:
        seen.update(path.packets(usable[0]))
        with suppress(OSError, ValueError):
            seen["hub_address"] = path.own_address(usable[0])
            seen["round_trip_seconds"] = path.round_trip_seconds(usable[0])
        seen["mbps"] = {str(count): path.mbps(usable[0], count) for count in (1, 4)}
    return seen


def main() -> None:
    """Serve, or measure and print what was seen."""
    role, token, address, *rest = sys.argv[1:]
    ports = [int(word) for word in rest if word.isdigit()]
    if role == "serve":
        serve(token, address, ports[:-1], ports[-1])
        return
    api, *prometheus = [word for word in rest if not word.isdigit()]
    print(json.dumps(measure(Path(token, address), ports, api, prometheus)), flush=True)


if __name__ == "__main__":
    main()
