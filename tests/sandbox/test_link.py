"""The link between the clusters is real: pods reach each other over it, and no faster than its token bucket allows."""

import itertools

import pytest
import pytest_asyncio
from tests.waiting import eventually_async

pytestmark = [pytest.mark.clusters, pytest.mark.asyncio(loop_scope="session")]

SERVE = """
import os, socket
listener = socket.create_server((os.environ["POD_IP"], 8001))
while True:
    connection, _ = listener.accept()
    with connection:
        size = int(connection.recv(32) or 0)  # a probe says nothing
        connection.sendall(bytes(size))
        connection.recv(1)
"""
FETCH = """
import socket, sys, time
address, size = sys.argv[1], int(sys.argv[2])
with socket.create_connection((address, 8001)) as connection:
    connection.sendall(str(size).encode())
    seen, started = 0, time.monotonic()
    buffer = bytearray(1 << 20)
    while seen < size:
        seen += connection.recv_into(buffer)
    print(seen * 8 / 1e6 / (time.monotonic() - started))
"""
POD_IP = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


@pytest_asyncio.fixture(loop_scope="session")
async def addresses(hub, member):
    """The address of a pod in each cluster that sends as many bytes as a client requests."""
    found = {}
    for pods in (hub, member):
        probe = {"tcpSocket": {"port": 8001}, "periodSeconds": 1}
        await pods.run("sender", "python3", "-c", SERVE, env=[POD_IP], readinessProbe=probe)
        await pods.ready("sender")
        found[pods.cluster.name] = (await pods.get("sender"))["status"]["podIP"]
    return found


@pytest.mark.parametrize(("mbps", "megabytes"), [(5, 1), (40, 8), (200, 40)])
async def test_measured_rate_follows_the_shaped_one_both_ways(sandbox, hub, member, addresses, mbps, megabytes):
    await sandbox.shape_link(mbps)
    for receiver, sender in ((hub, "member"), (member, "hub")):
        tries = itertools.count()

        async def is_reached(receiver=receiver, sender=sender, tries=tries) -> bool:
            name, size = f"fetch-{mbps}-{next(tries)}", str(megabytes * 1_000_000)
            shown = float(await receiver.output(name, "python3", "-c", FETCH, addresses[sender], size))
            assert shown <= 1.1 * mbps
            return shown >= 0.85 * mbps  # less is a busy machine, unless it is so each time

        await eventually_async(is_reached, f"{receiver.cluster.name} receives {mbps} Mbit/s")


async def test_within_a_cluster_nothing_is_shaped(sandbox, hub, addresses):
    await sandbox.shape_link(5)
    shown = await hub.output("fetch-local", "python3", "-c", FETCH, addresses["hub"], "100000000")
    assert float(shown) > 50, "ten times the link's rate"
