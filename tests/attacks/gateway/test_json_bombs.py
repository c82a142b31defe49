"""A client wants the time and the memory of gateway and engines, by JSON that is deep, wide, or one endless number."""

import io
import tracemalloc
from pathlib import Path
from typing import Final

import msgspec
import pytest
from tests.unit.gateway.conftest import Answered, World

from prfaas.routing import prompt_size
from prfaas.routing.prompt_size import LARGE_BYTES
from prfaas_gateway import request

MEBIBYTE: Final = 1 << 20
KEY: Final = "sk-0123456789abcdef"
HELLO: Final = b'"messages":[{"role":"user","content":"hi"}]'
BOMBS: Final = {
    "lists in lists": (b'"tools":' + b"[" * 200 + b"]" * 200, "tools"),
    "fields": (b",".join(b'"x%d":0' % number for number in range(50_000)), None),
    "values": (b'"tools":[' + b",".join([b"{}"] * 100_000) + b"]", "tools"),
    "digits": (b'"n":' + b"9" * 100_000, "n"),
}
each_bomb = pytest.mark.parametrize(("members", "at_fault"), BOMBS.values(), ids=BOMBS.keys())
DEEP_PROMPT: Final = b'"messages":' + b"[" * 100_000 + b"]" * 100_000
OBJECT: Final = b'{"":0}'
WIDE_PROMPT: Final = b'"messages":[' + b",".join([OBJECT] * (1 + LARGE_BYTES // (len(OBJECT) + 1))) + b"]"


@pytest.fixture
async def asked(world: World, tmp_path: Path) -> World:
    """A gateway with a key and one engine."""
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "mallory").write_text(KEY)
    await world.start("d0", keys_dir=keys)
    return world


async def post(world: World, members: bytes) -> Answered:
    body = io.BytesIO(b'{"model":"m",' + members + b"}")
    return await world.post(body, headers={"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"})


@each_bomb
async def test_a_bomb_is_refused_by_name_and_reaches_no_engine(asked, members, at_fault):
    got = await post(asked, HELLO + b"," + members)
    assert (got.status, got.json["error"]["param"]) == (400, at_fault)
    assert asked.workers["d0"].seen == []
    assert (await post(asked, HELLO)).status == 200


@each_bomb
async def test_control_without_the_bounds_an_engine_gets_it(asked, members, at_fault, monkeypatch):
    monkeypatch.setattr(request, "MAX_FIELDS", 1 << 40)
    monkeypatch.setattr(request, "check_fields", lambda _: None)
    assert (await post(asked, HELLO + b"," + members)).status == 200
    (seen,) = asked.workers["d0"].seen
    assert members in seen.body


async def test_a_prompt_that_is_too_deep_to_read_is_refused(asked):
    got = await post(asked, DEEP_PROMPT)
    assert (got.status, got.json["error"]["code"]) == (400, "invalid_json")


async def test_control_where_nobody_expects_such_depth_it_is_an_internal_error(asked, monkeypatch):
    monkeypatch.setattr(request, "UNREADABLE", (msgspec.DecodeError,))
    assert (await post(asked, DEEP_PROMPT)).status == 500


async def peak_bytes(world: World) -> int:
    """Return the most memory that a large prompt of many values took, at gateway, client and engine together."""
    tracemalloc.start()
    try:
        assert (await post(world, WIDE_PROMPT)).status == 200
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


async def test_a_large_prompt_of_many_values_takes_little_more_than_its_bytes(asked):
    assert await peak_bytes(asked) < 64 * MEBIBYTE


async def test_control_decoded_it_takes_many_times_its_bytes(asked, monkeypatch):
    monkeypatch.setattr(prompt_size, "_has_too_many_values", lambda _: False)
    assert await peak_bytes(asked) > 100 * MEBIBYTE
