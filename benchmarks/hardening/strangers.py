"""Strangers who want a gateway's connections and memory: python -m benchmarks.hardening.strangers PORT

Half-sent heads, bodies of a few KiB of gzip that unpack to 16 MiB, and plain ones of 16 MiB. Nobody sends the last
bytes, so that what was sent is held for as long as it may be. Who is turned away comes again after some seconds: all
together then send about 1 Gbit/s. Each comes at times of its own: a thousand that come at one moment would measure how
fast one core opens a thousand connections, which is the machine's to say. They come from several addresses, none of
which is that of the good clients: one address has half of a gateway's room, and would leave the other half free. They
go on until this process is ended.
"""

import asyncio
import gzip
import json
import random
import sys
from contextlib import suppress
from itertools import cycle

import uvloop

HALF_HEADS, BOMBS, BODIES = 1000, 60, 40
BODY_BYTES = (16 << 20) - 100
ADDRESSES = tuple(f"127.0.0.{number}" for number in range(2, 10))
START_SECONDS, PAUSE_SECONDS = 3.0, 5.0
"""All have come after the first; the second is the mean of the pauses."""
HELD_BACK_BYTES = 9
HALF_A_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nX-a: "


def held_back(*, packed: bool) -> bytes:
    """Return a request without its last bytes."""
    body = json.dumps({"model": "m", "prompt": ""}).encode()
    body = body[:-2] + b"x" * (BODY_BYTES - len(body)) + body[-2:]
    sent, encoding = (gzip.compress(body), "Content-Encoding: gzip\r\n") if packed else (body, "")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: g\r\n{encoding}Content-Length: {len(sent)}\r\n\r\n"
    return (head.encode() + sent)[:-HELD_BACK_BYTES]


async def insist(port: int, address: str, sent: bytes) -> None:
    """Send some bytes from an address and wait for what comes, again and again."""
    await asyncio.sleep(random.uniform(0, START_SECONDS))
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
            writer.write(sent)  # not drained: the answer may come before all is read
            with suppress(OSError):
                await reader.read(1)
            writer.close()
        await asyncio.sleep(random.uniform(0, 2 * PAUSE_SECONDS))


async def flood(port: int) -> None:
    bomb, body = held_back(packed=True), held_back(packed=False)
    given = zip(cycle(ADDRESSES), [HALF_A_HEAD] * HALF_HEADS + [bomb] * BOMBS + [body] * BODIES, strict=False)
    await asyncio.gather(*(insist(port, address, sent) for address, sent in given))


if __name__ == "__main__":
    uvloop.run(flood(int(sys.argv[1])))
