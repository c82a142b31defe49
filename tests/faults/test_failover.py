"""Real workers behind a real gateway: a decode worker that is killed, loses its engine or freezes in the middle of its
streams costs no client a token, and neither does a prefill instance; a client that leaves frees both sides at once.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from prfaas.wire import headers
from prfaas_gateway.limits import Limits

from ..unit.gateway.conftest import World
from ..unit.worker.conftest import Client, Worker

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
ONLY_AB = {"97": 100, "98": 100}
LONG = {"prompt": "def main(", "max_tokens": 400, "ignore_eos": True}
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETION, LONG | {"temperature": 0, "stream_options": {"include_usage": True}}),
    "drawn": (COMPLETION, LONG | {"seed": 11}),
    "two choices with log probabilities": (COMPLETION, LONG | {"seed": 5, "n": 2, "logprobs": 1, "max_tokens": 150}),
    "up to a stop string": (COMPLETION, LONG | {"logit_bias": ONLY_AB, "stop": "babbabba", "seed": 1}),
    "a chat": (
        CHAT,
        {"messages": [{"role": "user", "content": "hi"}], "seed": 3, "max_tokens": 400, "ignore_eos": True},
    ),
}
PATIENT = Limits(stall_seconds=3, recover_seconds=60, eject_seconds=0.1, eject_max_seconds=0.4, drain_lead_seconds=0)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Worker]]:
    """Three decode workers to be lost, one that stays, and a prefill instance to be lost."""
    folder = tmp_path_factory.mktemp("failover")
    roles = {"d0": "decode", "d1": "decode", "d2": "decode", "d3": "decode", "x0": "prefill"}
    started = {name: Worker(folder / f"{name}.log", "--role", role) for name, role in roles.items()}

    async def all_ready() -> None:
        await asyncio.gather(*(worker.ready() for worker in started.values()))

    try:
        asyncio.run(all_ready())
        yield started
    finally:
        for worker in started.values():
            worker.process.send_signal(signal.SIGCONT)
            worker.stop()


@pytest.fixture
async def world(tmp_path: Path, workers: dict[str, Worker]) -> AsyncIterator[World]:
    made = World(tmp_path)
    made.workers.update(workers)  # type: ignore[arg-type]
    async with made.stack:
        await made.start(limits=PATIENT, model="tiny")
        yield made
    assert made.running is not None
    made.running.state.check_integrity()


def only(world: World, *names: str) -> None:
    assert world.table is not None
    instances = tuple(one for one in world.table.instances if one.name in names)
    world.state.set_table(type(world.table)(**{**fields(world.table), "instances": instances}))


def fields(table: Any) -> dict[str, Any]:
    return {name: getattr(table, name) for name in table.__struct_fields__}


def kill(worker: Worker) -> None:
    os.kill(worker.engine_pid, signal.SIGKILL)
    worker.process.kill()


def kill_engine(worker: Worker) -> None:
    os.kill(worker.engine_pid, signal.SIGKILL)


def freeze(worker: Worker) -> None:
    engine_pid = worker.engine_pid
    worker.process.send_signal(signal.SIGSTOP)
    os.kill(engine_pid, signal.SIGSTOP)


class Reading:
    """One stream while a client reads it."""

    def __init__(self, answer: aiohttp.ClientResponse):
        self.answer = answer
        self.data = b""

    async def some(self) -> None:
        self.data += await self.answer.content.readany()

    async def rest(self) -> "Reading":
        async with self.answer:
            self.data += await self.answer.content.read()
        return self

    def parse(self) -> dict[int | str, Any]:
        """Return what the client reads: text, tokens and reasons by choice, and the usage."""
        lines = [line[6:] for line in self.data.split(b"\n") if line.startswith(b"data: ")]
        assert lines[-1] == b"[DONE]", self.data[-500:]
        found: dict[int | str, Any] = {}
        for event in map(json.loads, lines[:-1]):
            found["usage"] = {name: event.get("usage") and event["usage"][name] for name in ("completion_tokens",)}
            for choice in event["choices"]:
                own = found.setdefault(choice["index"], {"text": "", "reason": None, "tokens": []})
                delta = choice.get("delta", {})
                own["text"] += choice.get("text") or delta.get("content") or ""
                own["tokens"] += (choice["logprobs"] or {}).get("tokens", ())
                own["reason"] = choice["finish_reason"] or own["reason"]
        return found


async def open_stream(client: Client, url: str, kind: str) -> Reading:
    path, body = STREAMS[kind]
    return Reading(await client.session.post(f"{url}{path}", json={"model": "tiny", "stream": True, **body}))


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=240)) as session:
        yield Client(session)


@pytest.fixture(scope="module")
def undisturbed(workers: dict[str, Worker]) -> dict[str, dict[int | str, Any]]:
    """What a worker that nothing happens to answers."""

    async def ask() -> dict[str, dict[int | str, Any]]:
        async with aiohttp.ClientSession() as session:
            opened = [await open_stream(Client(session), workers["d3"].url, kind) for kind in STREAMS]
            found = {kind: (await one.rest()).parse() for kind, one in zip(STREAMS, opened, strict=True)}
            stopped = found["up to a stop string"][0]
            assert (stopped["reason"], len(stopped["text"]) > 100) == ("stop", True), f"another seed, please: {stopped}"
            return found

    return asyncio.run(ask())


@pytest.mark.parametrize(("victim", "end"), [("d0", kill), ("d1", kill_engine), ("d2", freeze)])
async def test_streams_of_a_worker_that_is_lost_come_out_as_undisturbed_ones(
    world, workers, client, undisturbed, victim, end
):
    only(world, victim)
    opened = await asyncio.gather(*(open_stream(client, world.url, kind) for kind in STREAMS))
    await asyncio.gather(*(stream.some() for stream in opened))
    only(world, victim, "d3")
    end(workers[victim])
    await asyncio.gather(*(stream.rest() for stream in opened))
    for kind, stream in zip(STREAMS, opened, strict=True):
        assert stream.parse() == undisturbed[kind], kind
    assert await world.metric("prfaas_gateway_resumes_total") >= 2, "or nothing was in the middle when it was lost"
    assert await world.metric('prfaas_gateway_requests_total{decision="local",outcome="failed"}') == 0


async def test_a_client_that_leaves_frees_both_sides_at_once(world, workers, client):
    only(world, "d3", "x0")
    body = {"model": "tiny", "prompt": "x" * 30_000, "max_tokens": 1, "cache_salt": "leaves"}
    asking = asyncio.create_task(client.session.post(f"{world.url}{COMPLETION}", json=body))
    await client.eventually(workers["x0"], prfaas_prefills_running=1)
    asking.cancel()
    await client.eventually(workers["x0"], prfaas_prefills_running=0, prfaas_prefills_waiting=0)
    await client.eventually(workers["d3"], prfaas_requests_running=0, prfaas_requests_waiting=0)


async def test_a_prefill_instance_that_is_killed_costs_no_request(world, workers, client):
    only(world, "d3", "x0")
    body = {"model": "tiny", "prompt": "x" * 12_000, "max_tokens": 8, "temperature": 0, "cache_salt": "killed"}
    asking = asyncio.create_task(client.session.post(f"{world.url}{COMPLETION}", json=body))
    await client.eventually(workers["x0"], prfaas_prefills_running=1)
    kill(workers["x0"])
    async with await asking as answer:
        assert (answer.status, answer.headers[headers.OUTCOME]) == (200, "fallback")
        text = (await answer.json())["choices"][0]["text"]
    only(world, "d3")
    async with client.session.post(f"{world.url}{COMPLETION}", json=body) as answer:
        assert (await answer.json())["choices"][0]["text"] == text
