"""Closed-loop load over raw HTTP/1.1 connections: each sends its next request when the last answer is complete."""

import asyncio
import time


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


async def drive(port: int, body: bytes, requests: int, concurrency: int) -> list[float]:
    """Send `requests` requests over `concurrency` connections; return their latencies in seconds."""
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    remaining = requests
    finished = loop.create_future()
    request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    request += b"Content-Length: %d\r\n\r\n" % len(body) + body

    def done(connection: Connection, seconds: float) -> None:
        nonlocal remaining
        latencies.append(seconds)
        if remaining > 0:
            remaining -= 1
            connection.send()
        elif len(latencies) == requests:
            finished.set_result(None)

    connections = []
    for _ in range(concurrency):
        _, connection = await loop.create_connection(lambda: Connection(request, done), "127.0.0.1", port)
        connections.append(connection)
    remaining -= concurrency
    for connection in connections:
        connection.send()
    await asyncio.wait_for(finished, 300)
    for connection in connections:
        connection.transport.close()
    return latencies
