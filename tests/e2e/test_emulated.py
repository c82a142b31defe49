"""Proves that emulated instances serve in pools: all but their computing is the installation's own.

The objects are those of the example, one instance each, beside those of the installation.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import yaml

from prfaas.capacity.builtin import read_builtin
from prfaas.capacity.profile import prefill_seconds
from prfaas_sandbox.demo.client import DemoClient
from prfaas_sandbox.demo.install import NAMESPACE, POLICY, ExampleInstallation, example, repository_root

from .checks import apply, ask_until_offloaded, condition, get, only_in_the_sandbox

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

PATH = repository_root() / "examples/engines/emulated.yaml"
PROFILE = read_builtin("", "qwen3.5-397b-fp8-8xh200")
CACHE_SCALE = 128
TOKENS = 20_000


@asynccontextmanager
async def rehearsal(installation: ExampleInstallation) -> AsyncIterator[dict[str, Any]]:
    """Have the example's objects, which load at once and are measured as the installation's are; give its policy."""
    environment, standing = installation.environment, (await get(installation, "prfaas", POLICY))["spec"]
    *pools, policy = yaml.safe_load_all(example(PATH.read_text(), environment.images))
    policy["spec"] |= {"metrics": standing["metrics"], "gateway": standing.get("gateway", {})}
    for pool in pools:
        pool["spec"]["replicas"] = 1
        pool["spec"]["engine"]["args"].append("--load-seconds=0")
    try:
        for body in (*pools, policy):
            await apply(installation, body)
        await installation.wait_ready("prfaas", policy["metadata"]["name"], timeout_seconds=240)
        yield policy
    finally:
        for body in (policy, *pools):
            words = ("delete", body["kind"], body["metadata"]["name"], "--timeout=120s", "--ignore-not-found")
            await environment.kubectl(environment.hub, "-n", NAMESPACE, *words)


@only_in_the_sandbox
async def test_a_rehearsal_takes_the_time_of_the_profile_and_sends_the_scaled_cache(installation: ExampleInstallation):
    async with rehearsal(installation) as policy:
        environment, name = installation.environment, policy["metadata"]["name"]
        url = await environment.forward(environment.hub, NAMESPACE, f"{name}-gateway", 80)
        client = DemoClient(url, policy["spec"]["model"])
        _, record = await ask_until_offloaded(client, TOKENS, "rehearsed")
        await client.close()
        proven = await condition(installation, "pfpool", policy["spec"]["prefillPools"][0], "EngineProven")
    assert (proven["status"], proven["reason"]) == ("False", "Emulated")
    assert record.prefill_seconds >= 0.99 * prefill_seconds(PROFILE.profile(), TOKENS)
    wanted_bytes = (PROFILE.state_bytes + TOKENS * PROFILE.token_bytes) / CACHE_SCALE
    assert record.kv_bytes == pytest.approx(wanted_bytes, rel=0.01)
