"""Proves that the authority of all certificates is replaced while requests continue: none fails, and none falls back.

What the charts install is inside TLS without a word of configuration; here only the waiting between steps is shortened.
When pods read a changed Secret is up to kubelets. Without these, tests/clusters/operator_/test_certificates_change.py
has the operator's steps, and tests/unit/worker/test_two_workers_tls.py two workers that meet them under load.
"""

import asyncio
import base64
import json

import pytest

from prfaas import identity
from prfaas_sandbox.demo.client import DemoClient, text_of
from prfaas_sandbox.demo.install import MODEL, NAMESPACE, ExampleInstallation, operator_values
from prfaas_sandbox.demo.records import RequestRecord

from .checks import eventually, only_on_kind

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

SETTLE_SECONDS = 16
"""Kubelets, as kind-configs/ has them, read Secrets again every 5 to 8 s."""
CHANGE_SECONDS = 240.0


async def authorities(installation: ExampleInstallation) -> list[set[str]]:
    """Return the certificates' digests in each cluster's ca.crt."""
    environment, found = installation.environment, []
    for cluster in (environment.hub, environment.member):
        command = ("-n", NAMESPACE, "get", "secret", "prfaas-tls", "-o", "json")
        secret = json.loads(await environment.kubectl(cluster, *command))
        found.append(set(identity.by_digest(base64.b64decode(secret["data"]["ca.crt"]))))
    return found


@only_on_kind
async def test_an_authority_is_replaced_under_load_without_a_failed_or_rerouted_request(
    installation: ExampleInstallation,
):
    environment = installation.environment
    values = (*operator_values(environment.images), "--set", f"certificates.settleSeconds={SETTLE_SECONDS}")
    await installation.helm_install(environment.hub, "prfaas", *values)
    command = ("-n", NAMESPACE, "rollout", "status", "deployment/prfaas-operator", "--timeout=120s")
    await environment.kubectl(environment.hub, *command)
    before = await authorities(installation)
    records: list[RequestRecord] = []
    done = asyncio.Event()

    async def load() -> None:
        client = DemoClient(installation.gateway_url, MODEL)
        while not done.is_set():
            tokens = 9_000 if len(records) % 3 == 0 else 100
            records.append(await client.ask(text_of(tokens, start=500_000 + len(records) * 31), act="rotation"))
        await client.close()

    async def is_replaced() -> bool:
        now = await authorities(installation)
        return all(len(one) == 1 for one in now) and now[0] == now[1] and not now[0] & before[0]

    loading = asyncio.create_task(load())
    try:
        patch = ("patch", "secret", "prfaas-ca", "--type=merge", "-p", '{"data": {"tls.key": null}}')
        await environment.kubectl(environment.hub, "-n", NAMESPACE, *patch)
        await eventually(is_replaced, "both clusters trust only a new authority", CHANGE_SECONDS)
        # What was judged by the former authority is judged only by the new one now, also where it is kept open.
        await asyncio.sleep(SETTLE_SECONDS)
    finally:
        done.set()
        await loading
    offloads = [record for record in records if record.decision == "offload"]
    assert offloads
    assert [record for record in records if record.outcome != "ok"] == []
    assert {record.prefilled_in for record in offloads} == {installation.member_name}
