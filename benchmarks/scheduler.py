"""What the scheduler sidecar costs: one decision, one whole round of its process, and its memory.

    prfaas bench scheduler

A decision is compared with reading the routing table of 1,000 instances, which a round has to do anyway. The round is
the real process between a control socket and an HTTP server that answers like Prometheus, both in this process; CPU
time comes from /proc/PID/stat, so that other work on the machine disturbs the figures little.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import msgspec
from aiohttp import web
from benchmarks.report import Figure, cpu_seconds, peak_mib, run

from prfaas.names import HUB
from prfaas.routing.balance import Offered
from prfaas.routing.controller import Config, ControllerFacts, State, initial_state, step
from prfaas.routing.feedforward import PoolFacts
from prfaas.routing.lengths import Bins, demand_of
from prfaas.routing.links import LinkFacts, LinkSample
from prfaas.util import Deadline
from prfaas.wire.control import Counters
from prfaas.wire.profile import Profile
from prfaas.wire.routes import Cluster, Instance, LinkWatermarks, RoutingTable, Threshold, decode

CLUSTERS = 16  # as many as a policy may name pools
INSTANCES = 1000
ROUNDS = 15
REPEATS = 15
POOLS, BINS = 10, 10_000
FORWARD_REACH_MS = 5.0
ROUND_CPU_REACH_MS = 20.0  # 2% of one core at one round a second
RSS_REACH_MIB = 100


def make_table(prometheus_url: str = "") -> RoutingTable:
    names = [f"member-{n}" for n in range(CLUSTERS)]
    instances = tuple(
        Instance(
            name=f"pod-{n}",
            pool=f"pool-{n % CLUSTERS}",
            cluster=names[n % CLUSTERS],
            role="prefill",
            url="http://10.0.0.1:8000",
        )
        for n in range(INSTANCES)
    )
    return RoutingTable(
        policy="bench",
        namespace="bench",
        generation=1,
        model="m",
        on_offload_failure="PrefillLocally",
        threshold=Threshold(mode="Auto", tokens=1024, min_tokens=512, max_tokens=32768),
        watermarks=LinkWatermarks(high_percent=80, low_percent=50),
        short_interval_seconds=1,
        prometheus_url=prometheus_url,
        clusters=tuple(Cluster(name=name, capacity_mbps=1000, utilisation_query="vector(500)") for name in names),
        instances=instances,
    )


def median_us(work: Callable[[], object], calls: int) -> float:
    """Return microseconds a call: the median of several timed runs."""
    runs = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for _ in range(calls):
            work()
        runs.append((time.perf_counter() - started) / calls * 1e6)
    return statistics.median(runs)


def decision_us(links: int) -> float:
    """Time of one step of the controller over this many links that all were measured."""
    table = make_table()
    config = Config(threshold=table.threshold, watermarks=table.watermarks, stale_after_seconds=10)
    sample = LinkSample(
        sampled_at_seconds=1.0, age_seconds=0.5, traffic_mbps=500, delivery_mbps=900, backlogged_fraction=0.5
    )
    facts = ControllerFacts(
        now_seconds=100.0,
        links=tuple(
            LinkFacts(cluster=one.name, capacity_mbps=1000, reachable=True, ready_instances=4, sample=sample)
            for one in table.clusters[:links]
        ),
        hub_measured=True,
        recent_offloads=1,
    )
    state: State = initial_state(config)
    return median_us(lambda: step(config, state, facts), 300)


def forward_ms() -> float:
    """Milliseconds of one step that also makes the optimum: 5 offload pools with their links, 5 local ones."""
    bins = Bins([16.0 * edge for edge in range(BINS + 1)])
    counts = [1.0 + 1e6 / (1 + place) for place in range(BINS)]
    profile = Profile(
        state_bytes=43_000_000,
        token_bytes=8000,
        fixed_seconds=0.1,
        token_seconds=4e-5,
        squared_seconds=1e-10,
        samples=9,
    )
    names = [f"member-{n}" for n in range(POOLS // 2)]
    pools = tuple(PoolFacts(cluster=name, ready_instances=4, profile=profile) for name in [*names, *[HUB] * len(names)])
    sample = LinkSample(sampled_at_seconds=1.0, age_seconds=0.5, traffic_mbps=500)
    links = tuple(
        LinkFacts(cluster=name, capacity_mbps=1000, reachable=True, ready_instances=4, sample=sample) for name in names
    )
    config = Config(threshold=make_table().threshold, watermarks=make_table().watermarks, stale_after_seconds=10)
    state = initial_state(config)

    def one() -> None:
        demand = demand_of(bins, counts)
        if demand is None:
            raise RuntimeError("the benchmark's own histogram is no demand")
        offered = Offered(demand=demand, arrivals_per_second=50.0, pools=pools)
        facts = ControllerFacts(now_seconds=100.0, links=links, hub_measured=True, recent_offloads=1, offered=offered)
        if step(config, state, facts).state.base_tokens is None:
            raise RuntimeError("the benchmark's step found no optimum")

    return median_us(one, 20) / 1000


def answer_of(query: str) -> bytes:
    """Answer as Prometheus does: one figure for a traffic query, five for every cluster for our own."""
    rows: list[tuple[dict[str, str], float]] = [({}, 500.0)]
    if "label_replace" in query:
        figures = ("sampled_at_seconds", "backlogged_mbps", "backlogged_fraction", "unsent_bytes", "waiting_prefills")
        clusters = ["hub", *(cluster.name for cluster in make_table().clusters)]
        rows = [({"cluster": cluster, "figure": figure}, 0.5) for cluster in clusters for figure in figures]
    result = [{"metric": labels, "value": [time.time(), str(value)]} for labels, value in rows]
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}}).encode()


class Surroundings:
    """The gateway and the Prometheus of one scheduler."""

    def __init__(self) -> None:
        self.table = b""
        self.rounds = 0

    async def get_table(self, _: web.Request) -> web.Response:
        return web.Response(body=self.table)

    async def get_counters(self, _: web.Request) -> web.Response:
        counters = Counters(offloaded=1, local=1, failed_offloads=0)
        return web.Response(body=msgspec.json.encode(counters))

    async def put_threshold(self, _: web.Request) -> web.Response:
        self.rounds += 1
        return web.Response(status=204)

    async def query(self, request: web.Request) -> web.Response:
        return web.Response(body=answer_of(str((await request.post())["query"])))


async def round_figures() -> tuple[float, float]:
    """Return CPU milliseconds a round of the real process, and its peak resident memory in MiB."""
    around = Surroundings()
    app = web.Application()
    app.router.add_get("/table", around.get_table)
    app.router.add_get("/counters", around.get_counters)
    app.router.add_put("/threshold", around.put_threshold)
    app.router.add_post("/api/v1/query", around.query)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    with tempfile.TemporaryDirectory() as folder:
        control = f"{folder}/control.sock"
        await web.UnixSite(runner, control).start()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = next(address[1] for address in runner.addresses if isinstance(address, tuple))
        around.table = msgspec.json.encode(make_table(f"http://127.0.0.1:{port}"))
        try:
            return await _watch_process(around, control)
        finally:
            await runner.cleanup()


async def _watch_process(around: Surroundings, control: str) -> tuple[float, float]:
    flags = ["--policy=bench", "--namespace=bench", "--identity=bench", "--metrics-port=0"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "prfaas_scheduler", f"--control-socket={control}", *flags, stderr=subprocess.DEVNULL
    )
    try:
        await _until(around, 3)  # warm
        before, rounds = cpu_seconds(process.pid), around.rounds
        await _until(around, rounds + ROUNDS)
        cpu_ms = (cpu_seconds(process.pid) - before) * 1000 / (around.rounds - rounds)
        return cpu_ms, peak_mib(process.pid)
    finally:
        process.terminate()
        await process.wait()


async def _until(around: Surroundings, rounds: int) -> None:
    deadline = Deadline(60)
    while around.rounds < rounds:
        if deadline.is_over:
            sys.exit("the scheduler makes no rounds: run python -m prfaas_scheduler by hand to see why")
        await asyncio.sleep(0.05)


def figures() -> list[Figure]:
    document = msgspec.json.encode(make_table())
    reading_us = median_us(lambda: decode(document), 20)
    cpu_ms, rss_mib = asyncio.run(round_figures())
    beside = {"unit": "us", "rival": f"reading a table of {INSTANCES} instances", "rival_value": reading_us}
    return [
        Figure(name="decision, 1 link", value=decision_us(1), reach=reading_us, **beside),
        Figure(name=f"decision, {CLUSTERS} links", value=decision_us(CLUSTERS), reach=reading_us, **beside),
        Figure(name=f"step, {POOLS} pools, {BINS:,} bins", value=forward_ms(), unit="ms", reach=FORWARD_REACH_MS),
        Figure(name=f"CPU of a round, {CLUSTERS} links", value=cpu_ms, unit="ms", reach=ROUND_CPU_REACH_MS),
        Figure(name="peak resident memory", value=rss_mib, unit="MiB", reach=RSS_REACH_MIB),
    ]


if __name__ == "__main__":
    run("scheduler", __doc__, figures)
