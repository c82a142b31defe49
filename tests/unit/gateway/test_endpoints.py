"""Proves the public surface around the relay: refusals in OpenAI's form, models, health, metrics, the estimate."""

import io

import msgspec
import pytest
from aiohttp import web
from tests.serving import send_bytes

from prfaas.wire import headers, openapi
from prfaas_gateway.limits import Limits

BAD_BODIES = [
    (b"", "invalid_json"),
    (b"{", "invalid_json"),
    (b'{"model":"m"', "invalid_json"),
    (b'{"model":"m"} trailing', "invalid_json"),
    (b"[]", "invalid_request"),
    (b"{}", "invalid_request"),
    (b'{"model":3}', "invalid_request"),
    (b'{"model":null}', "invalid_request"),
    (b'{"model":"\xff"}', "invalid_json"),
    (b'{"model":"m","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json"),
]


@pytest.mark.parametrize(("body", "code"), BAD_BODIES)
async def test_a_damaged_body_is_refused_and_reaches_no_worker(world, body, code):
    await world.start("d0")
    got = await world.post(body)
    assert (got.status, got.json["error"]["code"], got.json["error"]["type"]) == (400, code, "invalid_request_error")
    assert set(got.json["error"]) == {"message", "type", "param", "code"}
    assert world.workers["d0"].seen == []


async def test_an_unknown_model_is_404(world):
    await world.start("d0")
    got = await world.post({"model": "gpt-x"})
    assert (got.status, got.json["error"]["code"], got.json["error"]["param"]) == (404, "model_not_found", "model")
    assert await world.metric('prfaas_gateway_requests_total{decision="none",outcome="invalid"}') == 1


async def test_an_error_repeats_only_the_beginning_of_a_long_model_name(world):
    await world.start("d0")
    got = await world.post({"model": "m" * 1_000_000})
    assert (got.status, got.json["error"]["code"]) == (404, "model_not_found")
    assert len(got.json["error"]["message"]) < 300


@pytest.mark.parametrize("announced", [True, False])
async def test_refuses_a_body_above_the_limit(world, announced):
    await world.start("d0", limits=Limits(request_bytes=1000))
    body = b'{"model":"m","x":"' + b"y" * 1000 + b'"}'

    async def unannounced():
        yield body

    got = await world.post(body if announced else unannounced())
    assert (got.status, got.json["error"]["code"]) == (413, "request_too_large")
    assert world.workers["d0"].seen == []


async def test_an_unknown_path_is_404_in_openai_form(world):
    await world.start("d0")
    for got in (await world.get("/v2"), await world.get("/v2/%0A"), await world.post({}, "/v1/embeddings")):
        assert (got.status, got.json["error"]["code"]) == (404, "unknown_url")


@pytest.mark.system
@pytest.mark.parametrize("target", ["CONNECT a:1", "OPTIONS *"])
async def test_a_request_without_a_path_is_404_in_openai_form(world, target):
    await world.start("d0")
    raw = f"{target} HTTP/1.1\r\nHost: a:1\r\nConnection: close\r\n\r\n".encode()
    head, _, body = (await send_bytes(world.running.port, raw)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 404 ")
    assert msgspec.json.decode(body)["error"]["code"] == "unknown_url"


async def test_another_method_gets_405_and_the_allowed_ones(world):
    await world.start("d0")
    for got, allowed in (
        (await world.get("/v1/chat/completions"), "POST"),
        (await world.post({}, "/v1/models/m"), "GET, HEAD"),
    ):
        assert (got.status, got.json["error"]["code"]) == (405, "method_not_allowed")
        assert got.headers["allow"] == allowed


async def test_the_model_is_listed(world):
    await world.start("d0")
    assert [one["id"] for one in (await world.get("/v1/models")).json["data"]] == ["m"]
    assert (await world.get("/v1/models/m")).json["object"] == "model"
    assert (await world.get("/v1/models/other")).status == 404


async def test_it_tells_what_it_serves(world):
    await world.start("d0")
    assert (await world.get("/openapi.json")).json == openapi.gateway()


async def test_health_and_readiness(world):
    await world.start("d0")
    assert [(await world.get(path)).status for path in ("/healthz", "/readyz")] == [200, 200]
    world.state.draining = True
    assert [(await world.get(path)).status for path in ("/healthz", "/readyz")] == [200, 503]


@pytest.mark.system
@pytest.mark.parametrize("with_keys", [False, True])
async def test_what_is_no_http_is_refused_before_any_key_and_leaves_no_key_in_the_log(
    world, short, tmp_path, caplog, with_keys
):
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "a").write_text("sk-0123456789abcdef")
    await world.start("d0", keys_dir=tmp_path / "keys" if with_keys else None)
    key = "Authorization: Bearer sk-0123456789abcdef"

    async def sent(*headers: str) -> tuple[int, str]:
        lines = ("POST /v1/chat/completions HTTP/1.1", "Host: g", "Connection: close", key, *headers)
        raw = "\r\n".join((*lines, f"Content-Length: {len(short)}", "", "")).encode() + short
        head, _, body = (await send_bytes(world.running.port, raw)).partition(b"\r\n\r\n")
        error = msgspec.json.decode(body).get("error", {})
        return int(head.split(b" ")[1]), error.get("code", "")

    assert await sent(f"X-Long: {'y' * (32 << 10)}") == (200, "")
    assert await sent(f"X-Long: {'y' * 40_000}") == (431, "header_too_large")
    assert await sent("Content-Length: 1") == (400, "invalid_http")
    assert await sent("Content-Encoding: zstd") == (415, "unsupported_encoding")
    assert await sent("Content-Encoding: gzip") == (400, "invalid_request")
    assert "Traceback" not in caplog.text
    assert "sk-0123" not in caplog.text
    assert caplog.text.count("refused unread") == 3


async def test_a_gateway_that_drains_serves_and_asks_for_a_new_connection(world, short):
    await world.start("d0")
    before = await world.post(short)
    world.state.draining = True
    got = await world.post(short)
    assert "connection" not in before.headers
    assert (got.status, got.headers["connection"]) == (200, "close")


async def test_before_the_first_table_nothing_is_ready_and_requests_have_to_wait(world, short):
    await world.start("d0")
    world.state.table = None
    assert (await world.get("/readyz")).status == 503
    got = await world.post(short)
    assert (got.status, got.headers["retry-after"]) == (503, "1")


async def test_metrics_count_what_happened(world, short, long):
    await world.start("d0", "x0")
    await world.post(short)
    await world.post(long)
    assert await world.metric('prfaas_gateway_requests_total{decision="local",outcome="ok"}') == 1
    assert await world.metric('prfaas_gateway_requests_total{decision="offload",outcome="ok"}') == 1
    assert await world.metric('prfaas_gateway_time_to_first_token_seconds_count{decision="offload"}') == 1
    assert await world.metric("prfaas_gateway_prompt_tokens_sum") == 100 + 10_000
    assert await world.metric("prfaas_gateway_threshold_tokens") == 1000
    assert await world.metric("prfaas_gateway_in_flight") == 0


async def test_reported_lengths_correct_the_estimate(world):
    """380 letters are fewer than 100 tokens at first; where a letter is a token they exceed a threshold of 300."""
    await world.start("d0", "x0", tokens=300)

    async def byte_level(_request, body):
        return web.json_response({}, headers={headers.PROMPT_TOKENS: str(len(body))})

    world.workers["d0"].reply = byte_level
    body = msgspec.json.encode({"model": "m", "prompt": "z" * 380})
    decisions = [(await world.post(body, "/v1/completions")).headers[headers.DECISION] for _ in range(4)]
    assert decisions[0] == "local"
    assert decisions[-1] == "offload"


async def test_a_packed_request_body_counts_unpacked_and_is_forwarded_plain(world):
    import gzip

    await world.start("d0", limits=Limits(request_bytes=100_000))
    body = b'{"model":"m","prompt":"' + b"a" * 1000 + b'"}'
    got = await world.post(io.BytesIO(gzip.compress(body)), headers={"Content-Encoding": "gzip"})
    assert (got.status, world.workers["d0"].seen[0].body) == (200, body)
    assert "content-encoding" not in world.workers["d0"].seen[0].headers
    bomb = gzip.compress(b'{"model":"m","prompt":"' + b"a" * 10_000_000)
    assert (await world.post(io.BytesIO(bomb), headers={"Content-Encoding": "gzip"})).status in (400, 413)
