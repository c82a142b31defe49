"""The gateway under a flood, and what its keys cost: real processes, driven as `prfaas bench gateway` drives them."""

import hashlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import uvloop
from benchmarks.gateway.__main__ import measure, prompt
from benchmarks.gateway.routers import Router, backend, routing_table, serving, started
from benchmarks.hardening.load import Reply, beats, pace
from benchmarks.hardening.strangers import BODIES, BOMBS, HALF_HEADS
from benchmarks.report import Figure, peak_mib, percentile, say
from benchmarks.worker_memory import memory_mib

GOOD_PER_SECOND = 50.0
BESIDE_SECONDS, FLOOD_SECONDS, FLOODING_SECONDS = 20.0, 60.0, 5.0
REACH_FLOOD_MIB = 256.0
REACH_SLOWER = 3.0

KEY = "k" * 32
REACH_KEYS_RATIO = 1.1
PAIRS = 5
SIZES = {"1 KB": (1_000, 2_000), "108 KB": (108_000, 800)}  # prompt bytes, requests of each run


def flooded(flood_seconds: float = FLOOD_SECONDS) -> Iterator[Figure]:
    """Good clients of a gateway while strangers flood another one beside it, and then while they flood this one.

    Strangers, gateways and good clients share the machine, and strangers elsewhere would not. A reach against the times
    of a quiet gateway would judge what the strangers themselves take of the machine. So the reach is against this
    gateway beside a flood of another one, which takes as much of it. The quiet time stands beside the reach.
    """
    with tempfile.TemporaryDirectory() as made, backend() as worker:
        folder, table = Path(made), routing_table(worker.port, "prfaas", two_legs=False)
        with serving(folder, "ours", table) as ours, serving(folder, "another", table) as another:
            idle_mib = memory_mib(ours.pid)[0]
            quiet = good(ours, BESIDE_SECONDS)
            say(f"{HALF_HEADS} half heads, {BOMBS} bombs and {BODIES} bodies at another one for {BESIDE_SECONDS:g} s")
            _, beside = good_beside_flood(ours, another, BESIDE_SECONDS)
            say(f"the same at this one for {flood_seconds:g} s")
            standing, replies = good_beside_flood(ours, ours, flood_seconds)
            over_mib = peak_mib(ours.pid) - idle_mib
    share = 100 * sum(one.status == 200 for one in replies) / len(replies)
    quiet_ms, beside_ms, in_ms = (1000 * p99(seen) for seen in (quiet, beside, replies))
    yield Figure(name="flood: connections that stand", value=standing, unit="", better="higher", reach=HALF_HEADS)
    yield Figure(name="flood: peak memory over idle", value=over_mib, unit="MiB", reach=REACH_FLOOD_MIB)
    yield Figure(name="flood: good requests served", value=share, unit="%", better="higher", reach=100)
    name = "flood: p99 of good requests"
    timed = partial(Figure, unit="ms", rival="a quiet machine", rival_value=quiet_ms)
    yield timed(name=f"{name} beside another's flood", value=beside_ms)
    yield timed(name=name, value=in_ms, reach=REACH_SLOWER * beside_ms)


def good_beside_flood(ours: Router, flooded: Router, seconds: float) -> tuple[int, list[Reply]]:
    """Return what good clients of ours see while strangers flood a gateway, and how many connections that one has."""
    with started([sys.executable, "-m", "benchmarks.hardening.strangers", str(flooded.port)]):
        good(ours, FLOODING_SECONDS)  # until all are there, and no head is late yet
        standing = sum(1 for _ in Path(f"/proc/{flooded.pid}/fd").iterdir())
        return standing, good(ours, seconds)


def good(router: Router, seconds: float) -> list[Reply]:
    """Return what good clients see."""
    url, body = f"http://127.0.0.1:{router.port}/v1/chat/completions", prompt(1_000)
    return uvloop.run(pace(url, lambda _: body, beats(GOOD_PER_SECOND, seconds)))


def p99(replies: list[Reply]) -> float:
    return percentile([one.seconds for one in replies], 0.99)


def with_keys() -> Iterator[Figure]:
    """A gateway with keys, isolated caches, budgets and caps beside one without, in turns."""
    with tempfile.TemporaryDirectory() as made, backend() as worker:
        folder, table = Path(made), routing_table(worker.port, "prfaas", two_legs=False)
        (keys := folder / "keys").mkdir()
        digest = hashlib.sha256(KEY.encode()).hexdigest()
        limits = {"maxInFlight": 1 << 20, "requestsPerMinute": 1 << 40, "tokensPerMinute": 1 << 40}
        (keys / "client").write_text(json.dumps({"keys": [f"sha256:{digest}"], **limits}))
        with serving(folder, "open", table) as bare, serving(folder, "keys", table, "--keys-dir", str(keys)) as asking:
            for label, (size_bytes, requests) in SIZES.items():
                say(f"CPU with keys and without, prompts of {label}")
                yield Figure(
                    name=f"CPU a request with keys, budgets and caps, of without, {label} prompt",
                    value=ratio(asking, bare, prompt(size_bytes, max_tokens=16), requests, KEY),
                    unit="x",
                    reach=REACH_KEYS_RATIO,
                )


def ratio(ours: Router, bare: Router, body: bytes, requests: int, key: str = "") -> float:
    """Return the CPU of a request, with the key, as a share of another gateway's: the median of pairs in turns."""
    pairs = [(measure(ours, body, requests, key)[0], measure(bare, body, requests)[0]) for _ in range(PAIRS)]
    return statistics.median(mine / theirs for mine, theirs in pairs)
