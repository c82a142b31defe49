"""Load over raw HTTP/1.1 connections: closed loops, an open one at a given rate, and streams whose events tell when
they were sent.
"""

import asyncio
import re
import time

SENT = re.compile(rb'"sent":(\d+)')


def request_of(body: bytes, key: str = "") -> bytes:
    """Return the bytes of one request, with an API key if there is one."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {key}\r\n".encode() if key else b""
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


class Connection(asyncio.Protocol):
    """One client. `done` is called after every complete answer with its latency in seconds."""

    def __init__(self, request: bytes, done):
        self.request = request
        self.done = done
        self.buffer = bytearray()

    def connection_made(self, transport):
        self.transport = transport

    def send(self):
        self.sent = time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data):
        self.buffer += data
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self.buffer[:end]).lower()
        length = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        if len(self.buffer) < end + 4 + length:
            return
        if not head.startswith(b"http/1.1 200"):
            raise SystemExit(f"unexpected answer: {bytes(self.buffer)!r}")
        self.buffer.clear()
        self.done(self, time.perf_counter() - self.sent)

    def connection_lost(self, exc):
        if exc is not None:
            raise SystemExit(f"the connection broke: {exc}")


async def connect(port: int, protocol) -> asyncio.Protocol:
    """Return a connected protocol."""
    return (await asyncio.get_running_loop().create_connection(protocol, "127.0.0.1", port))[1]


async def drive(port: int, body: bytes, requests: int, concurrency: int, key: str = "") -> list[float]:
    """Send requests over some connections, each when its last answer is complete; return their latencies."""
    latencies: list[float] = []
    remaining = requests
    finished = asyncio.get_running_loop().create_future()

    def done(connection: Connection, seconds: float) -> None:
        nonlocal remaining
        latencies.append(seconds)
        if remaining > 0:
            remaining -= 1
            connection.send()
        elif len(latencies) == requests:
            finished.set_result(None)

    connections = [await connect(port, lambda: Connection(request_of(body, key), done)) for _ in range(concurrency)]
    remaining -= concurrency
    for connection in connections:
        connection.send()
    await asyncio.wait_for(finished, 60 + requests / 200)  # half of what was seen served in a second at worst
    for connection in connections:
        connection.transport.close()
    return latencies


async def pace(port: int, body: bytes, per_second: float, requests: int) -> list[float]:
    """Send requests at a steady rate, whatever answers take, and return their latencies from when they were due."""
    latencies: list[float] = []
    idle: list[Connection] = []
    due: dict[Connection, float] = {}

    def done(connection: Connection, _seconds: float) -> None:
        latencies.append(time.perf_counter() - due[connection])
        idle.append(connection)

    began = time.perf_counter()
    for number in range(requests):
        at = began + number / per_second
        await asyncio.sleep(at - time.perf_counter())
        connection = idle.pop() if idle else await connect(port, lambda: Connection(request_of(body), done))
        due[connection] = at
        connection.send()
    while len(latencies) < requests:  # noqa: ASYNC110  # a benchmark's end, not a product's wait
        await asyncio.sleep(0.01)
    for connection in idle:
        connection.transport.close()
    return latencies


class Stream(asyncio.Protocol):
    """One client of a stream; gathers how long each event was on its way, and when it came."""

    def __init__(self, request: bytes):
        self.request = request
        self.delays: list[float] = []
        self.came_ns: list[int] = []
        self.over = asyncio.get_running_loop().create_future()

    def connection_made(self, transport):
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data):
        now = time.monotonic_ns()
        delays = [(now - int(sent)) / 1e9 for sent in SENT.findall(data)]
        self.delays += delays
        self.came_ns += [now] * len(delays)
        if b"[DONE]" in data and not self.over.done():
            self.over.set_result(None)

    def connection_lost(self, _exc):
        if not self.over.done():
            self.over.set_exception(SystemExit("a stream broke off"))


async def stream(port: int, body: bytes, streams: int) -> tuple[list[float], float]:
    """Open streams at once; return the seconds that each of their events was on its way, and events per second.

    The rate is that of the middle four fifths, while all streams flow.
    """
    opened = [await connect(port, lambda: Stream(request_of(body))) for _ in range(streams)]
    await asyncio.wait_for(asyncio.gather(*(one.over for one in opened)), 120)
    for one in opened:
        one.transport.close()
    came_ns = sorted(at for one in opened for at in one.came_ns)
    first, last = len(came_ns) // 10, len(came_ns) * 9 // 10
    rate = (last - first) / (came_ns[last] - came_ns[first]) * 1e9
    return [delay for one in opened for delay in one.delays], rate
