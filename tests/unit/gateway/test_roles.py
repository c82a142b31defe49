"""Proves that convertible instances get their role from the gateway until they know it, while requests run."""

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
    """Stands for the way to workers: records the role that each got, and fails on demand."""

    def __init__(self):
        self.sent: list[tuple[str, str]] = []
        self.answer: int | Exception = 200

    async def put(self, worker: Instance, path: str, body: bytes, wait_seconds: float) -> int:
        assert (path, wait_seconds > 0) == ("/v1/role", True)
        self.sent.append((worker.name, json.loads(body)["role"]))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Telling:
    """A publisher with workers and a clock of the test."""

    def __init__(self, make_table):
        self.now_seconds = 0.0
        self.workers = Workers()
        self._state = GatewayState(Limits(), lambda: self.now_seconds)
        self._publisher = RolePublisher(self._state, self.workers)
        self._make_table = make_table

    async def look(self, *instances: Instance) -> list[tuple[str, str]]:
        """Return the roles that this table makes the publisher send now."""
        self._state.set_table(self._make_table(instances=instances))
        self.workers.sent = []
        await self._publisher.send_due()
        return self.workers.sent


@pytest.fixture
def telling(world) -> Telling:
    return Telling(world.write_table)


async def test_before_the_first_table_no_worker_gets_a_role(world):
    workers = Workers()
    await RolePublisher(GatewayState(Limits()), workers).send_due()
    assert workers.sent == []


async def test_sends_a_role_once_and_again_when_it_changes(telling):
    assert await telling.look(instance("a"), instance("b", "prefill")) == [("a", "decode"), ("b", "prefill")]
    assert await telling.look(instance("a"), instance("b", "prefill")) == []
    assert await telling.look(instance("a", "prefill"), instance("b", "prefill")) == [("a", "prefill")]


async def test_sends_roles_only_to_instances_that_convert_and_take_requests(telling):
    fixed = Instance(name="c", pool="p", cluster=HUB, role="decode", url="http://c:8000")
    foreign = instance("b", engine="vllm-nixl")  # serves both roles from its start
    assert await telling.look(instance("a", state="Draining"), fixed, foreign) == []


@pytest.mark.parametrize("answer", [503, UnreachableError("gone"), TimeoutError("slow")])
async def test_sends_what_failed_again_soon_and_logs_it_once(telling, answer, caplog):
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


async def test_sends_a_role_again_to_a_worker_that_may_have_forgotten(telling):
    await telling.look(instance("a"))
    assert await telling.look() == []
    assert await telling.look(instance("a")) == [("a", "decode")], "it left the table and came back"
    assert await telling.look(instance("a", url="http://b:8000")) == [("a", "decode")], "it has another address"
    telling.now_seconds = ROLE_RESEND_SECONDS
    assert await telling.look(instance("a", url="http://b:8000")) == [("a", "decode")], "it got its role long ago"


async def test_a_gateway_tells_its_workers_and_routes_meanwhile(world, short):
    arrived, hold, heard = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def listen(request, body):
        if request.path == "/v1/role" and json.loads(body) == {"role": "prefill"}:
            arrived.set()
            await hold.wait()
            heard.set()
        return await answer(request, body)

    await world.start("d1", "p1")
    answer, world.workers["p1"].reply = world.workers["p1"].reply, listen
    shared = [instance(name, role, world.workers[name].url) for name, role in (("d1", "decode"), ("p1", "prefill"))]
    world.write_table(instances=tuple(shared))
    await arrived.wait()
    got = await world.post(short)
    assert (got.status, got.headers[headers.PREFILL_INSTANCE], heard.is_set()) == (200, "p1", False)
    hold.set()
    await heard.wait()
