"""A gateway with an SLO before one small engine, with two and five times the requests that the engine carries.

The engine is an emulated worker: its front, queue and refusals are the real ones, only its steps are waits. So what is
measured is whether requests beyond what it carries cost those that it could serve.

The peak is that of a few clients, each with one request at a time, who keep the engine busy. Answers count in the
seconds in which they come, for the peak as under overload: what is still under way at the end is no more than a queue.
Where the engine says that the machine was too slow for it, there are no other figures.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec
import uvloop
from benchmarks.emulated import as_measured, says_too_slow
from benchmarks.gateway.routers import serving
from benchmarks.hardening.load import Reply, beats, hammer, pace
from benchmarks.report import Figure, say
from tests.tables import make_instance, make_table
from tests.unit.worker.conftest import launched

from prfaas.cli.measured_server import HttpServer
from prfaas.wire.profile import Profile

TIMES: Final = (2, 5)
PROMPT_CHARACTERS: Final = 1000
"""And tokens: the model's are bytes."""
PROFILE: Final = Profile(state_bytes=1 << 20, token_bytes=1024, fixed_seconds=0.06, token_seconds=6e-5, samples=3)
STEP_SECONDS, BATCH = 0.015, 8
"""For an engine of three times this speed two cores are too slow, by its own rule."""
FLAGS: Final = ("--max-running", str(BATCH), "--max-context", "4096", "--cache-mib", "64")
SLO_SECONDS: Final = 3.0
GOOD_SECONDS: Final = 6.0
"""An answer is good within the SLO of its first token and as long again."""
PEAK_SECONDS, OVERLOAD_SECONDS, CALM_SECONDS = 24.0, 20.0, 24.0
AT_ONCE: Final = 12
CALM_SHARE: Final = 0.5
REACH_GOODPUT: Final = 0.9
REACH_RECOVERY_SECONDS: Final = 10.0


def body(_due_seconds: float) -> bytes:
    """Return a prompt that is cached nowhere."""
    messages = [{"role": "user", "content": f"{time.monotonic_ns()} {'x' * PROMPT_CHARACTERS}"}]
    return msgspec.json.encode({"model": "tiny", "messages": messages, "max_tokens": 4, "stream": True})


def is_good(reply: Reply) -> bool:
    return reply.status == 200 and reply.seconds <= GOOD_SECONDS


def is_refused_well(reply: Reply) -> bool:
    """Whether a client is told that it is too much, and when to come again."""
    return reply.status == 429 and reply.retry_after.isdigit()


def goodput(replies: list[Reply], seconds: float) -> float:
    """Return the good answers a second of those that came within the first `seconds`."""
    return sum(is_good(one) and one.due_seconds + one.seconds <= seconds for one in replies) / seconds


def recovery_seconds(replies: list[Reply], over_at: float) -> float:
    """Return how long after the overload the last request was due that was not served well; 0 if all were."""
    return max(
        (one.due_seconds - over_at for one in replies if one.due_seconds >= over_at and not is_good(one)), default=0
    )


def overloaded() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as made, launched(folder := Path(made)) as launch:
        (folder / "profile.json").write_bytes(msgspec.json.encode(as_measured(PROFILE, STEP_SECONDS, BATCH)))
        worker = launch("engine", "--emulate", str(folder / "profile.json"), *FLAGS)
        asyncio.run(worker.ready())
        slo = {"ttft_slo_millis": round(1000 * SLO_SECONDS)}
        table = make_table(make_instance("d0", url=worker.url), model="tiny", mode="Fixed", tokens=100_000, **slo)
        with serving(folder, "gateway", table) as ours:
            url = f"http://127.0.0.1:{ours.port}/v1/chat/completions"
            peak = goodput(uvloop.run(hammer(url, body, AT_ONCE, PEAK_SECONDS)), PEAK_SECONDS)
            served = dict[int, list[Reply]]()
            for times in TIMES:
                say(f"{times} times {peak:.0f} requests/s for {OVERLOAD_SECONDS:g} s, and then half of it")
                dues = beats(times * peak, OVERLOAD_SECONDS) + beats(CALM_SHARE * peak, CALM_SECONDS, OVERLOAD_SECONDS)
                served[times] = uvloop.run(pace(url, body, dues))
        with HttpServer(worker.url) as server:
            metrics = server.get("/metrics").decode(errors="replace")
    yield from judged(peak, served, metrics)


def judged(peak: float, served: Mapping[int, list[Reply]], metrics: str) -> Iterator[Figure]:
    """Yield whether the engine's machine was too slow for it, and if not the peak and what overloads did. `served` has
    the replies by how many times the peak was asked for."""
    too_slow = says_too_slow(metrics)
    yield Figure(name="overload: engines that say that they were too slow", value=int(too_slow), unit="", reach=0)
    if too_slow:
        return
    yield Figure(name="overload: peak goodput", value=peak, unit="requests/s", better="higher")
    for times, replies in served.items():
        yield from overload(times, peak, replies)


def overload(times: int, peak: float, replies: list[Reply]) -> Iterator[Figure]:
    """Yield what an overload of so many times the peak did."""
    share = goodput(replies, OVERLOAD_SECONDS) / peak
    wrong = sum(one.status != 200 and not is_refused_well(one) for one in replies)
    recovery = recovery_seconds(replies, OVERLOAD_SECONDS)
    name = f"overload {times} x"
    yield Figure(name=f"{name}: goodput, of the peak", value=share, unit="", better="higher", reach=REACH_GOODPUT)
    yield Figure(name=f"{name}: refusals that are no 429 with Retry-After", value=wrong, unit="", reach=0)
    yield Figure(name=f"{name}: until all is served again", value=recovery, unit="s", reach=REACH_RECOVERY_SECONDS)
