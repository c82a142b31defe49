"""Proves the control socket: the table out, thresholds in, until they expire, where the policy's mode listens."""

import msgspec
import pytest

from prfaas.routing.lengths import EDGES
from prfaas.wire import headers
from prfaas.wire.control import Counters, PrefillTokens, ThresholdUpdate
from prfaas.wire.routes import decode

NO_TOKENS = PrefillTokens()


def update(tokens: int = 50, expires_seconds: int = 5, clusters: tuple[str, ...] = ("eu",)) -> bytes:
    return msgspec.json.encode(
        ThresholdUpdate(
            tokens=tokens, bandwidth="Scarce", offload_clusters=clusters, expires_seconds=expires_seconds, reason="test"
        )
    )


async def test_returns_the_table_as_it_is(world):
    await world.start("d0", "x0")
    assert decode((await world.control("GET", "/table")).body) == world.table


async def test_returns_no_table_before_the_first_one(world):
    await world.start("d0")
    world.state.table = None
    assert (await world.control("GET", "/table")).status == 503


async def test_a_pushed_threshold_decides_the_next_request_until_it_expires(world, short):
    await world.start("d0", "x0")
    now = world.state.clock()
    world.state.clock = lambda: now
    assert (await world.post(short)).headers[headers.DECISION] == "local"
    assert (await world.control("PUT", "/threshold", update(tokens=50))).status == 204
    got = await world.post(short)
    assert (got.headers[headers.DECISION], got.headers[headers.THRESHOLD_TOKENS]) == ("offload", "50")
    assert await world.metric("prfaas_gateway_threshold_tokens") == 50
    now += 4.9
    assert (await world.post(short)).headers[headers.DECISION] == "offload"
    now += 0.1
    got = await world.post(short)
    assert (got.headers[headers.DECISION], got.headers[headers.THRESHOLD_TOKENS]) == ("local", "1000")


@pytest.mark.parametrize("body", [b"", b"{}", b'{"tokens":"x"}', b"[1]"])
async def test_a_damaged_update_changes_nothing(world, body):
    await world.start("d0")
    assert (await world.control("PUT", "/threshold", body)).status == 400
    assert world.state.rule().threshold_tokens == 1000


async def test_counters_tell_decisions_apart(world, short, long):
    await world.start("d0", "x0")
    for body in (short, long, long):
        await world.post(body)
    got = msgspec.json.decode((await world.control("GET", "/counters")).body, type=Counters)
    counted = Counters(offloaded=2, local=1, failed_offloads=0)
    tokens = got.offloaded_tokens, got.local_tokens
    assert msgspec.structs.replace(got, lengths=(), offloaded_tokens=NO_TOKENS, local_tokens=NO_TOKENS) == counted
    assert tokens[0].counted >= tokens[0].computed > 1000
    assert 0 < tokens[1].counted == tokens[1].computed < 1000, "nothing of it is cached"
    below = [count for edge, count in zip(EDGES, got.lengths, strict=False) if edge < 1000]
    assert (sum(below), sum(got.lengths)) == (1, 3), "the prompts by their length: one below the threshold"
