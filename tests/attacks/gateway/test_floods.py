"""A stranger wants a gateway's descriptors and memory: by heads that never end, by many connections, by held bodies."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from tests.unit.gateway.conftest import QUICK, answer
from tests.waiting import eventually_async

from prfaas import http_server
from prfaas.bounds import bodies
from prfaas.bounds.bodies import BodyPlace
from prfaas.http_server import ConnectionBounds

HALF_A_HEAD: Final = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nX-a: "
WHOLE: Final = b"GET /healthz HTTP/1.1\r\nHost: g\r\n\r\n"
SHORT: Final = ConnectionBounds(most=40, head_seconds=0.3)
NO_BOUNDS: Final = ConnectionBounds(most=1000, head_seconds=600.0)
BODY_BYTES: Final = 400_000
MANY_PIECES_BYTES: Final = 4_000_000
FLOOD: Final = 12
KEY: Final = "sk-0123456789abcdef-"
ELSEWHERE: Final = "127.0.0.4"


class Line(NamedTuple):
    """A stranger's connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def status(self) -> int:
        """Return the status of the next answer; 0 if the connection was closed without one."""
        head = (await self.reader.readline()).split()
        return int(head[1]) if head else 0


@asynccontextmanager
async def lines(world, count: int, *sent: bytes, address: str = "127.0.0.1") -> AsyncIterator[list[Line]]:
    """Open connections from an address that each send some bytes, and read what comes."""
    at, local = ("127.0.0.1", world.running.port), (address, 0)
    opened = [Line(*await asyncio.open_connection(*at, local_addr=local)) for _ in range(count)]
    try:
        for one in opened:
            for data in sent:
                await one.send(data)
        yield opened
    finally:
        for one in opened:
            one.writer.close()


@asynccontextmanager
async def statuses(opened: list[Line]) -> AsyncIterator[list[asyncio.Task[int]]]:
    """Read the next status of each connection meanwhile."""
    reading = [asyncio.ensure_future(one.status()) for one in opened]
    try:
        yield reading
    finally:
        for one in reading:
            one.cancel()
        await asyncio.wait(reading)


@pytest.mark.parametrize("sent", [(HALF_A_HEAD,), ()], ids=["half a head", "silence"])
async def test_a_head_that_does_not_end_is_given_up(world, short, sent):
    await world.start("d0", limits=QUICK._replace(connections=SHORT))
    async with lines(world, 15, *sent) as opened, statuses(opened) as reading:
        await eventually_async(lambda: all(one.done() for one in reading), "all are given up")
        assert {one.result() for one in reading} == {408}
        assert (await world.post(short)).status == 200


async def test_a_kept_connection_may_wait_longer_than_a_head_and_then_has_as_long(world):
    await world.start("d0", limits=QUICK._replace(connections=SHORT))
    async with lines(world, 1, WHOLE) as (one,):
        await one.reader.readuntil(b"ok\n")
        await asyncio.sleep(3 * SHORT.head_seconds)
        await one.send(WHOLE)
        await one.reader.readuntil(b"ok\n")
        await one.send(HALF_A_HEAD)
        assert await one.status() == 408


async def test_control_without_a_deadline_half_a_head_is_kept(world):
    await world.start("d0", limits=QUICK._replace(connections=NO_BOUNDS))
    async with lines(world, 15, HALF_A_HEAD) as opened, statuses(opened) as reading:
        await asyncio.sleep(3 * SHORT.head_seconds)
        assert not any(one.done() for one in reading)


