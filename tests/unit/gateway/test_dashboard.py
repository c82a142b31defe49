"""Proves what the live page gets: all that the gateway knows, nothing secret, bounded, and only what is new."""

import json

import msgspec
import pytest

from prfaas.wire.control import LinkReport, ThresholdUpdate
from prfaas_gateway.dashboard import REQUESTS, RequestHistory

from .conftest import QUICK


async def state(world, query: str = "") -> dict:
    got = await world.get_admin(f"/ui/state{query}")
    assert got.status == 200
    return got.json


async def push(world, **links: float) -> None:
    update = ThresholdUpdate(
        tokens=1500,
        bandwidth="Abundant",
        offload_clusters=("eu",),
        expires_seconds=60,
        reason="the link has room",
        links=tuple(
            LinkReport(cluster=name, state="Alive", effective_mbps=95, utilisation_percent=percent)
            for name, percent in links.items()
        ),
    )
    assert (await world.control("PUT", "/threshold", msgspec.json.encode(update))).status == 204


async def test_the_page_and_its_files_are_served_with_a_policy_that_lets_nothing_else_in(world):
    await world.start("d0")
    for path, kind in (("/ui/", "text/html"), ("/ui/app.js", "text/javascript"), ("/ui/app.css", "text/css")):
        got = await world.get_admin(path)
        assert (got.status, got.headers["content-type"]) == (200, f"{kind}; charset=utf-8")
        assert "default-src 'none'" in got.headers["content-security-policy"]
    assert "style=" not in (await world.get_admin("/ui/")).body.decode(), "the policy would not let it in"
    assert (await world.get_admin("/ui")).status == 200, "leads to /ui/"
    assert (await world.get_admin("/ui/other")).status == 404
    assert (await world.get_admin("/ui/../app.py")).status == 404


async def test_the_document_tells_clusters_instances_threshold_and_link(world, long):
    await world.start("d0", "p0", "x0")
    await push(world, eu=42.0)
    assert (await world.post(long, headers={"x-request-id": "r-1"})).status == 200
    seen = await state(world)
    assert (seen["policy"], seen["model"], seen["threshold_tokens"], seen["bandwidth"]) == ("p", "m", 1500, "Abundant")
    assert (seen["reason"], seen["offloaded"], seen["local"]) == ("the link has room", 1, 0)
    hub, eu = seen["clusters"]
    assert [(one["name"], one["role"], one["in_flight"]) for one in hub["instances"]] == [
        ("d0", "decode", 0),
        ("p0", "prefill", 0),
    ]
    assert (eu["in_use"], eu["link"]["utilisation_percent"], eu["instances"][0]["name"]) == (True, 42.0, "x0")
    (placed,) = seen["placed"]
    assert (placed["request_id"], placed["decision"], placed["prefill"], placed["cluster"]) == (
        "r-1",
        "offload",
        "x0",
        "eu",
    )
    assert placed["tokens"] == len(long) // 4
    assert placed["first_token_seconds"] <= placed["seconds"]


async def test_a_second_look_brings_only_what_is_new(world, short):
    await world.start("d0")
    for _ in range(3):
        await world.post(short)
    first = await state(world)
    assert [one["number"] for one in first["placed"]] == [1, 2, 3]
    await world.post(short)
    later = await state(world, f"?number=2&moment={first['moments'][-1]['at']}")
    assert [one["number"] for one in later["placed"]] == [3, 4]
    assert all(one["at"] > first["moments"][-1]["at"] for one in later["moments"])
    assert later["started"] == first["started"]
    assert len((await state(world, "?number=99"))["placed"]) == 4, "that number is of another gateway"


@pytest.mark.parametrize("query", ["?number=x", "?moment=nan", "?number=-1", "?number=1e400"])
async def test_a_query_that_makes_no_sense_is_refused(world, query):
    await world.start("d0")
    got = await world.get_admin(f"/ui/state{query}")
    assert (got.status, got.json["error"]["param"]) == (400, query[1:].split("=")[0])


async def test_a_failed_worker_and_a_failed_request_are_shown(world, short):
    await world.start("d0", limits=QUICK._replace(eject_seconds=60, eject_max_seconds=60))
    await world.workers["d0"].stop()
    assert (await world.post(short)).status >= 500
    world.state.ejections.failed("d0", world.state.clock())
    seen = await state(world)
    assert seen["clusters"][0]["instances"][0]["ejected_seconds"] > 0
    assert seen["placed"][0]["outcome"] in ("failed", "rejected")
    assert seen["placed"][0]["reason"]


async def test_before_the_first_table_the_page_says_so(world, short):
    await world.start("d0")
    world.state.table = None
    await world.post(short)
    seen = await state(world)
    assert (seen["threshold_tokens"], seen["clusters"], seen["placed"][0]["decode"]) == (None, [], "")


async def test_no_prompt_and_no_key_is_in_the_document(world):
    await world.start("d0")
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "the launch codes"}]}).encode()
    await world.post(body, headers={"Authorization": "Bearer sk-secret"})
    document = (await world.get_admin("/ui/state")).body.decode()
    assert "launch codes" not in document
    assert "sk-secret" not in document


async def test_the_record_stays_small(world, short):
    await world.start("d0")
    history = RequestHistory(clock=lambda: 5.0)
    await world.post(short)
    for number in range(REQUESTS + 50):
        history.add_sample(world.state)
        history._placed.append(number)  # this counts only how many are kept
        history.count += 1
    assert len(history.placed_after(0)) == REQUESTS
    assert history.placed_after(history.count - 2) == [REQUESTS + 48, REQUESTS + 49]
    assert len(history.samples_after(0)) <= 600
