"""Proves that pools of vLLM serve in real containers, as the operator renders them: one in each cluster, not root, with
a read-only root, our connector copied by its init container, certificates, probes and scratch space.

The sandbox runs the same pools as processes (tests/vllm/test_sandbox.py), which know none of this. The pools of this
file are its own, beside those of the installation. It is the last that needs the clusters, so they end with these.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, NamedTuple

import httpx
import pytest
import pytest_asyncio
import yaml
from tests.waiting import NotInTime

from prfaas import names
from prfaas.wire import headers
from prfaas_sandbox.demo.client import text_of
from prfaas_sandbox.demo.decide import KILL_CHOICES, DrillChoice
from prfaas_sandbox.demo.install import MEMBER, NAMESPACE, ON_VLLM, ExampleInstallation, example, repository_root
from prfaas_sandbox.demo.steps import ThresholdSampler
from prfaas_sandbox.environment import ClusterAccess
from prfaas_sandbox.kind import vllm

from .checks import apply, condition, eventually, only_on_kind
from .conftest import LINK_MBPS, WHY_NOT_VLLM

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session"), only_on_kind]

POOLS = {"offload": "vllm-offload", "decode": "vllm-decode"}
"""The example's pools by their names here, where other pools have those."""
LONG_TOKENS, SHORT_TOKENS, ANSWER_TOKENS = 6_000, 200, 24
TRIES, COUNTED_SECONDS = 3, 30.0
"""Prometheus reads the counters each few seconds, later on a busy machine."""
RECEIVED = f"sum(max_over_time(prfaas_transfer_received_bytes_total{{pool='{POOLS['decode']}'}}[10m]))"
"""The most of some minutes: a scrape that fails on a busy machine takes a series out of an instant query."""
BROKEN = f"sum(prfaas_transfers_total{{pool='{POOLS['decode']}', direction='receive', outcome='failed'}})"
NOISE = 0.25
"""Of a token's log probability, in bf16."""
NO_NEW_PRIVILEGES, CAPABILITIES, SECCOMP = "NoNewPrivs:\t1", "CapEff:\t0000000000000000", "Seccomp:\t2"


class Answer(NamedTuple):
    """A greedy answer: its tokens, the most likely ones at each place with their log probabilities, and the headers."""

    tokens: list[str]
    likely: list[dict[str, float]]
    decision: str
    cluster: str
    request_id: str

    def is_as(self, other: "Answer") -> bool:
        """Tell whether each token is as likely as in the other answer, up to the first place where these differ.

        In bf16 two ways to compute a prompt may choose differently between tokens that are about as likely.
        """
        for mine, its, here, there in zip(self.tokens, other.tokens, self.likely, other.likely, strict=True):
            if abs(here[mine] - there.get(mine, -math.inf)) > NOISE:
                return False
            if mine != its:
                break
        return True


