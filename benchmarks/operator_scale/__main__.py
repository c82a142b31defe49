"""The operator among many pools: how soon it knows all after a start, what it costs at rest, how fast it reacts.

    prfaas bench operator_scale [--pools 1000] [--pods-per-pool 10] [--rest-seconds 60] [--outage-seconds 30]

Two real control planes with their own controllers, the real operator with the charts' rights, half of the pools in the
hub and half in the member. Nodes are played: what a kubelet writes of a pod, `Kubelets` writes as soon as a pod is
there. The API server that the operator reaches the member by is behind a relay, which freezes for the outage: its
connections stay open and no byte passes, the worst way in which a network fails.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.operator_kills import MODEL, resource
from benchmarks.operator_scale.stage import CALLS_AT_ONCE, CLUSTER, CONVERGE_SECONDS, Operator, Stage, follow, staged
from benchmarks.report import Figure, cpu_seconds, percentile, run, say

from prfaas.util import Deadline
from prfaas_operator.clusters.client import ClusterClient
from prfaas_operator.clusters.kinds import DEPLOYMENT, PREFILL_POOL
from prfaas_sandbox.tools import ensure_tools

REACTIONS = 100


class Scale(NamedTuple):
    """What the command line asks for."""

    pools: int
    pods_per_pool: int
    rest_seconds: float
    outage_seconds: float


async def all_of(calls: Iterable[Any]) -> None:
    """Make many calls, a few at once."""
    turn = asyncio.Semaphore(CALLS_AT_ONCE)

    async def one(call: Any) -> None:
        async with turn:
            await call

    await asyncio.gather(*map(one, calls))


class Changes:
    """Scales pools one after the other, and sees when their Deployments follow."""

    def __init__(self, stage: Stage, names: list[str], replicas: int):
        self._stage = stage
        self._wanted = dict.fromkeys(names, replicas)
        self._pending: dict[str, asyncio.Future[float]] = {}
        self._tasks = [asyncio.create_task(self._watch(one)) for one in (stage.hub, stage.member)]

    async def one(self, name: str) -> float:
        """Change a pool; return the seconds until its Deployment has it."""
        return await asyncio.wait_for((await self.begin(name)), CONVERGE_SECONDS)

    async def begin(self, name: str) -> "asyncio.Task[float]":
        """Change a pool, and return what will give the seconds until its Deployment has it."""
        wanted = self._wanted[name] = self._wanted[name] ^ 1
        self._pending[name] = asyncio.get_running_loop().create_future()
        started = time.monotonic()
        await self._stage.hub.merge(PREFILL_POOL, name, {"spec": {"replicas": wanted}})
        return asyncio.create_task(self._until(self._pending[name], started))

    async def _until(self, applied: "asyncio.Future[float]", started: float) -> float:
        return await applied - started

    async def _watch(self, cluster: ClusterClient) -> None:
        async for deployment in follow(cluster, DEPLOYMENT):
            name = deployment["metadata"]["name"]
            waiting = self._pending.get(name)
            if waiting and not waiting.done() and deployment["spec"]["replicas"] == self._wanted[name]:
                waiting.set_result(time.monotonic())

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()


def pool_name(number: int) -> str:
    return f"pool-{number}"


async def create(stage: Stage, scale: Scale) -> None:
    """Create all pools, the odd ones in the member."""
    pools = [
        resource(
            "PrefillPool",
            pool_name(number),
            model=MODEL,
            replicas=scale.pods_per_pool,
            clusterName=CLUSTER if number % 2 else "",
        )
        for number in range(scale.pools)
    ]
    await all_of(stage.hub.create(PREFILL_POOL, pool) for pool in pools)


async def first_start(stage: Stage, scale: Scale) -> Figure:
    """Start an operator where nothing has been made yet, and end it when everything has."""
    fresh = stage.operator()
    try:
        took = await fresh.settled(scale.pools)
    finally:
        fresh.end()
    say(f"everything was made in {took:.0f} s")
    return Figure(name="from nothing to all pools ready, pods by controllers and played kubelets", value=took, unit="s")


async def rest(stage: Stage, operator: Operator, scale: Scale) -> AsyncIterator[Figure]:
    """Yield what a settled operator costs while nothing changes."""
    await asyncio.sleep(scale.rest_seconds / 4)  # what its own start has woken
    before, cpu, started = await asyncio.to_thread(stage.versions), cpu_seconds(operator.process.pid), time.monotonic()
    await asyncio.sleep(scale.rest_seconds)
    share = 100 * (cpu_seconds(operator.process.pid) - cpu) / (time.monotonic() - started)
    after = await asyncio.to_thread(stage.versions)
    writes = sum(after.get(key) != version for key, version in before.items()) + len(after.keys() - before.keys())
    yield Figure(name="CPU at rest", value=share, unit="% of a core", reach=10)
    yield Figure(name="resident memory", value=operator.resident_mib(), unit="MiB", reach=400)
    yield Figure(name="pools and children written while nothing changed", value=writes, unit="", reach=0)


async def reactions(changes: Changes, scale: Scale) -> AsyncIterator[Figure]:
    """Yield how soon a change of a pool reaches its Deployment."""
    chance = random.Random(1)
    took = [await changes.one(pool_name(chance.randrange(scale.pools))) for _ in range(REACTIONS)]
    yield Figure(name="pool changed to child applied, p50", value=percentile(took, 0.5), unit="s", reach=0.5)
    yield Figure(name="pool changed to child applied, p99", value=percentile(took, 0.99), unit="s", reach=2)


async def outage(stage: Stage, changes: Changes, scale: Scale) -> AsyncIterator[Figure]:
    """Freeze the way to the member while pools change; yield how the hub's fared, and when the member's followed."""
    chance = random.Random(2)
    stage.relay.freeze()
    late = [await changes.begin(pool_name(number)) for number in range(1, min(scale.pools, 20), 2)]
    deadline, took = Deadline(scale.outage_seconds), []
    while not deadline.is_over:
        took.append(await changes.one(pool_name(2 * chance.randrange(scale.pools // 2))))
        await asyncio.sleep(0.2)
    stage.relay.thaw()
    thawed = time.monotonic()
    await asyncio.wait_for(asyncio.gather(*late), CONVERGE_SECONDS)
    healed = time.monotonic() - thawed
    yield Figure(
        name="p99 of the hub's pools while the member is frozen", value=percentile(took, 0.99), unit="s", reach=2
    )
    name = f"member thawed after {scale.outage_seconds:g} s to all its changes applied"
    yield Figure(name=name, value=healed, unit="s", reach=15)


async def measured(stage: Stage, scale: Scale) -> list[Figure]:
    """Go through all phases."""
    figures = [await first_start(stage, scale)]
    operator = stage.operator()
    try:
        took = await operator.settled(scale.pools)
        say(f"all {scale.pools} pools are known {took:.1f} s after a start")
        figures.append(Figure(name="start of the operator to all pools known", value=took, unit="s", reach=60))
        figures += [figure async for figure in rest(stage, operator, scale)]
        say("at rest; now changes")
        changes = Changes(stage, [pool_name(number) for number in range(scale.pools)], scale.pods_per_pool)
        figures += [figure async for figure in reactions(changes, scale)]
        say(f"now an outage of {scale.outage_seconds:g} s")
        figures += [figure async for figure in outage(stage, changes, scale)]
        changes.end()
    finally:
        operator.end()
    return figures


async def _figures(scale: Scale) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="prfaas-scale-") as folder:
        async with staged(ensure_tools(print), Path(folder)) as stage:
            await create(stage, scale)
            say(f"{scale.pools} pools are there")
            return await measured(stage, scale)


def figures(
    pools: int = 1000, pods_per_pool: int = 10, rest_seconds: float = 60, outage_seconds: float = 30
) -> Iterator[Figure]:
    yield from asyncio.run(_figures(Scale(pools, pods_per_pool, rest_seconds, outage_seconds)))


if __name__ == "__main__":
    run("operator_scale", __doc__, figures)
