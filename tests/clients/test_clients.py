"""Real OpenAI clients before a real gateway and real workers: each sees what a plain request gets, whatever it asks
for, whichever cluster prefilled, and whatever dies in the middle.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from ..faults.test_failover import PATIENT, kill, only
from ..serving import serving
from ..unit.gateway.conftest import World
from ..unit.worker.conftest import Worker
from ..waiting import NotInTime, eventually_async
from .cases import HELLO, OFFLOADED, STREAMED, Case, ask_plainly, make_cases
from .install import OLD_GO
from .programs import Clients, find_differences

CASES = make_cases(drawn={"seed": 5})
REQUESTS = "prfaas_gateway_requests_total"
OFFLOADS = REQUESTS + '{decision="offload",outcome="ok"}'
RESUMES = "prfaas_gateway_resumes_total"
ENDLESS = Case(
    "a long answer", STREAMED | {"messages": HELLO, "seed": 3, "max_tokens": 1500}, extra={"ignore_eos": True}
)


@pytest.fixture
async def world(tmp_path: Path, workers: dict[str, Worker]) -> AsyncIterator[World]:
    made = World(tmp_path)
    made.workers.update(workers)  # type: ignore[arg-type]
    async with made.stack:
        await made.start(limits=PATIENT, model="tiny", tokens=300)
        yield made
    assert made.running is not None
    made.running.state.check_integrity()


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
async def test_every_client_sees_what_a_plain_request_gets(world: World, clients: Clients, case: Case):
    only(world, "d1", "x0")
    assert await asyncio.to_thread(find_differences, clients, world.url, case) == {}
    asked = 1 + sum(case.suits(one.name) for one in clients)
    wanted = asked if case.name.startswith(OFFLOADED) else 0

    async def are_counted() -> bool:
        lines = (await world.get_admin("/metrics")).body.decode().splitlines()
        return sum(float(one.rsplit(" ", 1)[1]) for one in lines if one.startswith(REQUESTS + "{")) == asked

    await eventually_async(are_counted, f"{asked} requests are counted")
    assert await world.metric(OFFLOADS) == wanted


async def test_no_client_sees_that_a_worker_dies_in_the_middle_of_its_stream(world: World, clients: Clients):
    only(world, "d1")
    undisturbed = await asyncio.to_thread(ask_plainly, world.url, ENDLESS)

    async def all_of(do):
        return await asyncio.gather(*(asyncio.to_thread(do, one) for one in clients))

    await all_of(lambda one: one.ask(world.url, CASES[1]))  # what each imports for its first stream takes time
    only(world, "d0")
    await all_of(lambda one: one.begin(world.url, ENDLESS))
    only(world, "d0", "d1")
    kill(world.workers["d0"])
    seen = await all_of(lambda one: one.end(ENDLESS))

    assert {one.name: found for one, found in zip(clients, seen, strict=True)} == {
        one.name: undisturbed for one in clients
    }
    if await world.metric(RESUMES) < len(clients):
        raise NotInTime("some streams had ended before their worker was killed")


async def test_a_comment_after_each_event_is_seen_by_old_go_alone(clients: Clients):
    """The control: were the gateway to send what its clients need not know, this matrix would show it."""

    async def stream(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
        for text, reason in (("one ", None), ("two", "stop")):
            choice = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": reason}
            chunk = json.dumps(head | {"choices": [choice]})
            await answer.write(f"data: {chunk}\n\n: a comment\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async with serving(stream) as url:
        asked = Case("comments", STREAMED | {"messages": HELLO})
        seen = {one.name: await asyncio.to_thread(one.ask, url, asked) for one in clients}
    old = seen.pop(OLD_GO)
    assert (old.chunks, old.status, old.error) == (1, 0, "unexpected end of JSON input")
    assert [found.choices[0]["text"] for found in seen.values()] == ["one two"] * (len(clients) - 1)
