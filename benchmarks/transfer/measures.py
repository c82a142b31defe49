"""What is measured over the links, each beside its rival in the same minute."""

import datetime
import re
import statistics
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import Figure, say
from benchmarks.transfer.ends import CHUNK_TOKENS, HAS_TLS, MEMORY_LIMIT_MIB, Plan
from benchmarks.transfer.link import Link, link
from benchmarks.transfer.movers import PAGED
from benchmarks.transfer.process import End, ends
from benchmarks.transfer.rivals import Carried, best_rival
from benchmarks.transfer.shapes import SHAPES

from prfaas import identity
from prfaas.errors import InternalError
from prfaas_worker.cache_spec import CacheGeometry

GIB = 1 << 30
TOKENS = 8192
ROUND_TRIP_SECONDS = 0.03
LOSS = 0.001
SLOW_MBPS = 200
TOGETHER = 64
TINY_TOKENS = 16_384


class Case(NamedTuple):
    """A link, how many caches of a shape cross it in a round, and what to reach: of the rival's goodput, and CPU
    seconds of both ends for a GiB. Shapes of vLLM's cross from mover to mover."""

    name: str
    reach: float | None = None
    mbps: float | None = None
    round_trip_seconds: float = 0.0
    loss: float = 0.0
    transfers: int = 1
    rounds: int = 1
    tls: bool = False
    shape: str = "48b"
    cpu_reach: float | None = None

    @property
    def tokens(self) -> int:
        return PAGED[self.shape].tokens if self.shape in PAGED else TOKENS


GOODPUT = (
    Case("200 Mbit/s", 0.95, SLOW_MBPS),
    Case("1 Gbit/s", 0.95, 1000, transfers=4),
    Case("unshaped", 0.8, transfers=8, rounds=5, cpu_reach=0.6),
)
SECURE = (
    Case("mutual TLS, 200 Mbit/s", 0.95, SLOW_MBPS, tls=True),
    Case("mutual TLS, 1 Gbit/s", 0.95, 1000, transfers=4, tls=True),
    Case("mutual TLS, unshaped", transfers=4, rounds=3, tls=True, cpu_reach=1.2),
)
LARGE_PAGES = max(PAGED, key=lambda name: PAGED[name].page_bytes)
MOVERS = (
    *(Case(f"{name}, 200 Mbit/s", 0.95, SLOW_MBPS, shape=name) for name in PAGED),
    *(Case(f"{name}, 1 Gbit/s", 0.95, 1000, transfers=4, shape=name) for name in PAGED),
    *(Case(f"{name}, mutual TLS, 1 Gbit/s", 0.95, 1000, transfers=4, tls=True, shape=name) for name in PAGED),
    Case(f"{LARGE_PAGES}, unshaped", 0.8, transfers=8, rounds=5, cpu_reach=0.6, shape=LARGE_PAGES),
    Case(f"{LARGE_PAGES}, mutual TLS, unshaped", transfers=4, rounds=3, tls=True, cpu_reach=1.2, shape=LARGE_PAGES),
)
FAR = (
    Case("200 Mbit/s, 30 ms", 0.9, SLOW_MBPS, ROUND_TRIP_SECONDS),
    Case("200 Mbit/s, 30 ms, 0.1% lost", 0.7, SLOW_MBPS, ROUND_TRIP_SECONDS, LOSS),
    Case("1 Gbit/s, 30 ms, 0.1% lost", 0.7, 1000, ROUND_TRIP_SECONDS, LOSS, transfers=4),
)
TAIL_REACH = 1.2


class Round(NamedTuple):
    """One round of transfers: bytes, seconds of wall clock, and CPU seconds: of both ends' transfers, and of what the
    engines behind movers copied."""

    count_bytes: int
    seconds: float
    cpu: float
    copies_cpu: float

    @property
    def mbps(self) -> float:
        """Goodput."""
        return self.count_bytes * 8e-6 / self.seconds

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of both ends for 2^30 bytes."""
        return self.cpu / self.count_bytes * GIB

    @property
    def copies_seconds(self) -> float:
        """CPU seconds of the engines' copies for 2^30 bytes."""
        return self.copies_cpu / self.count_bytes * GIB


