"""Proves that the gateway follows its routing table, in a file or a ConfigMap, and never loses one to damage."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from tests.serving import serving as serve_http
from tests.tables import make_table
from tests.waiting import eventually_async

from prfaas.errors import ConfigError, ProtocolError
from prfaas.kube import KubeSession
from prfaas.wire.routes import RoutingTable, encode
from prfaas_gateway.options import GatewayOptions
from prfaas_gateway.server import serving
from prfaas_gateway.table import follow_configmap, follow_file, read_configmap, read_file

pytestmark = pytest.mark.system


def generation(number: int) -> RoutingTable:
    return make_table(generation=number)


def configmap(document: bytes | str, version: int = 1) -> dict:
    data = document if isinstance(document, str) else base64.b64encode(document).decode()
    return {"metadata": {"resourceVersion": str(version)}, "binaryData": {"routes.json.gz": data}}


class Following:
    """A source at work, and the tables it has delivered."""

    def __init__(self):
        self.tables: asyncio.Queue[RoutingTable] = asyncio.Queue()
        self.task: asyncio.Task | None = None

    def start(self, follow, *arguments) -> None:
        self.task = asyncio.create_task(follow(*arguments))

    async def next(self) -> RoutingTable:
        await eventually_async(lambda: not self.tables.empty(), "a table is delivered")
        return self.tables.get_nowait()


@pytest.fixture
async def following() -> AsyncIterator[Following]:
    made = Following()
    yield made
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)


async def test_a_file_is_read_and_read_again_when_it_changes(tmp_path, following):
    path = tmp_path / "routes"
    path.write_bytes(encode(generation(1)))
    following.start(follow_file, path, following.tables.put_nowait, 0.01)
    assert (await following.next()).generation == 1
    path.write_bytes(msgspec.json.encode(generation(2)))  # plain JSON is as good
    assert (await following.next()).generation == 2
    replacement = tmp_path / "new"
    replacement.write_bytes(encode(generation(3)))
    replacement.rename(path)
    assert (await following.next()).generation == 3


@pytest.mark.parametrize("damage", [b"", b"{}", b"\x1f\x8bgarbage", None])
async def test_a_damaged_or_vanished_file_keeps_the_last_table(tmp_path, following, damage, caplog):
    path = tmp_path / "routes"
    path.write_bytes(encode(generation(1)))
    following.start(follow_file, path, following.tables.put_nowait, 0.01)
    await following.next()
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage)
    await eventually_async(lambda: "keeping the last table" in caplog.text, "the gateway says that it keeps the table")
    path.write_bytes(encode(generation(2)))
    assert (await following.next()).generation == 2


async def test_a_gateway_does_not_start_on_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="--routes-file"):
        async with serving(GatewayOptions("127.0.0.1", 0, 0, routes_file=tmp_path / "absent")):
            pass
    with pytest.raises(ConfigError):
        read_file(Path("/"))


async def test_a_running_gateway_takes_a_changed_file(world):
    await world.start("d0")
    world.write_table(model="other")
    await eventually_async(lambda: world.state.table.model == "other", "the gateway takes the changed file")
    assert [one["id"] for one in (await world.get("/v1/models")).json["data"]] == ["other"]


@pytest.mark.parametrize(
    "current", [{}, {"binaryData": None}, configmap("%%%"), configmap(b"{}"), {"data": {"x": "y"}}]
)
def test_a_configmap_without_a_readable_table_is_refused(current):
    with pytest.raises(ProtocolError):
        read_configmap(current)


async def test_a_configmap_is_followed_through_damage_and_deletion(following):
    events: asyncio.Queue = asyncio.Queue()

    async def api_server(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            known = configmap(encode(generation(1)))
            return web.json_response({"metadata": known["metadata"], "items": [known]})
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            kind, current = await events.get()
            await response.write(json.dumps({"type": kind, "object": current}).encode() + b"\n")

    async with serve_http(api_server) as url, KubeSession(url) as session:
        following.start(follow_configmap, session, "n", "p", following.tables.put_nowait)
        assert (await following.next()).generation == 1
        events.put_nowait(("MODIFIED", configmap(b"damaged", 2)))
        events.put_nowait(("MODIFIED", configmap(encode(generation(1)), 3)))  # equal: no change for the gateway
        events.put_nowait(("DELETED", configmap(encode(generation(1)), 4)))
        events.put_nowait(("ADDED", configmap(encode(generation(2)), 5)))
        assert (await following.next()).generation == 2
        assert following.tables.empty()
        following.task.cancel()
