"""prfaas.bounds.bodies: who has room for bodies, who makes it, and whose turn it is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import pytest

from prfaas.bounds import bodies
from prfaas.bounds.bodies import BodyPlace, HeldBytes
from prfaas.errors import CapacityError
from prfaas_gateway.limits import Limits

PROXY: Final = "192.0.2.1"


def is_free(held: HeldBytes) -> bool:
    return not held.begun and not any(room.by_client or room.taken_bytes for room in (held.all, held.arriving))


@asynccontextmanager
async def arriving(place: BodyPlace, size_bytes: int) -> AsyncIterator[None]:
    """Have a body arrive to its end when the block ends."""
    async with place.arriving(asyncio.get_running_loop().time() + 60):
        place.take(size_bytes)
        yield


async def hold(place: BodyPlace, size_bytes: int) -> None:
    """Have a body begin to arrive, and nothing more."""
    async with arriving(place, size_bytes):
        await asyncio.Event().wait()


@pytest.fixture
def all_of_a_body_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BEGINNING_BYTES", 0)


pure = pytest.mark.usefixtures("all_of_a_body_counts")


@pure
async def test_the_only_body_of_a_client_may_have_all_the_room():
    held = HeldBytes(100)
    with held.place("a", PROXY) as one:
        one.take(90)
        with held.place("b", PROXY) as another, pytest.raises(CapacityError):
            another.take(11)
    with held.place("a", PROXY) as one, held.place("a", PROXY) as another:
        async with arriving(one, 30):
            pass
        with pytest.raises(CapacityError, match="of this client"):
            another.take(21)
    assert is_free(held)


@pure
async def test_bodies_that_still_arrive_leave_most_of_the_room_to_whole_ones():
    held = HeldBytes(100, Limits(request_bytes=50, all_requests_bytes=100).arriving_bytes)
    with held.place("a", PROXY) as one, held.place("b", PROXY) as another:
        async with arriving(one, 30):
            another.take(20)
            with pytest.raises(CapacityError, match="as many bytes of requests"):
                another.take(1)
        another.take(30)
    assert is_free(held)


def test_one_body_of_the_largest_size_has_room_to_arrive():
    assert Limits(request_bytes=90, all_requests_bytes=100).arriving_bytes == 90


def test_the_beginnings_of_bodies_count_as_arrived():
    held = HeldBytes(1 << 20, 10)
    with held.place("a", PROXY) as one, held.place("b", PROXY) as another:
        one.take(bodies.BEGINNING_BYTES - 1)
        one.take(11)
        another.take(bodies.BEGINNING_BYTES)
        with pytest.raises(CapacityError):
            another.take(1)


@pure
async def test_what_has_arrived_for_longest_makes_room_and_is_ended(monkeypatch: pytest.MonkeyPatch):
    held = HeldBytes(100)

    with held.place("a", "") as first, held.place("b", "") as second, held.place("c", "") as late:
        reading = [asyncio.ensure_future(hold(one, 40)) for one in (first, second)]
        await asyncio.sleep(0)
        with pytest.raises(CapacityError, match="as many bytes of requests"):
            late.take(40)
        monkeypatch.setattr(bodies, "SPARED_SECONDS", 0.0)
        late.take(40)
        assert (first.taken_bytes, second.taken_bytes, late.taken_bytes) == (0, 40, 40)
        with pytest.raises(CapacityError, match="came slowly"):
            await reading[0]
        reading[1].cancel()
        await asyncio.wait(reading)
    assert is_free(held)


@pure
async def test_a_body_that_holds_nothing_of_the_room_that_lacks_is_not_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bodies, "SPARED_SECONDS", 0.0)
    monkeypatch.setattr(bodies, "BEGINNING_BYTES", 10)
    held = HeldBytes(1000, arriving_bytes=100)
    with held.place("", "x") as short, held.place("", "y") as long, held.place("", "z") as late:
        async with arriving(short, 10):
            reading = asyncio.ensure_future(hold(long, 90))
            await asyncio.sleep(0)
            late.take(60)
            with pytest.raises(CapacityError, match="came slowly"):
                await reading
            assert (short.taken_bytes, long.taken_bytes, late.taken_bytes) == (10, 0, 60)
    assert is_free(held)


@pure
async def test_a_client_whose_share_is_full_makes_room_by_its_own_bodies_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bodies, "SPARED_SECONDS", 0.0)
    held = HeldBytes(100)
    with held.place("b", "") as other, held.place("a", "") as one, held.place("a", "") as another:
        async with arriving(other, 30):
            reading = asyncio.ensure_future(hold(one, 30))
            await asyncio.sleep(0)
            another.take(40)
            with pytest.raises(CapacityError, match="came slowly"):
                await reading
            assert (other.taken_bytes, one.taken_bytes, another.taken_bytes) == (30, 0, 40)
    assert is_free(held)


@pure
async def test_without_keys_the_bodies_of_a_proxy_have_all_the_room_once_they_are_whole():
    held = HeldBytes(100)
    with held.place("", PROXY) as one, held.place("", PROXY) as another:
        async with arriving(one, 30):
            with pytest.raises(CapacityError, match="of this client"):
                another.take(70)
        another.take(70)
        with held.place("", PROXY) as late, pytest.raises(CapacityError, match="as many bytes of requests"):
            late.take(1)
    assert is_free(held)


@pure
def test_who_has_neither_name_nor_address_counts_for_nobody():
    held = HeldBytes(100)
    with held.place("", "") as one, held.place("", "") as another:
        one.take(60)
        another.take(40)
    assert is_free(held)


async def read_in_turns(piece_bytes: int) -> list[str]:
    """Read pieces of two bodies at once; return whose they were, in order."""
    held, order = HeldBytes(1 << 30), []

    async def read(name: str) -> None:
        with held.place("", "") as place:
            for _ in range(3):
                place.take(piece_bytes)
                await place.turn()
                order.append(name)

    await asyncio.gather(read("a"), read("b"))
    return order


async def test_large_bodies_take_turns():
    assert await read_in_turns(bodies.TURN_BYTES + 1) == ["a", "b"] * 3


async def test_who_drips_bytes_takes_no_turn_of_others():
    with HeldBytes(1 << 30).place("", "") as place:
        place.take(bodies.TURN_BYTES + 1)
        await place.turn()
        place.take(1)
        turn = place.turn()
        with pytest.raises(StopIteration):
            turn.send(None)


async def test_control_small_bodies_do_not():
    assert await read_in_turns(bodies.TURN_BYTES // 3) == ["a"] * 3 + ["b"] * 3
