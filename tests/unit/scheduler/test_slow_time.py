"""Instances that live slower than the clock are controlled as those that they stand for: second by second of theirs."""

import math
from random import Random
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from tests.clocks import Clock
from tests.serving import serving

from prfaas.routing.lengths import LengthTally
from prfaas.wire.control import Counters, ThresholdUpdate
from prfaas.wire.routes import RoutingTable, Threshold, ThresholdMode
from prfaas_scheduler.gateway import GatewayClient
from prfaas_scheduler.loop import Loop
from prfaas_scheduler.metrics import SchedulerMetrics

SECONDS = 150
ARRIVALS = 3
POOLS = {("eu", "offload"): 0.00005, ("hub", "near"): 0.0002}
"""Seconds a token."""


class World:
    """A system at `stretch`: its gateway, and what Prometheus measures of it. Its own time is the clock's, divided."""

    def __init__(self, stretch: float):
        self._stretch, self._tally = stretch, LengthTally()
        self._rng, self._counted = Random("lengths"), 0
        self.clock = Clock()
        self.known: RoutingTable | None = None
        self.updates: list[ThresholdUpdate] = []
        self.observed: dict[str, Any] = {}

    @property
    def own_seconds(self) -> float:
        return self.clock.seconds / self._stretch

    async def table(self) -> RoutingTable | None:
        return self.known

    async def counters(self) -> Counters:
        while self._counted < ARRIVALS * self.own_seconds:
            self._tally.add(round(self._rng.lognormvariate(8.3, 0.9)))
            self._counted += 1
        return Counters(
            offloaded=self._counted // 2,
            local=self._counted - self._counted // 2,
            failed_offloads=0,
            lengths=self._tally.counts,
        )

    async def put_threshold(self, update: ThresholdUpdate) -> None:
        self.updates.append(update)

    async def answer(self, request: web.Request) -> web.Response:
        query = str((await request.post())["query"])
        figures = self._figures() if "label_replace" in query else [({}, self._traffic_mbps() / self._stretch)]
        result = [{"metric": labels, "value": [self.clock.seconds, repr(value)]} for labels, value in figures]
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": result}})

    def _traffic_mbps(self) -> float:
        return 45 + 50 * math.sin(self.own_seconds / 20) ** 2

    def _figures(self):
        sampled_at = self.clock.seconds - 0.5 * self._stretch
        for cluster in ("hub", "eu"):
            yield {"cluster": cluster, "figure": "sampled_at_seconds"}, sampled_at
        for (cluster, pool), token_seconds in POOLS.items():
            at = {"cluster": cluster, "pool": pool}
            waiting = max(0.0, 6 * math.sin(self.own_seconds / (15 if cluster == "eu" else 25)))
            yield {**at, "figure": "waiting_prefills"}, round(waiting)
            yield {**at, "figure": "profile_samples"}, 9
            for tokens in (1024, 8192, 65536):
                length = {**at, "tokens": str(tokens)}
                yield {**length, "figure": "prefill_seconds"}, self._stretch * (0.1 + token_seconds * tokens)
                yield {**length, "figure": "cache_bytes"}, 1e6 + 1000 * tokens
        yield {"cluster": "eu", "figure": "unsent_bytes"}, 2e7 * max(0.0, math.sin(self.own_seconds / 12))


async def controlled(table, stretch: float, known_stretch: float, mode: ThresholdMode = "Auto") -> World:
    """A system of some minutes, whose scheduler takes it for one of `known_stretch`."""
    (eu,) = table().clusters
    scaled = type(eu)(name="eu", capacity_mbps=round(100 / stretch), utilisation_query="up")
    near = type(table().instances[0])(name="near-0", pool="near", cluster="hub", role="prefill", url="http://n:1")
    async with aiohttp.ClientSession() as http:
        world = World(stretch)
        async with serving(world.answer) as url:
            world.known = table(
                prometheus_url=url,
                stretch=known_stretch,
                threshold=Threshold(mode=mode, tokens=1024, min_tokens=512, max_tokens=32768),
                clusters=(scaled,),
                instances=(*table().instances, near),
            )
            loop = Loop(cast(GatewayClient, world), http, SchedulerMetrics(), world.clock)
            for second in range(SECONDS):
                world.clock.seconds = second * stretch
                waited = await loop.once()
            assert waited == known_stretch
            assert loop.report is not None
            world.observed = loop.report.figures["observed"]
    return world


def thresholds(world: World) -> list[int]:
    return [update.tokens for update in world.updates]


async def test_a_stretched_system_has_the_thresholds_of_the_system_that_it_stands_for(table):
    real, slow = await controlled(table, 1.0, 1.0), await controlled(table, 4.0, 4.0)
    assert len({*thresholds(real)}) > 10, "nothing moved"
    assert thresholds(slow) == pytest.approx(thresholds(real), rel=0.002)
    blind = await controlled(table, 4.0, 1.0)
    assert thresholds(blind) != pytest.approx(thresholds(real), rel=0.1)


async def test_what_leaves_the_scheduler_is_of_the_clock(table):
    real_world, slow_world = await controlled(table, 1.0, 1.0, "Priced"), await controlled(table, 4.0, 4.0, "Priced")
    real, slow = real_world.updates[-1], slow_world.updates[-1]
    assert (real.expires_seconds, slow.expires_seconds) == (10, 40)
    assert slow.links[0].effective_mbps == pytest.approx(real.links[0].effective_mbps / 4)
    for ours, theirs in zip(slow.profiles, real.profiles, strict=True):
        assert ours.profile.token_seconds == pytest.approx(4 * theirs.profile.token_seconds)
        assert ours.profile.token_bytes == theirs.profile.token_bytes
    assert len(slow.prices) == 2
    for ours, theirs in zip(slow.prices, real.prices, strict=True):
        assert ours.profile.token_seconds == pytest.approx(4 * theirs.profile.token_seconds)
        assert ours.link_mbps == pytest.approx(theirs.link_mbps / 4)
    arrivals = [one.observed["gatewayArrivalMilliPerSecond"] for one in (real_world, slow_world)]
    assert arrivals == pytest.approx([3000, 750], rel=0.02)
