"""A caller holds its bodies back: a worker waits for none for ever, and keeps room for the bodies of others."""

import asyncio
from contextlib import suppress
from typing import Final

import pytest

from prfaas.bounds import bodies
from prfaas.bounds.bodies import HeldBytes
from prfaas_worker.assets import model_directory
from prfaas_worker.front import serving
from prfaas_worker.front.serving import ServedModel
from prfaas_worker.tokenizer import load_tokenizer

from ...unit.worker.conftest import Front
from ...waiting import eventually_async

pytestmark = pytest.mark.system

SERVED: Final = ServedModel(model_name="tiny", fingerprint="", vocab_size=264, max_context=1000, max_choices=4)
BODY: Final = b'{"model": "tiny", "prompt": "%s"}' % (b"x" * 400)
ROOM_BYTES: Final = 4 * len(BODY)
FLOOD: Final = 8
ATTACKER, OTHER = "127.0.0.2", "127.0.0.3"


@pytest.fixture
def worker(front: Front, monkeypatch: pytest.MonkeyPatch) -> Front:
    """One with room for four bodies, whose engine nobody asks. All of a body counts while it arrives."""
    monkeypatch.setattr(bodies, "BEGINNING_BYTES", 0)
    monkeypatch.setattr(bodies, "SPARED_SECONDS", 600.0)
    front.serving.loaded(SERVED, load_tokenizer(model_directory("builtin:kimi-linear-tiny")))
    front.serving.bodies = HeldBytes(ROOM_BYTES)
    return front


class Sender:
    """Sends a body to /tokenize from an address, all of it or all but its last byte."""

    def __init__(self, worker: Front, address: str):
        self._worker, self._address = worker, address

    async def send(self, body: bytes) -> "Sender":
        at, local = (self._worker.host, 8000), (self._address, 0)
        self._reader, self._writer = await asyncio.open_connection(*at, local_addr=local)
        head = f"POST /tokenize HTTP/1.1\r\nHost: w\r\nContent-Length: {len(BODY)}\r\n\r\n".encode()
        self._writer.write(head + body)
        await self._writer.drain()
        return self

    async def status(self) -> int:
        return int((await self._reader.readline()).split()[1])

    def close(self) -> None:
        self._writer.close()


async def is_answered(one: Sender, seconds: float) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await one.status() == 408
    return False


async def test_a_body_that_does_not_end_is_given_up(worker: Front, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving, "BODY_SECONDS", 0.2)
    one = await Sender(worker, ATTACKER).send(BODY[:-1])
    assert await one.status() == 408
    one.close()
    assert worker.serving.bodies.all.taken_bytes == 0


async def test_control_without_a_deadline_it_is_kept(worker: Front, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving, "BODY_SECONDS", 600.0)
    one = await Sender(worker, ATTACKER).send(BODY[:-1])
    assert not await is_answered(one, 0.6)
    assert worker.serving.bodies.all.taken_bytes == len(BODY) - 1
    one.close()


async def status_beside_a_flood(worker: Front, held: int) -> int:
    """Hold bodies back from one address until so many are held; return the status of another one's whole body."""
    flood = [await Sender(worker, ATTACKER).send(BODY[:-1]) for _ in range(FLOOD)]
    bodies, held_bytes = worker.serving.bodies, held * (len(BODY) - 1)
    await eventually_async(lambda: bodies.all.taken_bytes == held_bytes, "the room is taken")
    other = await Sender(worker, OTHER).send(BODY)
    try:
        return await other.status()
    finally:
        for one in (*flood, other):
            one.close()


async def test_who_holds_bodies_back_has_half_of_the_room_and_another_is_served(worker: Front):
    assert await status_beside_a_flood(worker, held=2) == 200


async def test_control_who_may_have_all_the_room_keeps_others_out(worker: Front, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bodies, "CLIENT_PART", 1)
    worker.serving.bodies = HeldBytes(ROOM_BYTES)
    assert await status_beside_a_flood(worker, held=4) == 503
