"""How far the parts of a time to the first token are off what the client waited: our worker, and an emulated one.

    prfaas bench first_token [-o json]

A gateway stands before two workers of a kind, on loopback. Prompts come one by one, on a machine that does nothing
else: the shorter ones are prefilled where they are decoded, the longer ones at the other worker. What is in no part is
the client's way to the gateway and back. How late the client sent a request is known, and taken off.
"""

import asyncio
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from benchmarks.emulated import says_too_slow
from benchmarks.gateway.routers import serving
from benchmarks.report import Figure, percentile, run, say
from benchmarks.worker.process import MODEL, running
from tests.vllm.gateways import table_of

from prfaas.errors import CapacityError, PeerError
from prfaas.evaluate.record import AnsweredRequest
from prfaas.simulate.request import Arrival
from prfaas.wire.routes import Threshold
from prfaas.wire.trace import PARTS
from prfaas_sandbox.evaluate.drive import Driver

KINDS: Final = {"our worker": (), "emulated": ("--emulate", "qwen3.5-27b-fp8-1xh100", "--cache-scale", "64")}
"""Flags of the workers."""
LENGTHS: Final = (4000, 8000)
THRESHOLD_TOKENS: Final = 6000
REPEATS: Final = 20
EVERY_SECONDS: Final = 1.0
REACH_PERCENT: Final = 5.0


def figures() -> Iterator[Figure]:
    for name, flags in KINDS.items():
        say(f"{name}: {REPEATS} prompts of each length")
        yield from compared(name, answered(*flags))


def answered(*flags: str) -> tuple[AnsweredRequest, ...]:
    """Ask a gateway before two workers with these flags."""
    common = ("--max-context", str(2 * LENGTHS[-1]), *flags)
    with (
        running("--role", "prefill", *common) as source,
        running("--role", "decode", *common) as destination,
        tempfile.TemporaryDirectory() as folder,
    ):
        fixed = Threshold(mode="Fixed", tokens=THRESHOLD_TOKENS, min_tokens=1, max_tokens=THRESHOLD_TOKENS)
        table = msgspec.structs.replace(table_of("prfaas", source.url, destination.url), model=MODEL, threshold=fixed)
        with serving(Path(folder), "routes", table) as gateway:
            answers = asyncio.run(asked(f"http://127.0.0.1:{gateway.port}"))
        if any(says_too_slow(worker.get("/metrics")[1]) for worker in (source, destination)):
            raise CapacityError("the machine was too slow for an emulated worker: end what else runs on it")
        return answers


async def asked(url: str) -> tuple[AnsweredRequest, ...]:
    lengths = LENGTHS * REPEATS
    async with Driver.connected(url, MODEL, 1.0, 1) as driver:
        await driver.warm_up(LENGTHS[-1])
        return await driver.run([Arrival(n * EVERY_SECONDS, one, 2) for n, one in enumerate(lengths)], say)


def compared(name: str, answers: Sequence[AnsweredRequest]) -> Iterator[Figure]:
    """Yield how far the parts are off, for each place of the prefill. Raises PeerError if a place had none."""
    whole = [one for one in answers if one.parts.keys() == set(PARTS)]
    missing = len(answers) - len(whole)
    yield Figure(name=f"{name}: requests without an answer, or without a part", value=missing, unit="", reach=0)
    for place, is_away in (("where it is decoded", False), ("elsewhere", True)):
        off = [off_share(one) for one in whole if one.offloaded == is_away]
        if not off:
            raise PeerError(f"{name}: no prompt was prefilled {place}; the last error: {answers[-1].error or 'none'}")
        for what, share in (("median", statistics.median(off)), ("of 90 %, at most", percentile(off, 0.9))):
            label = f"{name}, prefilled {place}: off by, {what}"
            yield Figure(name=label, value=100 * share, unit="%", reach=REACH_PERCENT)


def off_share(one: AnsweredRequest) -> float:
    """Return by how much the sum of a request's parts is off its time to the first token, as a share of that."""
    waited = (one.ttft_seconds or 0.0) - one.sent_late_seconds
    return abs(sum(one.parts.values()) / waited - 1)


if __name__ == "__main__":
    run("first_token", __doc__, figures)