async def test_one_client_takes_half_of_the_connections_and_no_more(world):
    await world.start("d0", limits=QUICK._replace(connections=SHORT._replace(head_seconds=600, spared_seconds=600)))
    async with (
        lines(world, SHORT.most // 2 - 1, HALF_A_HEAD),
        lines(world, 5, HALF_A_HEAD) as late,
        statuses(late) as reading,
    ):
        await eventually_async(lambda: sum(one.done() for one in reading) == 4, "all but one are turned away")
        assert [one.result() for one in reading if one.done()] == [503] * 4
    await eventually_async(lambda: is_served(world), "those that leave make room")


async def is_served(world) -> bool:
    async with lines(world, 1, WHOLE) as (one,):
        return await one.status() == 200


async def test_control_without_a_number_all_are_kept(world):
    await world.start("d0", limits=QUICK._replace(connections=NO_BOUNDS))
    async with lines(world, 2 * SHORT.most, HALF_A_HEAD) as opened, statuses(opened) as reading:
        assert await is_served(world)
        assert not any(one.done() for one in reading)


async def is_served_beside_idle(world, *sent: bytes, spared_seconds: float) -> bool:
    """Open as many connections as a client may have, each idle; return whether another one is served, in place of the
    first."""
    bounds = SHORT._replace(head_seconds=600, spared_seconds=spared_seconds)
    await world.start("d0", limits=QUICK._replace(connections=bounds))
    async with lines(world, SHORT.most // 2, *sent) as opened:
        for one in opened:
            if sent:
                await one.reader.readuntil(b"ok\n")
        served = await is_served(world)
        if served:
            assert await opened[0].reader.read() == b""
        await opened[1].send(WHOLE)
        assert await opened[1].status() == 200
    return served


@pytest.mark.parametrize("sent", [(WHOLE,), ()], ids=["after a request", "silent"])
async def test_who_holds_all_connections_idle_keeps_no_probe_of_the_same_address_out(world, sent):
    assert await is_served_beside_idle(world, *sent, spared_seconds=0.0)


async def test_control_where_no_idle_one_makes_room_the_probe_is_refused(world):
    assert not await is_served_beside_idle(world, WHOLE, spared_seconds=600.0)


async def test_a_connection_whose_request_is_served_makes_no_room(world):
    bounds = SHORT._replace(head_seconds=600, spared_seconds=0.0)
    await world.start("d0", limits=QUICK._replace(connections=bounds))
    gate = asyncio.Event()

    async def wait(request, body):
        await gate.wait()
        return await answer(request, body)

    world.workers["d0"].reply = wait
    first, last = held_back(packed=False)
    async with lines(world, SHORT.most // 2, first + last) as opened:
        await eventually_async(lambda: len(world.workers["d0"].seen) >= len(opened), "all are served")
        assert not await is_served(world)
        gate.set()
        assert [await one.status() for one in opened] == [200] * len(opened)


async def status_of_a_long_head(world, *rest: bytes) -> int:
    await world.start("d0", limits=QUICK)
    async with lines(world, 1, HALF_A_HEAD, *[b"x" * 16_000 + b"\r\nX-a: "] * 5, *rest) as (one,):
        return await one.status()


async def test_a_head_of_many_headers_is_cut_off(world):
    assert await status_of_a_long_head(world) == 431


async def test_control_without_a_bound_of_their_sum_it_is_read(world, monkeypatch):
    monkeypatch.setattr(http_server, "MAX_HEAD_BYTES", 1 << 30)
    assert await status_of_a_long_head(world, b"a\r\n\r\n") == 400


@pytest.mark.parametrize("idle_seconds", [0.2, 600.0], ids=["closed", "control: kept"])
async def test_a_connection_that_asks_for_nothing_is_closed(world, idle_seconds):
    await world.start("d0", limits=QUICK._replace(connections=SHORT._replace(idle_seconds=idle_seconds)))
    async with lines(world, 1, WHOLE) as (one,), statuses([one]) as (reading,):
        assert await reading == 200
        ending = asyncio.ensure_future(one.reader.read())
        await asyncio.wait([ending], timeout=1.0)
        assert ending.done() == (idle_seconds < 1)
        ending.cancel()


def held_back(packed: bool, key: str = "", size_bytes: int = BODY_BYTES) -> tuple[bytes, bytes]:
    """Return a request without its last bytes, and those."""
    body = json.dumps({"model": "m", "prompt": "x" * size_bytes}).encode()
    sent = gzip.compress(body) if packed else body
    encoding = "Content-Encoding: gzip\r\n" if packed else ""
    shown = f"Authorization: Bearer {key}\r\n" if key else ""
    first = f"POST /v1/completions HTTP/1.1\r\nHost: g\r\n{shown}{encoding}"
    head = f"{first}Content-Length: {len(sent)}\r\n\r\n".encode()
    return head + sent[:-9], sent[-9:]


async def hold_bodies(world, packed: bool, all_requests_bytes: int, at_least: int = 0) -> list[int]:
    """Hold many bodies back; return the statuses that came meanwhile, and see that all is served afterwards. So many
    refusals are waited for."""
    await world.start("d0", limits=QUICK._replace(all_requests_bytes=all_requests_bytes))
    first, last = held_back(packed)
    async with lines(world, FLOOD, first) as opened, statuses(opened) as reading:
        await eventually_async(lambda: sum(one.done() for one in reading) >= at_least, "the budget is spent")
        await asyncio.sleep(0.5)
        refused = [one.result() for one in reading if one.done()]
        for one, answered in zip(opened, reading, strict=True):
            if not answered.done():
                await one.send(last)
                assert await answered == 200
    small = json.dumps({"model": "m", "prompt": "x"}).encode()
    assert (await world.post(small, "/v1/completions")).status == 200
    return refused


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
async def test_bodies_that_arrive_from_one_address_have_half_the_budget_as_they_are_unpacked(world, packed):
    refused = await hold_bodies(world, packed, 8 * BODY_BYTES, at_least=FLOOD - 4)
    assert set(refused) == {429}
    assert len(refused) <= FLOOD - 3


async def rounds_of_pieces(world, monkeypatch) -> list[int]:
    """Send a bomb; return in which round of the event loop each piece of it was taken."""
    rounds, seen = 0, []
    take = BodyPlace.take

    async def count() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    def note(place: BodyPlace, size_bytes: int) -> None:
        seen.append(rounds)
        take(place, size_bytes)

    monkeypatch.setattr(BodyPlace, "take", note)
    await world.start("d0")
    counting = asyncio.ensure_future(count())
    async with lines(world, 1, b"".join(held_back(packed=True, size_bytes=MANY_PIECES_BYTES))) as (one,):
        assert await one.status() == 200
    counting.cancel()
    assert len(seen) > 10
    return seen


async def test_a_body_is_unpacked_a_piece_in_each_round_of_the_event_loop(world, monkeypatch):
    seen = await rounds_of_pieces(world, monkeypatch)
    assert len(set(seen)) >= len(seen) - 1


async def test_control_without_turns_all_of_it_is_unpacked_at_once(world, monkeypatch):
    monkeypatch.setattr(bodies, "TURN_BYTES", 1 << 40)
    assert len(set(await rounds_of_pieces(world, monkeypatch))) < 4


async def test_what_a_body_took_comes_back(world):
    await world.start("d0", limits=QUICK._replace(all_requests_bytes=2 * BODY_BYTES))
    body = json.dumps({"model": "m", "prompt": "x" * BODY_BYTES}).encode()
    for _ in range(5):
        assert (await world.post(body, "/v1/completions")).status == 200


async def is_served_beside_a_flood(world, keys: Path | None) -> bool:
    """Hold one client's bodies back; return whether that of another key is served meanwhile, or of another address."""
    mallory = alice = ""
    if keys is not None:
        mallory, alice = f"{KEY}mallory", f"{KEY}alice"
        keys.mkdir()
        for key in (mallory, alice):
            (keys / key.removeprefix(KEY)).write_text(key)
    await world.start("d0", limits=QUICK._replace(all_requests_bytes=4 * BODY_BYTES), keys_dir=keys)
    first, _ = held_back(packed=False, key=mallory)
    elsewhere = "127.0.0.1" if keys else "127.0.0.2"
    async with lines(world, FLOOD, first, address=elsewhere) as opened, statuses(opened) as reading:
        await eventually_async(lambda: sum(one.done() for one in reading) >= FLOOD - 4, "the budget is spent")
        async with lines(world, 1, *held_back(packed=False, key=alice)) as (other,):
            return await other.status() == 200


@pytest.mark.parametrize("keys", ["keys", ""], ids=["by key", "by address"])
async def test_one_client_holds_half_of_the_bytes_and_another_is_served(world, tmp_path, keys):
    assert await is_served_beside_a_flood(world, tmp_path / keys if keys else None)


@pytest.mark.parametrize("keys", ["keys", ""], ids=["by key", "by address"])
async def test_control_a_client_that_may_have_all_bytes_keeps_others_out(world, tmp_path, monkeypatch, keys):
    monkeypatch.setattr(bodies, "CLIENT_PART", 1)
    assert not await is_served_beside_a_flood(world, tmp_path / keys if keys else None)


@pytest.mark.parametrize("spared_seconds", [0.0, 600.0], ids=["a body gives way", "control: none does"])
async def test_who_holds_large_bodies_back_from_two_addresses_keeps_nobody_out(world, monkeypatch, spared_seconds):
    """A short body has room in any case, and a large one that of the body that has arrived for longest."""
    monkeypatch.setattr(bodies, "SPARED_SECONDS", spared_seconds)
    sizes = {"request_bytes": BODY_BYTES + 1000, "all_requests_bytes": 16 * BODY_BYTES}
    await world.start("d0", limits=QUICK._replace(**sizes, idle_seconds=60))
    first, last = held_back(packed=False)
    async with (
        lines(world, 2, first, address="127.0.0.2") as some,
        lines(world, 2, first, address="127.0.0.3") as others,
        statuses(some + others) as reading,
    ):
        await eventually_async(lambda: held_by(world) == 4 * (len(first) - len(head_of(first))), "they hold the room")
        async with lines(world, 1, b"".join(held_back(packed=False, size_bytes=1000)), address=ELSEWHERE) as (short,):
            assert await short.status() == 200
        async with lines(world, 1, first, last, address=ELSEWHERE) as (large,):
            assert await large.status() == (429 if spared_seconds else 200)
        ended = [] if spared_seconds else [429]
        await eventually_async(lambda: [one.result() for one in reading if one.done()] == ended, "one has made room")


def head_of(request: bytes) -> bytes:
    return request[: request.index(b"\r\n\r\n") + 4]


def held_by(world) -> int:
    return world.running.dispatcher.held.all.taken_bytes


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
async def test_control_without_the_budget_all_of_them_are_held(world, packed):
    assert await hold_bodies(world, packed, 1 << 40) == []
