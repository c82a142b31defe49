"""Proves that the gateway relays bytes as they are, both ways, keeps its headers to itself, and passes aborts on."""

import asyncio
import contextlib
import io
import json

import aiohttp
import pytest
from aiohttp import web
from tests.waiting import PATIENCE_SECONDS, eventually_async

from prfaas.wire import headers
from prfaas_gateway.limits import Limits

pytestmark = pytest.mark.system

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def streaming(
    *pieces: bytes, content_type: str = "text/event-stream", die: bool = False, gate: asyncio.Event | None = None
):
    """Return a reply that sends these pieces one by one, and then ends, dies, or waits for the gate first."""

    async def reply(request: web.Request, _body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": content_type, headers.PROMPT_TOKENS: "7"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0.005)
        if gate is not None:
            await gate.wait()
        if die:
            request.transport.abort()
        return response

    return reply


async def test_request_body_and_path_reach_the_worker_byte_for_byte(world):
    await world.start("d0")
    odd = b'  {"model" : "m",\t"x": 1e3, "messages":[{"content":"\\u00e4\xc3\xa4 \\n"}], "unknown": {"a":[1,2]} }\n'
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert (await world.post(odd, path)).status == 200
        assert (world.workers["d0"].seen[-1].path, world.workers["d0"].seen[-1].body) == (path, odd)


async def test_a_body_of_several_megabytes_is_relayed(world):
    await world.start("d0")
    body = json.dumps({"model": "m", "prompt": "y" * 5_000_000}).encode()
    assert (await world.post(io.BytesIO(body))).status == 200
    assert world.workers["d0"].seen[0].body == body


async def test_a_stream_is_relayed_piece_by_piece_and_byte_for_byte(world):
    await world.start("d0")
    gate = asyncio.Event()
    pieces = [b'data: {"a":1}\n\n', b": comment \xff\x00\n\n", b"data: [DO", b"NE]\n\n"]
    world.workers["d0"].reply = streaming(*pieces, gate=gate)
    async with world.client.post(world.url + "/v1/chat/completions", data=b'{"model":"m","stream":true}') as response:
        first = await response.content.readany()
        assert pieces[0].startswith(first[: len(pieces[0])])  # arrived although the worker has not finished
        gate.set()
        assert first + await response.read() == b"".join(pieces)


async def test_a_compressed_answer_is_not_unpacked(world):
    await world.start("d0")

    async def reply(_request, _body):
        return web.Response(
            body=b"\x1f\x8b not really gzip", headers={"Content-Encoding": "gzip", "Content-Type": "application/json"}
        )

    world.workers["d0"].reply = reply
    got = await world.post(b'{"model":"m"}')
    assert (got.body, got.headers["content-encoding"]) == (b"\x1f\x8b not really gzip", "gzip")


async def test_a_workers_refusal_is_relayed_as_it_is(world):
    await world.start("d0")

    async def reply(_request, _body):
        return web.json_response({"error": {"code": "context_length_exceeded"}}, status=400)

    world.workers["d0"].reply = reply
    got = await world.post(b'{"model":"m"}')
    assert (got.status, got.json) == (400, {"error": {"code": "context_length_exceeded"}})
    assert headers.OUTCOME not in got.headers
    assert await world.metric('prfaas_gateway_requests_total{decision="local",outcome="invalid"}') == 1


async def test_a_client_cannot_choose_where_its_prompt_is_prefilled(world, short):
    await world.start("d0")
    sent = {
        "X-PrfaaS-Prefill-URL": "http://127.0.0.1:1",
        "x-prfaas-anything": "1",
        "x-prfaas-places": "us everywhere",
        "Authorization": "Bearer secret",
        "TE": "trailers",
    }
    sent |= {
        "Connection": "keep-alive, x-odd",
        "x-odd": "1",
        "Content-Type": "application/json",
        "traceparent": TRACEPARENT,
    }
    await world.post(short, headers=sent)
    got = dict(world.workers["d0"].seen[0].headers)
    request_id = got.pop("x-request-id")
    assert len(request_id) == 32
    assert got == {
        "host": world.workers["d0"].url.removeprefix("http://"),
        "accept": "*/*",
        "content-type": "application/json",
        "traceparent": TRACEPARENT,
        "content-length": str(len(short)),
        "x-prfaas-places": "* eu",
    }


async def test_forwards_a_trace_context_unchanged_and_drops_a_malformed_one(world, short):
    await world.start("d0")
    good = {"traceparent": TRACEPARENT, "tracestate": "a=b,c=d"}
    await world.post(short, headers=good)
    for bad in ("00-ab-cd-01", TRACEPARENT.upper(), TRACEPARENT + "-x", "ff" + TRACEPARENT[2:], "", "x" * 5000):
        await world.post(short, headers=good | {"traceparent": bad})
    first, *others = [
        {name: seen.headers[name] for name in good if name in seen.headers} for seen in world.workers["d0"].seen
    ]
    assert first == good
    assert others == 6 * [{}]


async def test_the_clients_request_id_is_kept_and_a_bad_one_replaced(world, short):
    await world.start("d0")
    got = await world.post(short, headers={"x-request-id": "run-7/a"})
    assert (world.workers["d0"].seen[0].headers["x-request-id"], got.headers["x-request-id"]) == ("run-7/a", "run-7/a")
    await world.post(short, headers={"x-request-id": "a b" * 99})
    assert len(world.workers["d0"].seen[1].headers["x-request-id"]) == 32


async def test_every_header_of_ours_stands_in_the_answer_once(world, short):
    await world.start("d0")

    async def reply(request, _body):
        added = {
            "X-Request-ID": request.headers["x-request-id"],
            "X-PRFAAS-Decision": "offload",
            "Keep-Alive": "timeout=9",
        }
        return web.json_response({}, headers=added)

    world.workers["d0"].reply = reply
    async with world.client.post(world.url + "/v1/completions", data=short) as response:
        assert len(response.headers.getall("x-request-id")) == 1
        assert response.headers.getall(headers.DECISION) == ["local"]
        assert "keep-alive" not in response.headers


async def test_while_our_certificate_has_run_out_every_prompt_stays_here_and_the_gateway_ready(world, long):
    """The control: before that, the prompt is offloaded."""
    await world.start("d0", "x0")
    assert (await world.post(long)).headers[headers.DECISION] == "offload"
    world.state.is_alone = lambda: True
    got = await world.post(long)
    assert (got.status, got.headers[headers.DECISION]) == (200, "local")
    assert (await world.get("/readyz")).status == 200


async def test_the_answer_says_what_was_decided(world, short, long):
    await world.start("d0", "p0", "x0")
    got = (await world.post(short)).headers
    assert {name: got[name] for name in (headers.DECISION, headers.PREFILL_CLUSTER, headers.PREFILL_INSTANCE)} == {
        headers.DECISION: "local",
        headers.PREFILL_CLUSTER: "hub",
        headers.PREFILL_INSTANCE: "p0",
    }
    got = (await world.post(long)).headers
    assert (got[headers.DECISION], got[headers.PREFILL_CLUSTER], got[headers.PREFILL_INSTANCE]) == (
        "offload",
        "eu",
        "x0",
    )
    assert (got[headers.DECODE_INSTANCE], got[headers.OUTCOME], got[headers.THRESHOLD_TOKENS]) == ("d0", "ok", "1000")
    assert (got[headers.PROMPT_TOKENS], got["x-extra"]) == ("10000", "kept")
    sent = [json.loads(one.body)["kv_transfer_params"]["prfaas"] for one in world.workers["d0"].seen]
    assert [one["cluster"] for one in sent] == ["hub", "eu"]
    assert [len(world.workers[name].seen) for name in ("p0", "x0")] == [1, 1]


async def test_a_client_that_leaves_while_it_waits_aborts_the_worker(world, short):
    await world.start("d0", limits=Limits(idle_seconds=600))  # no timeout of the gateway aborts it
    started = asyncio.Event()

    async def reply(_request, _body):
        started.set()
        await asyncio.Event().wait()

    world.workers["d0"].reply = reply
    waiting = asyncio.create_task(world.post(short))
    await started.wait()
    waiting.cancel()
    await world.workers["d0"].wait_aborted()
    await settled(world)
    assert await world.metric('prfaas_gateway_requests_total{decision="local",outcome="aborted"}') == 1


async def test_a_client_that_leaves_a_stream_aborts_the_worker(world):
    await world.start("d0", limits=Limits(idle_seconds=600))  # no timeout of the gateway aborts it
    world.workers["d0"].reply = streaming(b"data: 1\n\n", gate=asyncio.Event())
    response = await world.client.post(world.url + "/v1/chat/completions", data=b'{"model":"m","stream":true}')
    assert await response.content.readany() == b"data: 1\n\n"
    response.close()
    await world.workers["d0"].wait_aborted()
    await settled(world)


@pytest.mark.parametrize(("last", "outcome"), [(b"data: 1\n\n", "aborted"), (b"data: 1\n\ndata: [DONE]\n\n", "ok")])
async def test_a_client_that_leaves_behind_the_last_event_has_its_answer(world, last: bytes, outcome: str):
    await world.start("d0", limits=Limits(idle_seconds=600))
    world.workers["d0"].reply = streaming(last, gate=asyncio.Event())
    response = await world.client.post(world.url + "/v1/chat/completions", data=b'{"model":"m","stream":true}')
    assert await response.content.readany() == last
    response.close()
    await world.workers["d0"].wait_aborted()
    await settled(world)
    assert await world.metric(f'prfaas_gateway_requests_total{{decision="local",outcome="{outcome}"}}') == 1


async def test_a_client_that_stops_reading_is_cut_off_and_the_worker_aborted(world):
    await world.start("d0", limits=world_limits(idle_seconds=0.2, stall_seconds=0.2))

    async def flood(request, _body):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(b"data: " + b"x" * 100_000 + b"\n\n")

    world.workers["d0"].reply = flood
    body = b'{"model":"m","stream":true}'
    reader, writer = await asyncio.open_connection("127.0.0.1", world.running.port, limit=1000)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await world.workers["d0"].wait_aborted()
    await settled(world)
    with contextlib.suppress(ConnectionResetError):
        await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)  # all that was under way, and then the end
    writer.close()
    assert await world.metric('prfaas_gateway_requests_total{decision="local",outcome="aborted"}') == 1


