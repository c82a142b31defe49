"""Proves that convertible instances hear their role from the gateway until they know it, while requests go on."""

import asyncio
import json

import pytest

from prfaas.errors import UnreachableError
from prfaas.names import HUB
from prfaas.wire import headers
from prfaas.wire.routes import Instance
from prfaas_gateway.limits import Limits
from prfaas_gateway.state import GatewayState
from prfaas_gateway.table import RETRY_SECONDS, ROLE_RESEND_SECONDS, RolePublisher


def instance(name: str, role: str = "decode", url: str = "http://a:8000", **more) -> Instance:
    return Instance(name=name, pool="shared", cluster=HUB, role=role, url=url, convertible=True, **more)


class Workers:
    """Stands for the way to workers: says what each was told, and fails as it is bidden."""

    def __init__(self):
        self.told: list[tuple[str, str]] = []
        self.answer: int | Exception = 200

    async def put(self, worker: Instance, path: str, body: bytes, wait_seconds: float) -> int:
        assert (path, wait_seconds > 0) == ("/v1/role", True)
        self.told.append((worker.name, json.loads(body)["role"]))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Telling:
    """A publisher with workers and a clock of the test's own."""

    def __init__(self, make_table):
        self.now_seconds = 0.0
        self.workers = Workers()
        self._state = GatewayState(Limits(), lambda: self.now_seconds)
        self._publisher = RolePublisher(self._state, self.workers)
        self._make_table = make_table

    async def look(self, *instances: Instance) -> list[tuple[str, str]]:
        """Return what is told by this table, now."""
        self._state.set_table(self._make_table(instances=instances))
        self.workers.told = []
        await self._publisher.send_due()
        return self.workers.told


@pytest.fixture
def telling(world) -> Telling:
    return Telling(world.write_table)


async def test_before_the_first_table_nobody_is_told(world):
    workers = Workers()
    await RolePublisher(GatewayState(Limits()), workers).send_due()
    assert workers.told == []


async def test_a_role_is_told_once_and_again_when_it_changes(telling):
    assert await telling.look(instance("a"), instance("b", "prefill")) == [("a", "decode"), ("b", "prefill")]
    assert await telling.look(instance("a"), instance("b", "prefill")) == []
    assert await telling.look(instance("a", "prefill"), instance("b", "prefill")) == [("a", "prefill")]


async def test_only_instances_that_convert_and_take_requests_are_told(telling):
    fixed = Instance(name="c", pool="p", cluster=HUB, role="decode", url="http://c:8000")
    foreign = instance("b", engine="vllm-nixl")  # serves both roles from its start
    assert await telling.look(instance("a", state="Draining"), fixed, foreign) == []


@pytest.mark.parametrize("answer", [503, UnreachableError("gone"), TimeoutError("slow")])
async def test_what_failed_is_told_again_soon_and_logged_once(telling, answer, caplog):
    telling.workers.answer = answer
    assert await telling.look(instance("a")) == [("a", "decode")]
    assert await telling.look(instance("a")) == []
    telling.now_seconds = RETRY_SECONDS
    assert await telling.look(instance("a")) == [("a", "decode")]
    assert len(caplog.messages) == 1
    telling.workers.answer = 200
    telling.now_seconds += RETRY_SECONDS
    assert await telling.look(instance("a")) == [("a", "decode")]
    telling.now_seconds += RETRY_SECONDS
    assert await telling.look(instance("a")) == []


async def test_a_worker_that_may_have_forgotten_is_told_again(telling):
    await telling.look(instance("a"))
    assert await telling.look() == []
    assert await telling.look(instance("a")) == [("a", "decode")], "it left the table and came back"
    assert await telling.look(instance("a", url="http://b:8000")) == [("a", "decode")], "it has another address"
    telling.now_seconds = ROLE_RESEND_SECONDS
    assert await telling.look(instance("a", url="http://b:8000")) == [("a", "decode")], "it was told long ago"


async def test_a_gateway_tells_its_workers_and_routes_meanwhile(world, short):
    asked, hold, heard = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def listen(request, body):
        if request.path == "/v1/role" and json.loads(body) == {"role": "prefill"}:
            asked.set()
            await hold.wait()
            heard.set()
        return await answer(request, body)

    await world.start("d1", "p1")
    answer, world.workers["p1"].reply = world.workers["p1"].reply, listen
    shared = [instance(name, role, world.workers[name].url) for name, role in (("d1", "decode"), ("p1", "prefill"))]
    world.write_table(instances=tuple(shared))
    await asked.wait()
    got = await world.post(short)
    assert (got.status, got.headers[headers.PREFILL_INSTANCE], heard.is_set()) == (200, "p1", False)
    hold.set()
    await heard.wait()
