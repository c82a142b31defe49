"""A decode worker that answers at once: the least that speaks HTTP/1.1, so that what is measured is the gateway.

Usage: python backend.py PORT
"""

import asyncio
import sys

import uvloop

BODY = (
    b'{"id":"cmpl-1","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"ok"}}]}'
)


class Backend(asyncio.Protocol):
    """One connection: waits for a whole request, answers a constant with the headers of a worker."""

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
            length = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
            self.missing_bytes = end + 4 + length - len(self.buffer)
            self.answer = (
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nx-prfaas-prompt-tokens: %d\r\n"
                b"Content-Length: %d\r\n\r\n" % (length // 4, len(BODY))
            ) + BODY
            self.buffer.clear()
        if self.missing_bytes <= 0:
            self.missing_bytes = 0
            self.transport.write(self.answer)


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Backend, "127.0.0.1", port)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