def secure() -> Iterator[Figure]:
    """The same with mutual TLS, each end with a certificate of its own cluster."""
    if not HAS_TLS:
        say("mutual TLS is not measured: the ends do not speak it")
        return
    with _certificates() as directory:
        yield from goodput(SECURE, directory)


def movers() -> Iterator[Figure]:
    """The same from vLLM's mover to another, with and without mutual TLS."""
    with _certificates() as directory:
        yield from goodput(MOVERS, directory)


@contextmanager
def _certificates() -> Iterator[str]:
    """Give a directory with TLS files of both clusters, for a block."""
    validity = identity.valid_for(datetime.datetime.now(datetime.UTC), days=1)
    authority = identity.make_authority("bench", validity)
    with tempfile.TemporaryDirectory() as directory:
        for cluster in ("source", "destination"):
            pair, files = identity.issue(authority, cluster, validity), Path(directory) / cluster
            files.mkdir()
            (files / "tls.crt").write_bytes(pair.certificate)
            (files / "tls.key").write_bytes(pair.key)
            (files / "ca.crt").write_bytes(identity.bundle(authority.certificate))
        yield directory


def goodput(cases: Sequence[Case], tls: str = "") -> Iterator[Figure]:
    """Goodput of one cache after the other, from connecting to the last byte placed, and the CPU it takes.

    Where the cases ask for TLS, its files are in the directory `tls`.
    """
    for case in cases:
        say(f"goodput, {case.name}")
        with link(case.mbps, case.round_trip_seconds, case.loss) as made:
            plan = Plan(case.shape, case.tokens, tls=tls if case.tls else "")
            with ends(made, plan) as (source, destination):
                _transfer(source, destination, 1)  # touches all memory
                rounds, rivals = [], []
                for _ in range(case.rounds):
                    rivals.append(best_rival(made, 1.0 if case.mbps is None else 4.0))
                    rounds.append(_transfer(source, destination, case.transfers))
                _require_equal(source, destination)
        yield from _figures(case, rounds, rivals)


def _figures(case: Case, rounds: list[Round], rivals: list[Carried]) -> Iterator[Figure]:
    own, rival = (statistics.median(one.mbps for one in found) for found in (rounds, rivals))
    of_rival = statistics.median(one.mbps / other.mbps for one, other in zip(rounds, rivals, strict=True))
    named = {"rival": rivals[0].name}
    yield Figure(name=f"goodput, {case.name}", value=own, unit="Mbit/s", better="higher", rival_value=rival, **named)
    ratio = {"unit": "ratio", "better": "higher", "reach": case.reach}
    yield Figure(name=f"goodput, {case.name}, of {named['rival']}", value=of_rival, **ratio)
    yield Figure(
        name=f"CPU for a GiB, {case.name}",
        value=statistics.median(one.cpu_seconds for one in rounds),
        unit="s",
        reach=case.cpu_reach,
        rival_value=statistics.median(one.cpu_seconds for one in rivals),
        **named,
    )
    if case.shape in PAGED:
        copies = statistics.median(one.copies_seconds for one in rounds)
        yield Figure(name=f"CPU of the engines' copies, {case.name}", value=copies, unit="s")


def _transfer(source: End, destination: End, count: int) -> Round:
    before = _cpu(source, destination)
    count_bytes, seconds = 0, 0.0
    for _ in range(count):
        grant = source.ask("offer", tokens=source.plan.tokens, prefill_seconds=0.0)
        taken = destination.ask("take", grants=[grant])
        count_bytes += taken["bytes"]
        seconds += taken["seconds"]
    cpu, copies_cpu = (after - begun for after, begun in zip(_cpu(source, destination), before, strict=True))
    return Round(count_bytes, seconds, cpu, copies_cpu)