async def test_a_client_that_never_finishes_its_body_is_answered(world):
    await world.start("d0", limits=world_limits(idle_seconds=0.1))
    reader, writer = await asyncio.open_connection("127.0.0.1", world.running.port)
    writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{"model":')
    assert (await asyncio.wait_for(reader.readline(), PATIENCE_SECONDS)).startswith(b"HTTP/1.1 408 ")
    writer.close()


async def settled(world) -> None:
    """Wait until the gateway has noticed and forgotten all requests."""
    await eventually_async(lambda: world.state.in_flight == 0, "no request is in flight")


@pytest.mark.parametrize(
    "pieces",
    [[b"data: 1\n\n"], [b'data: {"half'], [b"data: 1\n"], [b"data: 1\n", b"\n"]],
    ids=["behind an event", "within an event", "within its end", "behind an end in two pieces"],
)
async def test_a_stream_that_breaks_off_ends_with_an_error_event(world, pieces):
    await world.start("d0")
    world.change_instances(engine="dynamo")  # its streams are relayed as they come, since they cannot continue
    world.workers["d0"].reply = streaming(*pieces, die=True)
    got = await world.post(b'{"model":"m","stream":true}')
    first, event, end = got.body.split(b"\n\n")
    error = json.loads(event.removeprefix(b"data: "))["error"]
    assert (first, error["code"], error["type"]) == (b"".join(pieces).strip(), "stream_broken", "server_error")
    assert end == b"", "an empty block would be an event to some readers"
    assert await world.metric('prfaas_gateway_requests_total{decision="local",outcome="failed"}') == 1


async def test_another_format_that_breaks_off_is_cut_short_for_the_client_too(world):
    await world.start("d0")
    world.workers["d0"].reply = streaming(b'{"half', content_type="application/json", die=True)
    try:
        await world.post(b'{"model":"m"}')
    except aiohttp.ClientPayloadError:
        return
    raise AssertionError("a truncated answer passed for a whole one")


async def test_a_worker_that_falls_silent_ends_the_stream(world):
    await world.start("d0", limits=world_limits(idle_seconds=0.1, stall_seconds=0.1, recover_seconds=0.1))
    world.workers["d0"].reply = streaming(b"data: 1\n\n", gate=asyncio.Event())
    got = await world.post(b'{"model":"m","stream":true}')
    assert b"stream_broken" in got.body


async def test_a_worker_that_never_answers_is_a_timeout(world):
    await world.start("d0", limits=world_limits(first_byte_seconds=0.1))

    async def reply(_request, _body):
        await asyncio.Event().wait()

    world.workers["d0"].reply = reply
    got = await world.post(b'{"model":"m"}')
    assert (got.status, got.json["error"]["code"]) == (504, "timeout")
    await world.workers["d0"].wait_aborted()


def world_limits(**changed) -> Limits:
    return Limits(connect_seconds=0.3, drain_lead_seconds=0)._replace(**changed)


async def test_an_http_1_0_client_gets_the_whole_stream(world):
    await world.start("d0")
    world.workers["d0"].reply = streaming(b"data: 1\n\n", b"data: [DONE]\n\n")
    body = b'{"model":"m","stream":true}'
    reader, writer = await asyncio.open_connection("127.0.0.1", world.running.port)
    writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    got = await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
    writer.close()
    await writer.wait_closed()
    assert got.endswith(b"\r\n\r\ndata: 1\n\ndata: [DONE]\n\n")