class OnVllm:
    """The pools of vLLM and the gateway before them."""

    def __init__(self, installation: ExampleInstallation):
        self.installation = installation
        self.environment = installation.environment
        self.sampler = ThresholdSampler(self.environment.prometheus_url, lambda _sample: None)
        self.url = ""

    async def start(self) -> None:
        """Apply the example under names of ours, with one decode instance, and wait until it serves."""
        for cluster in (self.environment.hub, self.environment.member):
            for each in vllm.claim(NAMESPACE):
                await self.environment.kubectl(cluster, "apply", "-f", "-", stdin=json.dumps(each))
        for each in _objects(self.installation):
            await apply(self.installation, each)
        for kind, name in (("dcpool", POOLS["decode"]), ("pfpool", POOLS["offload"]), ("prfaas", ON_VLLM.policy)):
            await self.installation.wait_ready(kind, name, timeout_seconds=ON_VLLM.ready_seconds)
        await self.installation.wait_for("LinkHealthy", "prfaas", ON_VLLM.policy, timeout_seconds=60)
        self.url = await self.environment.forward(self.environment.hub, NAMESPACE, f"{ON_VLLM.policy}-gateway", 80)

    async def _kubectl(self, cluster: ClusterAccess, *words: str) -> str:
        return await self.environment.kubectl(cluster, "-n", NAMESPACE, *words)

    async def pod(self, pool: str) -> dict[str, Any]:
        """Return the only pod of a pool."""
        cluster = self._cluster(pool)
        listed = await self._kubectl(cluster, "get", "pods", "-l", f"{names.LABEL_POOL}={pool}", "-o", "json")
        (pod,) = json.loads(listed)["items"]
        return pod

    def _cluster(self, pool: str) -> ClusterAccess:
        return self.environment.member if pool == POOLS["offload"] else self.environment.hub

    async def in_container(self, pool: str, *words: str) -> str:
        return await self._kubectl(self._cluster(pool), "exec", f"deployment/{pool}", "-c", "worker", "--", *words)

    async def log(self, pool: str) -> str:
        return await self._kubectl(self._cluster(pool), "logs", f"deployment/{pool}", "-c", "worker")

    async def delete_pod(self, pool: str) -> None:
        name = (await self.pod(pool))["metadata"]["name"]
        await self._kubectl(self._cluster(pool), "delete", "pod", name, "--wait=false")

    async def moved(self, query: str) -> float:
        """Return what Prometheus has read last from the connectors' own metrics, 0 before the first reading."""
        read: list[float] = []

        async def is_read() -> bool:
            value = await self.sampler.query(f"{query} or vector(0)")
            read.extend([] if value is None else [value])
            return bool(read)

        await eventually(is_read, "Prometheus answers")
        return read[0]

    async def ask(self, prompt: str, offload: str = "auto", **fields: Any) -> Answer:
        """Return a greedy answer, with what the gateway's headers say of it."""
        body = {"model": ON_VLLM.model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "logprobs": 5}
        async with httpx.AsyncClient(base_url=self.url, timeout=120, trust_env=False) as http:
            try:
                got = await http.post("/v1/completions", json=body | fields, headers={headers.OFFLOAD: offload})
            except httpx.TransportError as error:
                error.add_note(await self.seen())
                raise
        assert got.status_code == 200, f"{got.text}\n{await self.seen()}"
        assert got.json()["usage"]["completion_tokens"] == ANSWER_TOKENS
        logprobs, head = got.json()["choices"][0]["logprobs"], got.headers
        tokens, likely = logprobs["tokens"], logprobs["top_logprobs"]
        return Answer(tokens, likely, head[headers.DECISION], head[headers.PREFILL_CLUSTER], head[headers.REQUEST_ID])

    async def seen(self) -> str:
        """Return what a failure is explained by: the hub's pods, and the end of the gateway's log."""
        return await self._kubectl(self.environment.hub, "get", "pods", "-o", "wide") + await self.gateway_log()

    async def gateway_log(self) -> str:
        words = ("logs", f"deployment/{ON_VLLM.policy}-gateway", "-c", "gateway", "--tail=50")
        return await self._kubectl(self.environment.hub, *words)

    async def logged(self, answer: Answer) -> str:
        """Return the line of the gateway's access log about an answer."""
        found: list[str] = []

        async def is_there() -> bool:
            lines = (await self.gateway_log()).splitlines()
            found.extend(line for line in lines if answer.request_id in line and " outcome=" in line)
            return bool(found)

        await eventually(is_there, "the access log has the request")
        return found[0]

    async def answer_alone(self, prompt: str) -> Answer:
        """Return the answer that the decode instance computes without another. A salt keeps what it caches apart."""
        answer = await self.ask(prompt, "never", cache_salt="alone")
        assert (answer.decision, answer.cluster) == ("local", names.HUB)
        return answer


def _objects(installation: ExampleInstallation) -> list[dict[str, Any]]:
    text = example((repository_root() / ON_VLLM.path).read_text(), installation.environment.images)
    objects = list(yaml.safe_load_all(text))
    for each in objects:
        spec = each["spec"]
        if each["kind"] == "PrfaaSPolicy":
            spec["decodePool"], spec["prefillPools"] = POOLS["decode"], [POOLS["offload"]]
        else:
            each["metadata"]["name"] = POOLS[each["metadata"]["name"]]
            spec["replicas"], spec["template"] = 1, vllm.template(each)
    return objects


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def on_vllm(installation: ExampleInstallation, request: pytest.FixtureRequest) -> AsyncIterator[OnVllm]:
    """Start the pools of vLLM, which end with the clusters; skip where no vLLM can be had, and report it."""
    if why := vllm.why_not():
        request.config.stash[WHY_NOT_VLLM] = why
        pytest.skip(f"vLLM cannot run on kind here: {why}")
    pools = OnVllm(installation)
    async with pools.sampler.running():
        await pools.start()
        yield pools