def _cpu(source: End, destination: End) -> tuple[float, float]:
    """CPU seconds of both ends' transfers and of their engines' copies."""
    first, second = source.ask("cpu"), destination.ask("cpu")
    return first[0] + second[0], first[1] + second[1]


def _require_equal(source: End, destination: End) -> None:
    if source.ask("digest", copy=0) != destination.ask("digest", copy=0):
        raise InternalError("the cache that arrived is not the one that was sent")


def tail() -> Iterator[Figure]:
    """How long after the end of a prefill its last byte is at the destination, on a link that is just fast enough."""
    say("from the end of prefill to the last byte")
    geometry = CacheGeometry(SHAPES["48b"])
    chunk_bytes = CHUNK_TOKENS * geometry.token_bytes
    with link(SLOW_MBPS) as made, ends(made, Plan("48b", TOKENS)) as (source, destination):
        rate = best_rival(made, 3.0).mbps * 1e6 / 8
        prefill_seconds = TOKENS / CHUNK_TOKENS * chunk_bytes / rate
        found = []
        for _ in range(2):
            grant = source.ask("offer", tokens=TOKENS, prefill_seconds=prefill_seconds)
            ended = destination.ask("take", grants=[grant])["ended"]
            found.append(ended - source.ask("prefill ended"))
    least = (chunk_bytes + geometry.state_bytes) / rate
    value = statistics.median(found)
    named = {"rival": "(last chunk + state) / rate", "rival_value": least}
    yield Figure(name=f"end of prefill to last byte, {TOKENS:,} tokens", value=value, unit="s", **named)
    yield Figure(name="end of prefill to last byte, of the least", value=value / least, unit="ratio", reach=TAIL_REACH)


def memory() -> Iterator[Figure]:
    """What many transfers at once hold beside the caches themselves, in both processes and in the kernel."""
    say(f"memory of {TOGETHER} transfers")
    plan = Plan("tiny", TINY_TOKENS, copies=TOGETHER)
    with link(SLOW_MBPS) as made, ends(made, plan) as (source, destination):
        grants = [source.ask("offer", tokens=TINY_TOKENS, prefill_seconds=0.0) for _ in range(TOGETHER)]
        with _watching(made, source, destination) as peaks:
            taken = destination.ask("take", grants=grants)
        for copy in (0, TOGETHER - 1):
            if source.ask("digest", copy=0) != destination.ask("digest", copy=copy):
                raise InternalError("a cache that arrived is not the one that was sent")
    say(f"{taken['bytes'] * 8e-6 / taken['seconds']:.0f} Mbit/s together")
    for name in ("source", "destination"):
        yield Figure(
            name=f"memory of {TOGETHER} transfers, {name}", value=peaks[name], unit="MiB", reach=MEMORY_LIMIT_MIB
        )
        yield Figure(
            name=f"memory of {TOGETHER} transfers, {name}'s sockets", value=peaks[f"{name}'s sockets"], unit="MiB"
        )


@contextmanager
def _watching(made: Link, source: End, destination: End) -> Iterator[dict[str, float]]:
    """Fill in, at the end, by how many MiB processes and sockets were larger than at the start, at most."""
    peaks: dict[str, float] = {}
    over = threading.Event()
    begun = _held_mib(made, source, destination)

    def watch() -> None:
        while not over.wait(0.1):
            for name, mib in _held_mib(made, source, destination).items():
                peaks[name] = max(peaks.get(name, 0.0), mib - begun[name])

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        over.set()
        thread.join()


def _held_mib(made: Link, source: End, destination: End) -> dict[str, float]:
    held = {"source": source.pss_mib(), "destination": destination.pss_mib()}
    for name, namespace in (("source", made.source), ("destination", made.destination)):
        # skmem: bytes of memory that hold received (r), sent (t) and queued (f) data
        found = re.findall(r"skmem:\(r(\d+),rb\d+,t(\d+),tb\d+,f(\d+),w(\d+)", namespace.run("ss", "-tnm"))
        held[f"{name}'s sockets"] = sum(int(received) + int(queued) for received, _, _, queued in found) / (1 << 20)
    return held
