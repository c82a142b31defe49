"""Sends inputs that may crash gateway and worker, and says what became of them.

The readers of inputs are a process of their own (`target`); the engine whose streams are inputs is here. A crash is an
internal error, a request without an answer, an answer that does not end, a traceback in the log, or the process's end.
"""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec
import uvloop
from aiohttp import web
from benchmarks.hardening.gaps import Gap
from benchmarks.hardening.inputs import REQUEST_ID, Input, inputs
from benchmarks.report import Figure, say
from tests.serving import serving

from prfaas.wire import headers

INPUTS: Final = 100_000
AT_ONCE: Final = 8
SAID_EVERY: Final = 10_000
PATIENCE_SECONDS: Final = 60.0
SLOW_SECONDS: Final = 0.04
REACH_GAP_MS: Final = 50.0
SHOWN: Final = 5


class Seen(msgspec.Struct):
    """What the readers' process says at its end."""

    tracebacks: int = 0
    kinds: list[str] = []
    gap: Gap = Gap()
    longest_step_seconds: float = 0.0
    """CPU time of an engine's step loop."""


class Outcome(NamedTuple):
    """Crashes by their input, what the process saw, and the inputs under way at its longest gap."""

    crashes: list[tuple[Input, str]]
    seen: Seen
    during_gap: list[Input]


def judge(kind: str, answer: bytes | None) -> str:
    """Return why an answer is a crash; empty if it is none. None: it did not end."""
    if answer is None:
        return "the answer does not end"
    if not answer:
        return "" if kind == "head" else "there is no answer"
    status = int(answer.split(b" ", 2)[1])
    return answer.decode(errors="replace")[:400] if status == 500 else ""


class Engine:
    """The engine whose streams are the fuzz: it says to each request what its input has."""

    def __init__(self) -> None:
        self.said: dict[str, bytes] = {}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        if request.path == "/detokenize":  # the gateway asks before a stream goes on
            return web.json_response({"prompt": "ab"})
        said = self.said.get(request.headers.get(headers.REQUEST_ID, ""))
        if said is None:  # the gateway polls what engines publish
            return web.Response(status=404)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        with suppress(ConnectionError):
            await response.prepare(request)
            for start in range(0, len(said), 1 + len(said) // 3):
                await response.write(said[start : start + 1 + len(said) // 3])
        return response


async def send(port: int, one: Input) -> bytes | None:
    """Send an input; return all that comes until the other end closes, None if it does not in time."""
    received = b""
    with suppress(ConnectionError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(one.raw)
            if one.kind == "head":
                writer.write_eof()  # its length may promise more
            async with asyncio.timeout(PATIENCE_SECONDS):
                while piece := await reader.read(1 << 16):
                    received += piece
        except TimeoutError:
            return None
        finally:
            writer.close()
    return received


Crashes = list[tuple[Input, str]]
UnderWay = list[tuple[float, float, Input]]


async def send_all(ports: dict[str, int], engine: Engine, given: Iterator[Input]) -> tuple[Crashes, UnderWay]:
    """Send all inputs, some at once; return the crashes with their reasons, and when the slow inputs were under way."""
    crashes: Crashes = []
    slow: UnderWay = []

    async def some() -> None:
        for one in given:
            name, began = f"{REQUEST_ID}{one.number}", time.monotonic()
            engine.said[name] = one.said
            answer = await send(ports[one.target], one)
            del engine.said[name]
            if time.monotonic() - began > SLOW_SECONDS:
                slow.append((began, time.monotonic(), one))
            if reason := judge(one.kind, answer):
                crashes.append((one, reason))
            if one.number % SAID_EVERY == 0:
                say(f"{one.number} inputs, {len(crashes)} crashes")

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))
    return crashes, slow


async def _fuzzed(count: int) -> Outcome:
    engine = Engine()
    with tempfile.TemporaryDirectory() as folder:
        async with serving(engine.handle) as url:
            command = [sys.executable, "-m", "benchmarks.hardening.target", folder, url]
            process = await asyncio.create_subprocess_exec(
                *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            try:
                ports = msgspec.json.decode(await process.stdout.readline(), type=dict[str, int])
                crashes, slow = await send_all(ports, engine, inputs(count))
                rest, _ = await process.communicate(b"")
            finally:
                with suppress(ProcessLookupError):  # it has ended
                    process.kill()
    code = process.returncode
    seen = Seen(1, [f"the process ended with {code}"]) if code else msgspec.json.decode(rest, type=Seen)
    return Outcome(crashes, seen, [one for began, ended, one in slow if began - SLOW_SECONDS <= seen.gap.at <= ended])


def fuzzed(count: int) -> Outcome:
    """Send so many inputs."""
    return uvloop.run(_fuzzed(count))


def crashed(count: int = INPUTS) -> Iterator[Figure]:
    """Crashes and the longest gap, with the inputs at fault in the log."""
    found = fuzzed(count)
    for one, reason in found.crashes[:SHOWN]:
        say(f"input {one.number} ({one.kind} to {one.target}): {reason}\n{one.raw[:300]!r} {one.said[:300]!r}")
    for one in found.seen.kinds[:SHOWN]:
        say(one)
    say(f"the longest gap: {found.seen.gap}; under way: {[(one.number, one.kind) for one in found.during_gap]}")
    crashes = len(found.crashes) + found.seen.tracebacks
    yield Figure(name=f"fuzz: crashes of {count:,} inputs", value=crashes, unit="", reach=0)
    yield Figure(
        name="fuzz: longest gap of the event loop", value=1000 * found.seen.gap.seconds, unit="ms", reach=REACH_GAP_MS
    )
    step_ms = 1000 * found.seen.longest_step_seconds
    yield Figure(name="fuzz: longest step of an engine's loop, computing", value=step_ms, unit="ms", reach=REACH_GAP_MS)