async def test_a_pool_of_vllm_starts_as_rendered_and_may_nothing_that_it_should_not(on_vllm: OnVllm):
    for pool in POOLS.values():
        pod = await on_vllm.pod(pool)
        first, (worker,) = pod["status"]["initContainerStatuses"], pod["status"]["containerStatuses"]
        assert [one["name"] for one in first] == ["connector", "version"]
        assert [one["state"]["terminated"]["exitCode"] for one in first] == [0, 0]
        assert worker["restartCount"] == 0
        status = await on_vllm.in_container(pool, "cat", "/proc/1/status", "/proc/1/cmdline")
        assert "Uid:\t65532\t65532\t65532\t65532" in status
        assert all(line in status for line in (NO_NEW_PRIVILEGES, CAPABILITIES, SECCOMP))
        assert "vllm" in status, "it replaced the shell that started it: signals of the kubelet reach it"
        write = "touch /here /prfaas-vllm/here /etc/prfaas/tls/here 2>&1 || :"
        assert (await on_vllm.in_container(pool, "sh", "-c", write)).count("Read-only file system") == 3
        log = await on_vllm.log(pool)
        assert "prfaas: data port" in log
        assert "SSLCertRefresher monitors files" in log
    encrypted = await condition(on_vllm.installation, "prfaas", ON_VLLM.policy, "Encrypted")
    assert encrypted["reason"] == "MutualTls"


async def test_a_long_prompt_is_prefilled_by_vllm_in_the_member_and_a_short_one_at_home(on_vllm: OnVllm):
    short = text_of(SHORT_TOKENS, start=40_000)
    short_alone, at_home = await on_vllm.answer_alone(short), await on_vllm.ask(short)
    assert (at_home.decision, at_home.cluster) == ("local", names.HUB)
    assert at_home.is_as(short_alone)
    for number in range(TRIES):
        if await _has_crossed(on_vllm, text_of(LONG_TOKENS, start=200_000 * number)):
            return
    pytest.fail("the destination's own metrics show no cache that it got")


async def _has_crossed(on_vllm: OnVllm, long: str) -> bool:
    """Offload a prompt and check its answer; return whether its cache has crossed.

    A source that is too busy to say that it has the request is not waited for: then the destination computes.
    """
    alone, before = await on_vllm.answer_alone(long), await on_vllm.moved(RECEIVED)
    offloaded = await on_vllm.ask(long, "always")
    assert (offloaded.decision, offloaded.cluster) == ("offload", MEMBER)
    line = await on_vllm.logged(offloaded)
    assert f"prefill_instance={POOLS['offload']}-" in line
    assert "outcome=ok" in line
    assert offloaded.is_as(alone)
    assert not (await on_vllm.answer_alone(long[-SHORT_TOKENS:])).is_as(alone), "a missing cache would be seen"

    async def is_counted() -> bool:
        return await on_vllm.moved(RECEIVED) - before > 300 * LONG_TOKENS

    with suppress(NotInTime):
        await eventually(is_counted, "the destination's own metrics show the cache that it got", COUNTED_SECONDS)
        return True
    return False


async def test_a_prefill_pod_that_is_deleted_in_the_middle_costs_no_answer(on_vllm: OnVllm):
    broken = await on_vllm.moved(BROKEN)
    for number, choice in enumerate(KILL_CHOICES):
        if await _is_deleted_in_the_middle(on_vllm, choice, start=80_000 + 20_000 * number):
            break
    else:
        pytest.fail("each cache had crossed before its prefill pod could be deleted")
    print(f"transfers that broke off: {await on_vllm.moved(BROKEN) - broken:g}")


async def _is_deleted_in_the_middle(on_vllm: OnVllm, choice: DrillChoice, start: int) -> bool:
    """Delete the prefill pod once a part of a cache has arrived, and check the answer.

    Return False, and delete nothing, if the answer was whole by then: a longer cache has to cross.
    """
    prompt = text_of(choice.tokens, start=start)
    expected, before = await on_vllm.answer_alone(prompt), await on_vllm.moved(RECEIVED)
    await on_vllm.environment.shape_link(choice.mbps)
    try:
        asking = asyncio.create_task(on_vllm.ask(prompt, "always"))

        async def has_begun() -> bool:
            return asking.done() or await on_vllm.moved(RECEIVED) > before

        await eventually(has_begun, "a part of the cache has arrived")
        is_in_the_middle = not asking.done()
        if is_in_the_middle:
            await on_vllm.delete_pod(POOLS["offload"])
        answer = await asking
    finally:
        await on_vllm.environment.shape_link(LINK_MBPS)
    assert answer.decision == "offload"
    assert answer.is_as(expected)
    return is_in_the_middle
