"""A client wants to know what others ask for, by the gateway's page and metrics, or to have its pods killed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
from tests.unit.gateway.conftest import QUICK, Answered, World
from tests.waiting import eventually_async

from prfaas.http_server import ConnectionBounds
from prfaas_gateway.limits import Limits

ALICE: Final = "sk-alice-0123456789abcdef"
BOB: Final = {"Authorization": "Bearer sk-bob-0123456789abcdef"}
SECRET: Final = "merger-with-ACME-model"
PATHS: Final = ("/ui", "/ui/", "/ui/state", "/ui/app.js", "/metrics")


@pytest.fixture
async def asked(world: World, tmp_path: Path) -> World:
    """A gateway that alice has asked for a model that it does not serve."""
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "alice").write_text(ALICE)
    (keys / "bob").write_text(BOB["Authorization"].removeprefix("Bearer "))
    await world.start("d0", keys_dir=keys)
    body = {"model": SECRET, "prompt": "hello"}
    got = await world.post(body, "/v1/completions", headers={"Authorization": f"Bearer {ALICE}"})
    assert got.status == 404
    return world


async def got(url: str, world: World) -> Answered:
    async with world.client.get(url, headers=BOB) as answer:
        return Answered(answer.status, dict(answer.headers), await answer.read())


@pytest.mark.parametrize("path", PATHS)
async def test_the_clients_port_shows_nothing_of_other_clients(asked, path):
    assert (await got(asked.url + path, asked)).status == 404


async def test_control_whoever_reaches_the_other_port_reads_what_all_ask_for(asked):
    state, metrics = [await got(asked.admin_url + path, asked) for path in ("/ui/state", "/metrics")]
    assert SECRET in state.body.decode()
    assert metrics.status == 200


async def test_the_other_port_serves_no_model(asked):
    async with asked.client.post(f"{asked.admin_url}/v1/completions", json={"model": "m"}) as answer:
        assert answer.status == 404
    assert (await got(f"{asked.admin_url}/v1/models", asked)).status == 404


@asynccontextmanager
async def half_heads(world: World, **changed: float) -> AsyncIterator[int]:
    """Take all connections of the admin port from two addresses with half a head each; yield the port."""
    bounds = Limits().admin_connections._replace(most=4, **changed)
    await world.start("d0", limits=QUICK._replace(admin_connections=bounds))
    port, held = world.running.admin_port, []
    for number in range(bounds.most):
        _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(f"127.0.0.{2 + number % 2}", 0))
        writer.write(b"G")
        held.append(writer)
    try:
        yield port
    finally:
        for writer in held:
            writer.close()


async def test_who_takes_all_connections_of_the_other_port_with_half_heads_has_no_pod_killed(world):
    async with half_heads(world) as port:

        async def is_served() -> bool:
            return await probe(port) == 200

        await eventually_async(is_served, "half a head makes room")


async def test_control_where_half_heads_are_spared_the_probe_is_refused(world):
    async with half_heads(world, spared_seconds=600.0) as port:
        assert [await probe(port) for _ in range(3)] == [503] * 3


async def probe(port: int) -> int:
    """Return the status that a new connection gets for a probe."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: g\r\n\r\n")
    head = (await reader.readline()).split()
    writer.close()
    return int(head[1])


async def test_who_takes_all_connections_has_no_pod_killed(world):
    bounds = ConnectionBounds(most=4, head_seconds=600.0)
    await world.start("d0", limits=QUICK._replace(connections=bounds))
    held = [await asyncio.open_connection("127.0.0.1", world.running.port) for _ in range(bounds.most)]
    try:

        async def is_full() -> bool:
            return await probe(world.running.port) == 503

        # This is the control, too: a probe at the clients' port fails.
        await eventually_async(is_full, "the clients' port has no room")
        assert await probe(world.running.admin_port) == 200
    finally:
        for _, writer in held:
            writer.close()
