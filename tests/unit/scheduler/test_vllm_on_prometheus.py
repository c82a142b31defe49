"""The loop with pools of vLLM, on a real Prometheus that scrapes the metric texts of a real vLLM server.

With our connector: the link falls to a tenth, and the threshold is right after three intervals; a silent member is
dead; prices, profiles and the summary of the long loop are there, and the operator converts, scales and plans by them.
With NIXL: counters of a node are all that is known of the link, and they move the threshold.
"""

import asyncio
import contextlib

import aiohttp
import msgspec
import pytest
from tests.unit.operator_ import conftest as make
from tests.waiting import assert_prompt, eventually_async

from prfaas.api import PrfaaSPolicyStatus
from prfaas.capacity.comparison import compare
from prfaas.capacity.longloop import decide
from prfaas.capacity.profile import prefill_seconds
from prfaas.names import HUB
from prfaas.wire.routes import Threshold
from prfaas_operator.plan import longloop
from prfaas_operator.plan.installation import installation, unknown
from prfaas_operator.plan_cli import plan_file
from prfaas_scheduler import observe
from prfaas_scheduler.gateway import GatewayClient
from prfaas_scheduler.loop import Loop
from prfaas_scheduler.metrics import SchedulerMetrics

from .conftest import make_table, prometheus_binary
from .vllm_site import PODS, PROFILE, CountingGateway, Plant, bearable_tokens, clusters, instances, scraped, seeds

pytestmark = [
    pytest.mark.system,
    pytest.mark.asyncio,
    pytest.mark.skipif(prometheus_binary() is None, reason="no Prometheus: run `make tools` first"),
]

AUTO = Threshold(mode="Auto", tokens=4096, min_tokens=256, max_tokens=131_072)
INTERVALS = 3


class Running:
    """A loop with its plant."""

    def __init__(self, plant: Plant, gateway: CountingGateway, loop: Loop):
        self.plant, self.gateway, self.loop = plant, gateway, loop

    @property
    def update(self):
        return self.gateway.updates[-1]

    @property
    def observed(self):
        return self.loop.report.figures["observed"]

    async def until(self, holds, what: str) -> None:
        updates = self.gateway.updates
        await eventually_async(
            lambda: updates and holds(), lambda: f"{what}: {updates[-3:]} {self.loop.report}", poll=0.05
        )


@contextlib.asynccontextmanager
async def running(tmp_path, engine="vllm-prfaas", ports=(8000, 8002), nodes=(), **table):
    """One instance of each pool answers at these ports; the loop runs once a second."""
    gateway = CountingGateway(tmp_path / "control.sock")
    gateway.plant = plant = Plant(gateway)
    keys = [f"{cluster}/{pool}/{pool}-0/{port}" for cluster, pool, _ in PODS for port in ports]

    def text(key: str) -> str | None:
        return None if key in plant.silent else plant.text(key)

    async with scraped(text, [*keys, *nodes], tmp_path) as url:
        known = {"instances": instances(engine), "clusters": clusters(), "profiles": seeds(), "threshold": AUTO}
        gateway.table = make_table(**{"prometheus_url": url, **known, **table})
        async with gateway.listening(), GatewayClient(gateway.path) as client, aiohttp.ClientSession() as http:
            loop = Loop(client, http, SchedulerMetrics())
            task = asyncio.create_task(loop.run())
            try:
                yield Running(plant, gateway, loop)
            finally:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


@pytest.mark.quiet
async def test_the_whole_loop_works_with_pools_of_vllm(tmp_path, monkeypatch):
    monkeypatch.setattr(observe, "OBSERVE_SECONDS", 2.0)
    monkeypatch.setattr(observe, "WINDOW_SECONDS", 20)
    async with running(tmp_path) as run:
        await run.until(lambda: run.update.tokens > 10_000, "at the optimum of lengths and profiles")
        await run.until(lambda: run.plant.unsent_bytes < 1 and run.update.bandwidth == "Abundant", "at rest")
        await asyncio.sleep(5)  # the window is full of the wide link
        await the_link_falls(run)
        await a_silent_member_is_dead(run)
        profiles_are_measured(run)
        await prices_are_known(run)
        await run.until(lambda: (run.observed or {}).get("outputMilliTokens"), "summed up")
        the_operator_plans_with_it(run.observed)
        await run.until(lambda: run.loop.report.conditions["LoopMeasured"].status == "True", "whole")


async def the_link_falls(run: Running) -> None:
    right = bearable_tokens(100.0)
    assert run.update.tokens < right / 1.3
    run.plant.set_link(100.0)
    await run.until(lambda: run.plant.shown_waiting_after is not None, "shown")
    await run.until(lambda: run.update.tokens >= right, "right")
    took = len(run.gateway.updates) - run.plant.shown_waiting_after
    assert_prompt(took, INTERVALS, "the threshold is right (counted in steps of a second)")
    planned = bearable_tokens(65.0)  # the middle between the watermarks
    await run.until(lambda: run.plant.unsent_bytes < 1, "drained")
    await run.until(lambda: right <= run.update.tokens <= 1.5 * planned, "at rest again")
    run.plant.set_link(1000.0)


