"""A worker that answers at once: the least that speaks HTTP/1.1, so that what is measured is the gateway.

Usage: python backend.py [TLS_DIR]

It listens on two ports, for routers that tell workers apart by address, and prints them. With a directory of
credentials it wants a certificate of whoever calls.

It answers a constant with the headers of a worker and with where a cache would lie, as vLLM does, so that either leg of
a two-leg protocol is served. A body with "stream":true gets 1000 events, one every 9.5 ms, each with the time at which
it was sent, and with its token's id if the body asks for it. One task sends them all, a millisecond's worth at a time:
as many timers as streams would cost the core that the gateway needs.
"""

import asyncio
import heapq
import ssl
import sys
import time
from pathlib import Path

import uvloop

BODY = (
    b'{"id":"cmpl-1","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"ok"}}],'
    b'"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3]],'
    b'"remote_engine_id":"e","remote_host":"127.0.0.1","remote_port":5600}}'
)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    b"x-prfaas-prompt-tokens: 100\r\n"
)
EVENT = b'data: {"sent":%d,"choices":[{"index":0,"delta":{"content":" word"},"token_ids":%b}]}\n\n'
STREAM_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
EVENTS, EVERY_SECONDS = 1000, 0.0095


class Streams:
    """All streams, each on its own beat."""

    def __init__(self):
        self.due = []  # (seconds, number, events left, transport, token ids)
        self.number = 0
        self.task = None

    def add(self, transport, *, with_ids):
        transport.write(STREAM_HEAD + b"\r\n")
        self.number += 1
        now = asyncio.get_running_loop().time()
        heapq.heappush(self.due, (now, self.number, EVENTS, transport, b"[26791]" if with_ids else b"null"))
        if self.task is None or self.task.done():
            self.task = asyncio.ensure_future(self.send())

    async def send(self):
        """Send what is due, until nothing is left."""
        loop = asyncio.get_running_loop()
        while self.due:
            while self.due and self.due[0][0] <= loop.time():
                at, number, left, transport, token_ids = self.due[0]
                event = EVENT % (time.monotonic_ns(), token_ids)
                transport.write(b"%x\r\n%b\r\n" % (len(event), event))
                if left > 1 and not transport.is_closing():
                    heapq.heapreplace(self.due, (at + EVERY_SECONDS, number, left - 1, transport, token_ids))
                else:
                    heapq.heappop(self.due)
                    transport.write(STREAM_END)
            await asyncio.sleep(0.001)


streams = Streams()


class Backend(asyncio.Protocol):
    """One connection: waits for a whole request and answers it."""

    def connection_made(self, transport):
        self.transport = transport
        self.buffer = bytearray()
        self.missing_bytes = 0

    def data_received(self, data):
        if self.missing_bytes:
            self.missing_bytes -= len(data)
        else:
            self.buffer += data
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self.buffer[:end]).lower()
            _, found, rest = head.partition(b"content-length:")
            length = int(rest.split(b"\r\n", 1)[0]) if found else 0
            self.missing_bytes = end + 4 + length - len(self.buffer)
            self.answer = (
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nx-prfaas-prompt-tokens: %d\r\n"
                b"Content-Length: %d\r\n\r\n" % (length // 4, len(BODY))
            ) + BODY
            body = (self.buffer[end : end + 400] + self.buffer[-400:]).replace(b" ", b"")
            self.streams, self.with_ids = b'"stream":true' in body, b'"return_token_ids":true' in body
            self.buffer.clear()
        if self.missing_bytes <= 0:
            self.missing_bytes = 0
            if self.streams:
                streams.add(self.transport, with_ids=self.with_ids)
            else:
                self.transport.write(self.answer)


def mutual_tls(directory: Path) -> ssl.SSLContext:
    """Return a context that verifies chains, and no more."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    context.load_verify_locations(directory / "ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


async def main() -> None:
    loop = asyncio.get_running_loop()
    tls = mutual_tls(Path(sys.argv[1])) if len(sys.argv) > 1 else None
    servers = [await loop.create_server(Backend, "127.0.0.1", 0, ssl=tls) for _ in range(2)]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    uvloop.run(main())
