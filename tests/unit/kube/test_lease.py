"""Proves that a Lease has one holder at most, that a silent one is replaced, and that a cut-off one stops by itself."""

import pytest
from aiohttp import web
from tests.clocks import Clock

from prfaas.errors import UnreachableError
from prfaas.kube import LeaseHolder


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def two(session, clock) -> tuple[LeaseHolder, LeaseHolder]:
    return tuple(LeaseHolder(session, "n", "p-scheduler", one, clock) for one in "ab")


async def test_the_first_takes_the_lease_and_the_second_waits(two):
    first, second = two
    assert await first.acquire_or_renew()
    assert not await second.acquire_or_renew()
    assert (first.is_holder, second.is_holder) == (True, False)


async def test_a_holder_that_renews_keeps_the_lease(two, clock):
    first, second = two
    for _ in range(20):
        assert await first.acquire_or_renew()
        assert not await second.acquire_or_renew()
        clock.seconds += 5


async def test_a_silent_holder_loses_the_lease_after_its_duration_and_stops_before(two, clock):
    first, second = two
    await first.acquire_or_renew()
    await second.acquire_or_renew()
    clock.seconds += 9.9
    assert first.is_holder
    assert not await second.acquire_or_renew()
    clock.seconds += 0.2
    assert not first.is_holder  # at two thirds, long before another may take over
    clock.seconds += 4.8
    assert not await second.acquire_or_renew()
    clock.seconds += 0.2
    assert await second.acquire_or_renew()
    assert not await first.acquire_or_renew()


async def test_a_released_lease_is_free_at_once(two):
    first, second = two
    await first.acquire_or_renew()
    await first.release()
    assert not first.is_holder
    assert await second.acquire_or_renew()


async def test_of_two_writers_the_slower_loses(two, api, clock):
    first, second = two
    await first.acquire_or_renew()
    await second.acquire_or_renew()
    clock.seconds += 16
    lease = next(iter(api.objects.values()))

    async def stale(_request):
        return web.json_response(lease | {"metadata": lease["metadata"] | {"resourceVersion": "1"}})

    api.misbehave.append(stale)
    assert not await second.acquire_or_renew()
    assert not second.is_holder


async def test_a_holder_whose_renewal_meets_another_edit_stays_so_until_its_time_ends(two, api, clock):
    first, second = two
    await first.acquire_or_renew()
    lease = next(iter(api.objects.values()))

    async def stale(_request):
        return web.json_response(lease | {"metadata": lease["metadata"] | {"resourceVersion": "1"}})

    clock.seconds += 5
    await second.acquire_or_renew()  # which sees it held
    api.misbehave.append(stale)
    assert await first.acquire_or_renew()
    clock.seconds += 5.1
    assert not first.is_holder


async def test_a_holder_cut_off_from_the_server_stops_by_itself(two, api, clock):
    first, _ = two
    await first.acquire_or_renew()
    api.dead = True
    clock.seconds += 5
    with pytest.raises(UnreachableError):
        await first.acquire_or_renew()
    assert first.is_holder
    clock.seconds += 5.1
    assert not first.is_holder