async def a_silent_member_is_dead(run: Running) -> None:
    run.plant.silent = {f"eu/offload/offload-0/{port}" for port in (8000, 8002)}
    await run.until(lambda: run.update.offload_clusters == (), "off")
    assert run.loop.report.conditions["LinkHealthy"][:2] == ("False", "NoSamples")
    run.plant.silent = {"eu/offload/offload-0/8002"}
    await run.until(lambda: run.update.offload_clusters == ("eu",), "alive by the engine's own metrics")
    run.plant.silent = set()


def profiles_are_measured(run: Running) -> None:
    """The pools say that a prefill takes twice as long as it does."""
    known = {(one.cluster, one.pool): one.profile for one in run.update.profiles}
    for pool in (("eu", "offload"), (HUB, "local")):
        for tokens in (1000, 10_000):
            truth = prefill_seconds(PROFILE, tokens)
            assert prefill_seconds(known[pool], tokens) == pytest.approx(truth, rel=0.1)
        assert known[pool].token_bytes == PROFILE.token_bytes


async def prices_are_known(run: Running) -> None:
    priced = msgspec.structs.replace(AUTO, mode="Priced")
    run.gateway.table = msgspec.structs.replace(run.gateway.table, threshold=priced)
    await run.until(lambda: bool(run.update.prices), "priced")
    assert {price.cluster for price in run.update.prices} == {HUB, "eu"}


def the_operator_plans_with_it(observed) -> None:
    """Pools of vLLM in custom resources; what they cannot be measured at, they say."""
    engine = {"type": "vllm", "image": "vllm/vllm-openai:v0.33.0"}
    common = {"engine": engine, "model": {"name": "tiny", "source": "/models/tiny"}}
    decode = make.decode_pool(replicas=4, **common)
    prefill = [
        make.prefill_pool(replicas=4, maxReplicas=9, **common),
        make.prefill_pool("local", clusterName="", replicas=4, maxReplicas=9, **common),
    ]
    spec = {
        "metrics": {"prometheusUrl": "http://p:9090"},
        "threshold": {"mode": "Priced"},
        "scaling": {"mode": "Auto", "targetLoadPercent": 10},
        "slo": {"ttftMillis": 60_000},
    }
    policy = make.policy(**spec)
    policy = policy.model_copy(update={"status": PrfaaSPolicyStatus.model_validate({"observed": observed})})
    facts = make.facts(
        policy=policy, decode_pools={"decode": decode}, prefill_pools={one.metadata.name: one for one in prefill}
    )
    found = installation(facts, {})
    assert unknown(found, facts) == ""
    assert (found.load.max_batch, found.load.step_seconds, found.load.output_tokens) == (
        pytest.approx(200, rel=0.05),  # 80 requests run on 40 % of the cache
        pytest.approx(0.02, rel=0.05),
        pytest.approx(100, rel=0.05),
    )
    assert found.load.arrivals_per_second == pytest.approx(40, rel=0.1)
    moment = longloop.InstallationState(arrivals_per_second=found.load.arrivals_per_second)
    decision = decide(longloop.rules(policy), found, moment)
    assert decision.reason == "Scaling", decision.message
    assert compare(plan_file(facts)).prfaas_pd.n_prfaas == 4


async def test_counters_of_a_node_move_the_threshold_of_pools_with_nixl(tmp_path):
    query = 'sum(rate(node_network_transmit_bytes_total{cluster="$cluster",device="wan0"}[5s])) * 8 / 1e6'
    there = clusters(utilisation_query=query, capacity_mbps=300)
    node = "eu/node/node-0/9100"
    table = {"clusters": there, "profiles": (), "stale_after_seconds": 4}
    async with running(tmp_path, "vllm-nixl", (8000,), (node,), **table) as run:
        run.plant.set_link(300.0)
        await run.until(lambda: run.update.tokens >= 2 * AUTO.tokens, "raised")
        assert run.loop.report.figures["linkUtilisationPercent"] > 80
        assert run.loop.report.conditions["MetricsFresh"].status == "True"

        run.plant.silent = {"eu/offload/offload-0/8000"}  # the node is counted on, the instances are not
        await run.until(lambda: run.update.offload_clusters == (), "off")
        run.plant.silent = set()
        await run.until(lambda: run.update.offload_clusters == ("eu",), "back")

        lacks = "does not say what waits for the link of MemberCluster eu"  # once the silence before is forgotten
        await run.until(lambda: lacks in run.loop.report.conditions["LoopMeasured"].message, "named")
        condition = run.loop.report.conditions["LoopMeasured"]
        assert condition.reason == "LoopNotMeasured"
        assert "set profile.tokenBytes and stateBytes of pool offload" in condition.message

        run.plant.silent = {node}
        await run.until(lambda: run.loop.report.conditions["MetricsFresh"].status == "False", "stale")
        assert run.update.offload_clusters == ("eu",), "blind is not dead"
