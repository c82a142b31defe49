"""Proves what a gateway does with full workers and with preferences: full ones get no request until they have room, all
full is 429 at once, and a request goes where its headers allow.
"""

import asyncio

import pytest
from aiohttp import web
from msgspec.structs import replace

from prfaas.wire import headers
from prfaas.wire.routes import Cluster
from prfaas_gateway.state import FULL_SECONDS, Saturation


async def full(_request, _body):
    return web.json_response({"error": {"message": "no place", "code": headers.CODE_OVERLOADED}}, status=503)


def test_an_instance_is_full_while_as_many_requests_are_there_as_when_it_refused_one():
    saturation = Saturation()
    saturation.refused("d0", 3, 100.0)
    assert saturation.full({"d0": 3}, 100.1) == {"d0"}
    assert saturation.full({"d0": 2}, 100.1) == set()
    assert saturation.full({"d0": 4, "d1": 9}, 100.1) == {"d0"}
    assert saturation.full({"d0": 9}, 100.0 + FULL_SECONDS) == set()
    assert saturation.full({"d0": 9}, 100.1) == set()


async def test_while_all_are_full_the_gateway_answers_without_them(world, short):
    await world.start("d0", "d1")
    for worker in world.workers.values():
        worker.reply = full
    world.state.clock = lambda: 100.0
    answers = [await world.post(short) for _ in range(5)]
    assert {(one.status, one.json["error"]["code"], one.headers["retry-after"]) for one in answers} == {
        (429, "saturated", "1")
    }
    assert await world.metric('prfaas_gateway_requests_total{decision="local",outcome="rejected"}') == 1
    assert sum(len(worker.seen) for worker in world.workers.values()) == 2
    world.state.clock = lambda: 100.0 + FULL_SECONDS
    await world.post(short)
    assert sum(len(worker.seen) for worker in world.workers.values()) == 4


async def test_as_soon_as_one_of_our_requests_ends_there_the_next_is_sent(world, short):
    await world.start("d0")
    world.state.clock = lambda: 100.0
    worker, gate, here = world.workers["d0"], asyncio.Event(), asyncio.Event()

    async def one_place(_request, _body):
        if here.is_set() and not gate.is_set():
            return await full(_request, _body)
        here.set()
        await gate.wait()
        return web.json_response({})

    worker.reply = one_place
    first = asyncio.create_task(world.post(short))
    await here.wait()
    assert [(await world.post(short)).status for _ in range(3)] == [429] * 3
    assert len(worker.seen) == 2
    gate.set()
    assert (await first).status == 200
    assert (await world.post(short)).status == 200


async def test_a_full_instance_gets_no_request_while_another_serves(world, short):
    await world.start("d0", "d1")
    world.state.clock = lambda: 100.0
    world.workers["d0"].reply = full
    assert {(await world.post(short)).status for _ in range(12)} == {200}
    assert len(world.workers["d0"].seen) == 1
    assert not world.state.ejections.until_seconds


async def test_where_the_living_are_full_no_ejected_instance_is_tried(world, short):
    await world.start("d0", "d1")
    world.state.clock = lambda: 100.0
    world.workers["d0"].reply = full
    world.state.ejections.failed("d1", 100.0)
    assert [(await world.post(short)).status for _ in range(3)] == [429] * 3
    assert len(world.workers["d0"].seen) == 1
    assert not world.workers["d1"].seen


EU = Cluster(name="eu", datacenter="eu-west", capacity_mbps=100, utilisation_query="vector(0)")


@pytest.mark.parametrize(
    ("sent", "decision"),
    [
        ({}, "offload"),
        ({headers.OFFLOAD: "never"}, "local"),
        ({headers.DATACENTERS: "forbid eu"}, "local"),
        ({headers.DATACENTERS: "forbid US; prefer eu-west"}, "offload"),
    ],
)
async def test_headers_narrow_where_a_long_prompt_goes(world, long, sent, decision):
    await world.start("d0", "x0", clusters=(EU, replace(EU, name="us", datacenter="us")), forbid_datacenters=("us",))
    got = await world.post(long, headers=sent)
    assert (got.status, got.headers[headers.DECISION]) == (200, decision)


async def test_a_forbidden_place_where_no_cluster_is_gets_a_400_and_no_instance_gets_the_prompt(world, long):
    """A misspelt name would forbid nothing."""
    await world.start("d0", "x0", clusters=(EU,))
    got = await world.post(long, headers={headers.DATACENTERS: "forbid ue"})
    assert (got.status, got.json["error"]["code"], got.json["error"]["param"]) == (
        400,
        "invalid_header",
        headers.DATACENTERS,
    )
    assert "the places are: eu-west" in got.json["error"]["message"]
    assert [one.seen for one in world.workers.values()] == [[], []]


async def test_a_worker_hears_whose_cached_bytes_may_serve_each_request_by_the_table_of_the_moment(world, short):
    await world.start("d0", clusters=(EU,))
    for sent in (
        {},
        {headers.DATACENTERS: "forbid eu"},
        {headers.OFFLOAD: "never"},
        {headers.DATACENTERS: "prefer eu"},
    ):
        assert (await world.post(short, headers=sent)).status == 200
    world.state.set_table(replace(world.table, forbid_datacenters=("eu",)))
    assert (await world.post(short)).status == 200
    assert [one.headers[headers.PLACES] for one in world.workers["d0"].seen] == ["* eu", "", "", "* eu", ""]


async def test_always_offloads_a_prompt_below_the_threshold(world, short):
    await world.start("d0", "x0")
    got = await world.post(short, headers={headers.OFFLOAD: "always"})
    assert (got.headers[headers.DECISION], got.headers[headers.THRESHOLD_TOKENS]) == ("offload", "10")


async def test_preferences_hold_after_a_failure_too(world, long):
    await world.start("d0", "d1", "x0", clusters=(EU,))
    await world.workers["d0"].stop()
    for _ in range(6):
        got = await world.post(long, headers={headers.DATACENTERS: "forbid eu"})
        assert (got.status, got.headers[headers.DECISION]) == (200, "local")


@pytest.mark.parametrize(
    "sent",
    [
        [(headers.DATACENTERS, "frobid us")],
        [(headers.DATACENTERS, "forbid us"), (headers.DATACENTERS, "forbid cn")],
        [(headers.OFFLOAD, "allways")],
        [(headers.OFFLOAD, "never"), (headers.OFFLOAD, "always")],
        [(headers.DEADLINE_SECONDS, "soon")],
    ],
)
async def test_a_wish_that_cannot_be_read_is_refused_and_never_ignored(world, long, sent):
    await world.start("d0", "x0")
    got = await world.post(long, headers=sent)
    assert (got.status, got.json["error"]["code"], got.json["error"]["param"]) == (400, "invalid_header", sent[0][0])
    assert world.workers["d0"].seen == []
