"""Proves that an installation outlives what happens to it: an upgrade of the release, a member cluster cut off.

Requests continue all the while, and each must be answered.
"""

import pytest

from prfaas_sandbox.demo.client import DemoClient
from prfaas_sandbox.demo.install import MODEL, NAMESPACE, OFFLOAD_POOL, ExampleInstallation, operator_values
from prfaas_sandbox.demo.records import RequestRecord

from .checks import ask_until_offloaded, asking, condition, eventually, fresh_text, get, only_in_the_sandbox

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]


def failed(records: list[RequestRecord]) -> list[RequestRecord]:
    """Return the requests that were not answered whole."""
    return [record for record in records if record.outcome.startswith("failed") or record.output_tokens == 0]


async def test_an_upgrade_and_a_rollback_of_the_release_lose_no_request(installation: ExampleInstallation):
    environment = installation.environment

    async def read_memory() -> str:
        operator = await get(installation, "deployment", "prfaas-operator")
        return operator["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]["memory"]

    async def settled() -> None:
        await environment.kubectl(
            environment.hub, "-n", NAMESPACE, "rollout", "status", "deployment/prfaas-operator", "--timeout=120s"
        )

    before = await read_memory()
    workers = await worker_pods(installation)
    async with asking(installation) as records:
        values = ("--set", "operator.resources.requests.memory=100Mi")
        await installation.helm_install(environment.hub, "prfaas", *operator_values(environment.images), *values)
        await settled()
        assert await read_memory() == "100Mi"
        await environment.helm(environment.hub, "rollback", "prfaas", "-n", NAMESPACE)
        await settled()
    assert await read_memory() == before
    assert await worker_pods(installation) == workers, "no worker was replaced"
    assert records
    assert failed(records) == []


async def worker_pods(installation: ExampleInstallation) -> list[str]:
    """Return the names of the workers' pods in both clusters."""
    environment = installation.environment
    words = ("-n", NAMESPACE, "get", "pods", "-l", "app.kubernetes.io/component=worker", "-o", "name")
    return sorted(
        "".join([await environment.kubectl(each, *words) for each in (environment.hub, environment.member)]).split()
    )


@only_in_the_sandbox
async def test_a_member_cluster_that_is_cut_off_costs_no_request_and_heals_by_itself(installation: ExampleInstallation):
    environment, client = installation.environment, DemoClient(installation.gateway_url, MODEL)
    member = installation.member_name

    async def ready() -> str:
        return (await condition(installation, "pmc", member))["status"]

    await environment.cut_link()
    try:
        answer = await client.ask(fresh_text(9_000), act="cut off")

        async def is_reported() -> bool:
            return await ready() != "True"

        await eventually(is_reported, "the MemberCluster says that it is not reachable", 180.0)
        pool = await condition(installation, "pfpool", OFFLOAD_POOL)
    finally:
        await environment.restore_link()

    async def is_back() -> bool:
        return await ready() == "True"

    await eventually(is_back, "the MemberCluster is Ready again", 180.0)

    await ask_until_offloaded(client, 9_000, "healed")
    await client.close()
    assert (answer.prefilled_in, answer.output_tokens) == ("hub", 24)
    assert pool["status"] != "True" or pool["message"], "the pool reports what is known of it"
