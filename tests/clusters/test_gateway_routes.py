"""The gateway follows its routing table on a real API server, with the rights that the operator gives its pods."""

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml
from tests.waiting import PATIENCE_SECONDS, eventually_async

from prfaas.api import PrfaaSPolicy
from prfaas.kube import KubeSession, ObjectRef, StatusError, watch_object
from prfaas.kube.session import CONFIG_MAP, token_of_file
from prfaas.names import ROUTES_KEY, gateway_name, routes_configmap
from prfaas.wire.routes import LinkWatermarks, RoutingTable, Threshold, encode
from prfaas_gateway.table import follow_configmap
from prfaas_operator.render import gateway

pytestmark = pytest.mark.clusters

NAMESPACE = "gateway-routes"
TABLE = RoutingTable(
    policy="kimi",
    namespace=NAMESPACE,
    generation=1,
    model="m",
    on_offload_failure="Reject",
    threshold=Threshold(mode="Auto", tokens=1, min_tokens=1, max_tokens=2),
    watermarks=LinkWatermarks(high_percent=80, low_percent=50),
    short_interval_seconds=1,
)
REF = ObjectRef(CONFIG_MAP, NAMESPACE, routes_configmap("kimi"))


@pytest.fixture(scope="module")
def namespace(hub) -> Iterator[str]:
    """A namespace with a gateway's account and nothing else."""
    hub.kubectl("create", "namespace", NAMESPACE)
    metadata = {"name": "kimi", "namespace": NAMESPACE, "uid": "00000000-0000-0000-0000-000000000000"}
    spec = {"model": "m", "decodePool": "d", "threshold": {"mode": "Disabled"}}
    policy = PrfaaSPolicy.model_validate({"metadata": metadata, "spec": spec})
    for render in (gateway.service_account, gateway.role, gateway.role_binding):
        manifest = render(policy)
        manifest["metadata"] = {"name": manifest["metadata"]["name"], "namespace": NAMESPACE}  # no owner to collect it
        hub.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
    yield NAMESPACE
    hub.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


@pytest.fixture
def session(hub, namespace, tmp_path: Path) -> KubeSession:
    cluster = yaml.safe_load(hub.kubeconfig.read_text())["clusters"][0]["cluster"]
    (tmp_path / "token").write_text(hub.kubectl("-n", namespace, "create", "token", gateway_name("kimi")))
    authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
    return KubeSession(cluster["server"], authorization=token_of_file(tmp_path / "token"), ca_cert_data=authority)


def write(hub, generation: int) -> None:
    document = base64.b64encode(encode(msgspec.structs.replace(TABLE, generation=generation))).decode()
    metadata = {"name": REF.name, "namespace": NAMESPACE}
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "binaryData": {ROUTES_KEY: document}}
    hub.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(body))


async def next_table(tables: asyncio.Queue[RoutingTable]) -> RoutingTable:
    await eventually_async(lambda: not tables.empty(), "the gateway takes a table")
    return tables.get_nowait()


async def test_a_table_is_followed_from_before_its_creation_through_changes_and_deletion(hub, session):
    tables: asyncio.Queue[RoutingTable] = asyncio.Queue()
    async with session:
        following = asyncio.create_task(follow_configmap(session, NAMESPACE, "kimi", tables.put_nowait))
        try:
            for generation in (1, 2):
                await asyncio.to_thread(write, hub, generation)
                assert (await next_table(tables)).generation == generation
            await asyncio.to_thread(hub.kubectl, "-n", NAMESPACE, "delete", "configmap", REF.name)
            await asyncio.to_thread(write, hub, 3)
            assert (await next_table(tables)).generation == 3
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def test_a_watch_outlives_its_windows(hub, session, monkeypatch):
    """The server ends every watch after a second here; changes before, between and after are all seen."""
    monkeypatch.setattr("prfaas.kube.watch.WINDOW_SECONDS", 1)
    await asyncio.to_thread(write, hub, 10)
    versions: list[str] = []
    async with session, asyncio.timeout(PATIENCE_SECONDS):
        async for current in watch_object(session, REF):
            versions.append(current["metadata"]["resourceVersion"])
            if len(versions) == 4:
                break
            await asyncio.sleep(1.3)
            await asyncio.to_thread(write, hub, 10 + len(versions))
    assert len(set(versions)) == 4


async def test_the_account_reads_only_that_object(session):
    async with session:
        for path in (f"/api/v1/namespaces/{NAMESPACE}/configmaps/other", f"/api/v1/namespaces/{NAMESPACE}/secrets"):
            with pytest.raises(StatusError) as refused:
                await session.call("GET", path)
            assert refused.value.status == 403
