"""Proves that SGLang gets what its own router would send, and that every pair of sequences meets in its own room.

The router's requests are those of `inject_bootstrap_into_value` in its published source (sgl-model-gateway,
src/routers/http/pd_router.rs), for bodies as in its tests. The stand-in counts rooms as `GenerateReqInput` does.
"""

import json

import pytest

from prfaas.wire import headers
from prfaas_gateway.engines import sglang
from prfaas_gateway.request import place_salt

PORT = 9000
TEXT = "Hello " * 1000
CHAT = {"model": "m", "messages": [{"role": "user", "content": TEXT}], "stream": False}
COMPLETION = {"model": "m", "prompt": TEXT, "temperature": 0.7}
ROUTED = [
    # body, and how many rooms the router names; None: one number
    pytest.param(CHAT, None, id="chat"),
    pytest.param(CHAT | {"n": 1}, None, id="chat with one answer"),
    pytest.param(CHAT | {"n": 3}, 3, id="chat with three answers"),
    pytest.param(COMPLETION, None, id="completion"),
    pytest.param(COMPLETION | {"n": 2}, None, id="completion with two answers"),
    pytest.param(COMPLETION | {"prompt": [TEXT, "World", "Test"]}, 3, id="batch"),
    pytest.param(COMPLETION | {"prompt": [TEXT]}, 1, id="batch of one"),
]
HOST_FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


def routed(body: dict, rooms: int | None, room: list[int]) -> dict:
    """Return what the router makes of a body, with these rooms."""
    if rooms is None:
        return body | dict(zip(HOST_FIELDS, ("127.0.0.1", PORT, room[0]), strict=True))
    return body | dict(zip(HOST_FIELDS, (["127.0.0.1"] * rooms, [PORT] * rooms, room), strict=True))


def rooms_of_sequences(body: dict) -> list[int]:
    """Return the room of each sequence, as SGLang normalises them."""
    answers = body.get("n") or 1
    prompts = body["prompt"] if isinstance(body.get("prompt"), list) else [None]
    count, room = len(prompts) * answers, body["bootstrap_room"]
    if isinstance(room, list):
        return (room * answers)[:count]
    return [room + number for number in range(count)]


@pytest.fixture
def start(world, monkeypatch):
    async def started() -> None:
        await world.start("d0", "x0")
        monkeypatch.setattr(sglang, "BOOTSTRAP_PORT", PORT)
        world.change_instances(engine="sglang")

    return started


async def sent(world, body: dict) -> dict:
    """Return what both legs got."""
    got = await world.post(body, "/v1/chat/completions" if "messages" in body else "/v1/completions")
    assert (got.status, got.headers[headers.DECISION]) == (200, "offload")
    (prefill,), (decode,) = world.workers["x0"].seen, world.workers["d0"].seen
    assert json.loads(prefill.body) == json.loads(decode.body)
    return json.loads(prefill.body)


@pytest.mark.parametrize(("body", "rooms"), ROUTED)
async def test_both_legs_get_what_sglangs_own_router_would_send(world, start, body, rooms):
    await start()
    got = await sent(world, body)
    named = got["bootstrap_room"] if isinstance(got["bootstrap_room"], list) else [got["bootstrap_room"]]
    assert got == routed(body | {"cache_salt": place_salt({"eu"}, "")}, rooms, named)
    assert all(0 <= room < 1 << 63 for room in named), "SGLang keeps a room as a signed number of 64 bits"


@pytest.mark.parametrize("body", [*(one.values[0] for one in ROUTED), COMPLETION | {"prompt": [TEXT, "World"], "n": 2}])
async def test_no_two_sequences_of_a_request_share_a_room(world, start, body):
    await start()
    rooms = rooms_of_sequences(await sent(world, body))
    assert len(set(rooms)) == len(rooms)


async def test_a_wrong_number_of_answers_is_sglangs_matter(world, start):
    await start()
    got = await sent(world, CHAT | {"n": 0})
    assert isinstance(got["bootstrap_room"], int)


def test_the_routers_own_rooms_for_several_answers_to_a_batch_meet_twice():
    """This is why the gateway differs from it there."""
    body = COMPLETION | {"prompt": [TEXT, "World"], "n": 2}
    rooms = rooms_of_sequences(routed(body, 2, [5, 9]))
    assert len(set(rooms)) < len(rooms)
