"""vLLM behind our operator, gateway and scheduler, in two clusters: installed by the example, and driven from outside.

One installation serves all tests of this file.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from rich.console import Console
from tests.waiting import NotInTime, eventually_async

from prfaas_sandbox.demo.client import DemoClient
from prfaas_sandbox.demo.display import DemoDisplay
from prfaas_sandbox.demo.install import MEMBER, NAMESPACE, ON_VLLM, ExampleInstallation, repository_root
from prfaas_sandbox.demo.records import DemoResults
from prfaas_sandbox.demo.steps import WIDE_MBPS, DemoSteps, ThresholdSampler
from prfaas_sandbox.sandbox import Sandbox

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(480, func_only=True)]
INTERVAL_SECONDS = 1.0  # of the policy's short loop, and of Prometheus
HIGH_PERCENT = 80
# The most of some minutes: a scrape that fails on a busy machine takes a series out of an instant query.
SENT = f"sum(max_over_time(prfaas_transfer_sent_bytes_total{{cluster='{MEMBER}'}}[10m]))"
RECEIVED = "sum(max_over_time(prfaas_transfer_received_bytes_total{cluster='hub'}[10m]))"
ON_THE_LINK = f"sum(max_over_time(prfaas_link_sent_bytes_total{{cluster='{MEMBER}'}}[10m]))"


class Running:
    """The installation, its clients and what they have seen so far."""

    def __init__(self, installation: ExampleInstallation):
        self.installation = installation
        self.results = DemoResults(engine="vllm")
        self.client = DemoClient(installation.gateway_url, ON_VLLM.model)
        self.sampler = ThresholdSampler(installation.environment.prometheus_url, self.results.threshold.append)
        self.steps = DemoSteps(installation, self.client, self.sampler, DemoDisplay(self.results, Console(quiet=True)))

    async def moved(self) -> tuple[float, ...]:
        """What the connectors' own metrics say was sent, was received, and was on the link, since all began.

        Prometheus reads each instance at another time, so the three agree only once nothing moves and each instance
        was read again: all arrived that was sent, but for what was sent again, and all of that was on the link.
        """
        reads: list[tuple[float, ...]] = [()]

        async def are_settled() -> bool:
            reads.append(tuple([await self.sampler.query(query) or 0.0 for query in (SENT, RECEIVED, ON_THE_LINK)]))
            sent, received, on_the_link = reads[-1]
            return reads[-1] == reads[-2] and 0.9 * sent < received <= sent < 1.1 * on_the_link

        try:
            await eventually_async(are_settled, "the counters stand still and agree", poll=2 * INTERVAL_SECONDS)
        except NotInTime:
            # After so long they are wrong, not late: no second try forgives that.
            raise AssertionError(f"sent, received and on the link do not agree: {reads[-1]}") from None
        return reads[-1]

    async def pod(self, pool: str) -> dict[str, Any]:
        """The first pod of a pool of the hub."""
        environment = self.installation.environment
        words = ("-n", NAMESPACE, "get", "pods", "-l", f"prfaas.io/pool={pool}", "-o", "json")
        return json.loads(await environment.kubectl(environment.hub, *words))["items"][0]

    async def reason(self, condition: str) -> str:
        environment = self.installation.environment
        words = ("-n", NAMESPACE, "get", "prfaaspolicy", ON_VLLM.policy, "-o", "json")
        policy = json.loads(await environment.kubectl(environment.hub, *words))
        return next(each["reason"] for each in policy["status"]["conditions"] if each["type"] == condition)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    # One vLLM that decodes, of the two in the example: each takes half a minute of a core to start.
    *others, decode, policy = yaml.safe_load_all((repository_root() / ON_VLLM.path).read_text())
    decode["spec"]["replicas"] = 1
    example = tmp_path_factory.mktemp("example") / "example.yaml"
    example.write_text(yaml.safe_dump_all([*others, decode, policy]))
    file = ON_VLLM._replace(path=str(example))
    state = tmp_path_factory.mktemp("sandbox")
    async with Sandbox.start(state, link_mbps=WIDE_MBPS, report=print) as sandbox:
        running = Running(await ExampleInstallation.create(sandbox, report=print, file=file))
        async with running.sampler.running():
            yield running
        await running.client.close()


async def test_a_pool_of_vllm_starts_with_our_connector_and_our_certificate(running: Running):
    pod = await running.pod("decode")
    assert pod["metadata"]["labels"]["prfaas.io/engine"] == "vllm-prfaas"
    assert pod["metadata"]["annotations"]["prfaas.io/scheme"] == "https"
    first = pod["status"]["initContainerStatuses"]
    assert [one["name"] for one in first] == ["connector", "version"]
    assert [one["state"]["terminated"]["exitCode"] for one in first] == [0, 0]
    environment = running.installation.environment
    log = await environment.kubectl(environment.hub, "-n", NAMESPACE, "logs", pod["metadata"]["name"])
    assert "prfaas: data port" in log
    assert "SSLCertRefresher monitors files" in log


async def test_long_prompts_are_prefilled_in_the_member_and_their_cache_crosses_by_the_connector(running: Running):
    await running.steps.lengths((300, 1_200, 5_000))
    _sent, received, _on_the_link = await running.moved()
    offloaded = [record for record in running.results.requests if record.decision == "offload"]
    assert [r.outcome for r in running.results.requests] == ["ok"] * len(running.results.requests)
    assert {r.prefilled_in for r in offloaded} == {MEMBER}
    assert any(r.decision == "local" for r in running.results.requests)
    assert all(r.kv_bytes > 300 * r.tokens for r in offloaded if r.tokens > 2_000), "caches crossed, not their absence"
    assert received >= sum(r.kv_bytes for r in offloaded) > 0, "and the counters know all of them"


async def test_requests_and_caches_cross_inside_tls(running: Running):
    assert await running.reason("Encrypted") == "MutualTls"
    assert await running.reason("IntegrityChecked") == "DigestPerFrame"


async def test_the_threshold_follows_a_full_link_within_three_intervals(running: Running):
    await running.steps.narrow_and_widen()
    results = running.results
    assert results.threshold_narrow_peak >= 2 * results.threshold_before_narrowing > 0
    assert 0 < results.threshold_after_widening <= results.threshold_narrow_peak / 2
    narrow = [sample for sample in results.threshold if sample.link_mbps < WIDE_MBPS]
    full = next(sample.seconds for sample in narrow if (sample.utilisation_percent or 0) >= HIGH_PERCENT)
    rose = next(sample.seconds for sample in narrow if sample.tokens > results.threshold_before_narrowing)
    assert rose - full <= 3 * INTERVAL_SECONDS + INTERVAL_SECONDS, "and one, by which a sample may be late"
