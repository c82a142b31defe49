"""Proves that new templates reach every pool and the gateway, under load in both clusters, without a failed request."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from prfaas_sandbox.demo.client import DemoClient, text_of
from prfaas_sandbox.demo.install import MODEL, NAMESPACE, OFFLOAD_POOL, POLICY, ExampleInstallation
from prfaas_sandbox.demo.records import RequestRecord

from .checks import eventually, only_on_kind

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

STREAMS = ((200, 400), (200, 400), (6_000, 100))
"""What clients ask for, one after the other, each for itself: tokens of the prompt, tokens of the answer."""
ROLL = {"spec": {"template": {"annotations": {"example.com/rolled": "yes"}}}}
POOLS = (("dcpool", "decode"), ("pfpool", "local"), ("pfpool", OFFLOAD_POOL))
ROLLED_SECONDS = 240.0


@asynccontextmanager
async def load(installation: ExampleInstallation) -> AsyncIterator[list[RequestRecord]]:
    """Stream answers all the while; the records are whole when the block has ended."""
    records: list[RequestRecord] = []
    ending = asyncio.Event()

    async def stream(index: int, prompt_tokens: int, max_tokens: int) -> None:
        client = DemoClient(installation.gateway_url, MODEL)
        number = 0
        while not ending.is_set():
            prompt = text_of(prompt_tokens, start=700_000 + 100_000 * index + 97 * number)
            records.append(await client.ask(prompt, act=str(max_tokens), max_tokens=max_tokens))
            number += 1
        await client.close()

    async with asyncio.TaskGroup() as group:
        for index, stream_of in enumerate(STREAMS):
            group.create_task(stream(index, *stream_of))
        try:
            yield records
        finally:
            ending.set()


async def pods(installation: ExampleInstallation) -> set[str]:
    """Return the names of all worker and gateway pods in both clusters that belong to the example."""
    environment = installation.environment
    deployments = ",".join(("decode", "local", OFFLOAD_POOL))
    chosen = (f"prfaas.io/pool in ({deployments})", f"prfaas.io/policy={POLICY}")
    words = [("-n", NAMESPACE, "get", "pods", "-l", selector, "-o", "name") for selector in chosen]
    clusters = (environment.hub, environment.member)
    found = await asyncio.gather(*(environment.kubectl(cluster, *each) for cluster in clusters for each in words))
    return set("".join(found).split())


async def roll(installation: ExampleInstallation) -> None:
    """Change the template of every Deployment at once, and wait until no pod of the old one is left."""
    environment, hub = installation.environment, installation.environment.hub
    old = await pods(installation)
    for kind, name in POOLS:
        await environment.kubectl(hub, "-n", NAMESPACE, "patch", kind, name, "--type=merge", "-p", json.dumps(ROLL))
    gateway = json.dumps({"spec": {"gateway": {"drainSeconds": 90}}})
    await environment.kubectl(hub, "-n", NAMESPACE, "patch", "prfaas", POLICY, "--type=merge", "-p", gateway)

    async def replaced() -> bool:
        now = await pods(installation)
        return len(now) >= len(POOLS) + 1 and not now & old

    await eventually(replaced, "every pod is of the new template", ROLLED_SECONDS)
    for kind, name in (*POOLS, ("prfaas", POLICY)):
        await installation.wait_ready(kind, name, timeout_seconds=120)


@only_on_kind
async def test_every_pool_and_the_gateway_roll_under_load_without_a_failed_request(installation: ExampleInstallation):
    async with load(installation) as records:
        await roll(installation)
        served = len(records)

        async def continues() -> bool:
            after = records[served:]
            return len(after) >= len(STREAMS) and any(one.prefilled_in == installation.member_name for one in after)

        await eventually(continues, "requests are answered after the update, in both clusters")
    assert [record for record in records if not record.outcome.startswith(("ok", "fallback"))] == []
    assert [record for record in records if record.output_tokens != int(record.act)] == []
