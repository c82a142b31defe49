"""Proves on two real clusters that the parts make one system: routing, scaling and healing.

The tests share one installation; each leaves it as it found it.
"""

import json

import httpx
import pytest

from prfaas_sandbox.demo.client import DemoClient, text_of
from prfaas_sandbox.demo.install import MODEL, NAMESPACE, OFFLOAD_POOL, POLICY, ExampleInstallation

from .checks import ask_until_offloaded, eventually, fresh_text, get, only_in_the_sandbox

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]


async def test_a_long_prompt_is_prefilled_in_the_other_cluster_and_a_short_one_at_home(
    installation: ExampleInstallation,
):
    client = DemoClient(installation.gateway_url, MODEL)
    short = await client.ask(text_of(100), act="short")
    _, long = await ask_until_offloaded(client, 12_000, "long")
    await client.close()
    assert (short.decision, short.prefilled_in, short.outcome) == ("local", "hub", "ok")
    assert (long.decision, long.outcome) == ("offload", "ok")
    assert long.kv_bytes > short.kv_bytes
    assert 0 < long.first_byte_seconds < long.prefill_seconds, "the cache leaves while the prefill runs"
    assert long.output_tokens == short.output_tokens == 24


@only_in_the_sandbox
async def test_the_answer_does_not_depend_on_where_the_prompt_was_prefilled(installation: ExampleInstallation):
    environment, client = installation.environment, DemoClient(installation.gateway_url, MODEL)
    prompt, offloaded = await ask_until_offloaded(client, 6_000, "offloaded")

    async def set_mode(mode: str) -> None:
        patch = json.dumps({"spec": {"threshold": {"mode": mode}}})
        await environment.kubectl(
            environment.hub, "-n", NAMESPACE, "patch", "prfaas", POLICY, "--type=merge", "-p", patch
        )

    await set_mode("Disabled")
    try:
        local = offloaded

        async def prefilled_at_home() -> bool:
            nonlocal local
            local = await client.ask(prompt, act="local")
            return local.prefilled_in == "hub"

        await eventually(prefilled_at_home, "mode Disabled keeps every prompt at home")
    finally:
        await set_mode("Auto")
        await client.close()
    assert local.text == offloaded.text


@only_in_the_sandbox
async def test_each_pool_scales_on_its_own_with_kubectl(installation: ExampleInstallation):
    environment = installation.environment

    async def ready(pool: str) -> int:
        return (await get(installation, "pfpool", pool))["status"].get("readyReplicas", 0)

    async def scale(pool: str, replicas: int) -> None:
        await environment.kubectl(environment.hub, "-n", NAMESPACE, "scale", f"pfpool/{pool}", f"--replicas={replicas}")

    await scale("local", 2)

    async def local_is_two() -> bool:
        return await ready("local") == 2

    await eventually(local_is_two, "pool local has 2 ready instances")
    assert await ready(OFFLOAD_POOL) == 1
    await scale(OFFLOAD_POOL, 0)

    async def offload_has_ended() -> bool:
        return (await get(installation, "pfpool", OFFLOAD_POOL))["status"].get("replicas", 0) == 0

    await eventually(offload_has_ended, "pool offload has no instance")
    client = DemoClient(installation.gateway_url, MODEL)

    async def served_at_home() -> bool:
        """Ask until the instance that leaves, which serves on until that is known, takes nothing more."""
        record = await client.ask(fresh_text(12_000), act="no offload pool")
        assert record.output_tokens == 24
        return record.prefilled_in == "hub"

    await eventually(served_at_home, "a long prompt is prefilled at home")
    await scale(OFFLOAD_POOL, 1)
    await scale("local", 1)
    await installation.wait_ready("pfpool", OFFLOAD_POOL, timeout_seconds=180)
    await ask_until_offloaded(client, 12_000, "again")
    await client.close()


@only_in_the_sandbox
async def test_requests_are_served_while_the_operator_is_away(installation: ExampleInstallation):
    environment, client = installation.environment, DemoClient(installation.gateway_url, MODEL)
    hub = environment.hub
    await environment.kubectl(hub, "-n", NAMESPACE, "scale", "deployment/prfaas-operator", "--replicas=0")
    await environment.kubectl(
        hub,
        "-n",
        NAMESPACE,
        "wait",
        "--for=delete",
        "pod",
        "-l",
        "app.kubernetes.io/component=operator",
        "--timeout=120s",
    )
    short = await client.ask(fresh_text(100), act="alone")
    await ask_until_offloaded(client, 9_000, "alone")
    await environment.kubectl(hub, "-n", NAMESPACE, "scale", "deployment/prfaas-operator", "--replicas=1")
    await environment.kubectl(hub, "-n", NAMESPACE, "rollout", "status", "deployment/prfaas-operator", "--timeout=120s")
    await client.close()
    assert (short.prefilled_in, short.output_tokens) == ("hub", 24)


async def test_operator_gateway_and_scheduler_stay_small(installation: ExampleInstallation):
    limits = {"prfaas-operator:9090": 150e6, f"{POLICY}-gateway:8082": 100e6, f"{POLICY}-gateway:9091": 100e6}
    resident: dict[str, float] = {}

    async def all_are_scraped() -> bool:
        async with httpx.AsyncClient(base_url=installation.environment.prometheus_url, timeout=10) as http:
            answer = await http.get("/api/v1/query", params={"query": "process_resident_memory_bytes"})
        for result in answer.json()["data"]["result"]:
            deployment = result["metric"]["pod"].rsplit("-", 2)[0]
            resident[f"{deployment}:{result['metric']['instance'].rsplit(':')[-1]}"] = float(result["value"][1])
        return set(limits) <= set(resident)

    await eventually(all_are_scraped, "Prometheus has seen operator, gateway and scheduler")
    assert {name: size for name, size in resident.items() if size > limits.get(name, size)} == {}
