"""`prfaas preflight` on two clusters: it measures the link as it is shaped, names what is broken, leaves nothing."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import yaml
from tests.waiting import eventually_async

from prfaas_operator.preflight.jobs import SELECTOR

pytestmark = [pytest.mark.clusters, pytest.mark.asyncio(loop_scope="session")]

MBPS = 100
HOLE_BYTES = 1300
ROUTE = "ip route change 10.245.0.0/16 via 10.245.0.1 dev link0 src 10.244.0.1"
RULE = "to 10.244.0.0/16 ipproto tcp sport 8000 blackhole pref 1"
BREAK = {
    # The hub's end drops what is too large without a word, and still asks for large segments.
    "hub": f"{ROUTE} advmss 1460 && ip link set dev link0 mtu {HOLE_BYTES}",
    # Packets are their own size on the wire, as from a network card.
    "member": f"ip link set dev link0 gso_max_segs 1 && ip rule add {RULE}",
}
MEND = {
    "hub": f"ip link set dev link0 mtu 1500 && {ROUTE}",
    "member": f"ip link set dev link0 gso_max_segs 65535; ip rule del {RULE}",
}


async def preflight(sandbox, *arguments: str) -> tuple[int, dict, dict[str, dict]]:
    """Return the exit code, the report, and the findings about the path by check."""
    command = ["-m", "prfaas.cli.main", "preflight", "--hub", "hub", "--member", "member", "-o", "json"]
    command += ["--server", sandbox.member.internal_server, "--prometheus", sandbox.prometheus_internal_url]
    kubeconfigs = f"{sandbox.hub.kubeconfig}{os.pathsep}{sandbox.member.kubeconfig}"
    done = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        *arguments,
        env={**os.environ, "KUBECONFIG": kubeconfigs},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    said, complaint = await done.communicate()
    assert said, complaint.decode()
    report = json.loads(said)
    return done.returncode or 0, report, {one["check"]: one for one in report["findings"]["path"]}


async def is_clean(pods) -> bool:
    """Return whether nothing is left but what Kubernetes is removing."""
    return not await pods.kubectl(
        "get", "namespaces", "-l", SELECTOR, "--field-selector", "status.phase=Active", "-o", "name"
    )


async def test_two_clusters_that_are_well_are_measured_and_nothing_stays(sandbox, hub, member, tmp_path):
    await sandbox.shape_link(MBPS)
    file = tmp_path / "two-clusters.yaml"

    async def is_measured() -> bool:
        code, report, path = await preflight(sandbox, "--save", str(file))
        assert {one["check"]: one["level"] for one in path.values()} == dict.fromkeys(path, "ok")
        assert code == 0
        assert report["well"]
        assert "scrapes every 1s" in path["Prometheus"]["message"]
        measured = report["path"]["mbps"].values()
        assert all(rate < 1.05 * MBPS for rate in measured)
        return min(measured) > 0.95 * MBPS  # less is a busy machine, unless it is so each time

    await eventually_async(is_measured, f"{MBPS} Mbit/s are measured")
    kinds = [one["kind"] for one in yaml.safe_load_all(file.read_text())]
    assert kinds == ["PrefillPool", "PrefillPool", "DecodePool", "PrfaaSPolicy"]
    for pods in (hub, member):
        assert await is_clean(pods)


@pytest_asyncio.fixture(loop_scope="session")
async def broken_link(hub, member) -> AsyncIterator[None]:
    """Shut port 8000 from the hub, and swallow large packets on the way there."""
    for pods in (hub, member):
        await pods.output("break-link", "sh", "-c", BREAK[pods.cluster.name])
    yield
    for pods in (hub, member):
        await pods.output("mend-link", "sh", "-c", MEND[pods.cluster.name])


async def test_a_shut_port_and_packets_that_vanish_are_named(sandbox, broken_link):
    code, report, path = await preflight(sandbox)
    assert code == 1
    assert not report["well"]
    assert {check for check, one in path.items() if one["level"] != "ok"} == {"port 8000", "MTU"}
    assert path["port 8000"]["message"] == "silent"
    assert "vanish from member to hub" in path["MTU"]["message"]
    assert HOLE_BYTES <= report["path"]["packet_bytes"] <= HOLE_BYTES + 4, "veth lets a VLAN's tag pass in addition"
