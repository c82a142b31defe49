"""Pages of the origins that a policy names may call from a browser, without its credentials; all others may not."""

import json

import pytest
from aiohttp import web

from prfaas.wire import headers
from prfaas_gateway.options import parse

ORIGIN = "https://chat.example"
CHAT = "/v1/chat/completions"
ASKING = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


async def ask(world, method: str, path: str, origin: str = ORIGIN, **more):
    sent = {"Origin": origin, **more.pop("headers", {})}
    async with world.client.request(method, world.url + path, headers=sent, **more) as response:
        await response.read()
        return response


@pytest.mark.parametrize("origins", [ORIGIN, "http://localhost:3000, https://chat.example", "*"])
async def test_a_page_may_ask_and_call_and_read_what_it_gets(world, origins, tmp_path):
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "a").write_text("sk-0123456789abcdef")
    await world.start("d0", cors_origins=origins, keys_dir=tmp_path / "keys")
    shown = "*" if origins == "*" else ORIGIN
    asked = await ask(world, "OPTIONS", CHAT, headers=ASKING)
    assert (asked.status, asked.headers["Access-Control-Allow-Origin"]) == (204, shown)
    assert "POST" in asked.headers["Access-Control-Allow-Methods"]
    assert asked.headers["Access-Control-Allow-Headers"] == ASKING["Access-Control-Request-Headers"]
    body = {"model": "m", "messages": []}
    refused = await ask(world, "POST", CHAT, json=body)
    called = await ask(world, "POST", CHAT, json=body, headers={"x-api-key": "sk-0123456789abcdef"})
    assert (refused.status, called.status) == (401, 200), "a browser asks without a key, and calls with one"
    for answer in (asked, refused, called, await ask(world, "GET", "/v1/models/other"), await ask(world, "GET", CHAT)):
        assert answer.headers["Access-Control-Allow-Origin"] == shown
        assert "Access-Control-Allow-Credentials" not in answer.headers
    assert headers.REQUEST_ID in called.headers["Access-Control-Expose-Headers"]
    assert called.headers.get("Vary") == (None if origins == "*" else "Origin")


@pytest.mark.parametrize(
    ("origins", "origin"),
    [("", ORIGIN), (ORIGIN, "https://evil.example"), (ORIGIN, f"{ORIGIN}.evil.example"), (ORIGIN, "null")],
)
async def test_no_other_page_may(world, origins, origin):
    await world.start("d0", cors_origins=origins)
    asked = await ask(world, "OPTIONS", CHAT, origin, headers=ASKING)
    called = await ask(world, "GET", "/v1/models", origin)
    assert (asked.status, called.status) == (405, 200)
    assert not any(name.lower().startswith("access-control") for name in (*asked.headers, *called.headers))


@pytest.mark.parametrize(("origins", "shown"), [(ORIGIN, None), ("*", "*")])
async def test_a_cache_that_has_the_answer_to_a_client_that_is_no_page_may_give_it_to_the_right_pages(
    world, origins, shown
):
    await world.start("d0", cors_origins=origins)
    got = await world.get("/v1/models")
    assert got.headers.get("access-control-allow-origin") == shown
    assert ("vary" in got.headers) == (shown is None), "either all pages may have it, or each asks for itself"


@pytest.mark.parametrize("path", ["/metrics", "/ui/", "/ui/state", "/healthz", "/v2"])
async def test_pages_read_the_api_and_nothing_else(world, path):
    await world.start("d0", cors_origins="*")
    asked = await ask(world, "OPTIONS", path, headers=ASKING)
    called = await ask(world, "GET", path)
    assert asked.status in (404, 405)
    assert not any(name.lower().startswith("access-control") for name in (*asked.headers, *called.headers))


@pytest.mark.parametrize("origins", ["", ORIGIN])
async def test_an_engine_does_not_say_which_pages_may_read_its_answers(world, origins):
    await world.start("d0", cors_origins=origins)
    told = {"Access-Control-Allow-Origin": "*", "Access-Control-Allow-Credentials": "true"}

    async def reply(_request: web.Request, _body: bytes) -> web.StreamResponse:
        return web.json_response({}, headers=told)

    world.workers["d0"].reply = reply
    got = await ask(world, "POST", CHAT, json={"model": "m", "messages": []})
    assert got.headers.getall("Access-Control-Allow-Origin", []) == ([ORIGIN] if origins else [])
    assert "Access-Control-Allow-Credentials" not in got.headers


async def test_a_stream_reaches_a_page_and_asks_proxies_not_to_hold_it_back(world):
    await world.start("d0", cors_origins=ORIGIN)

    async def stream(request: web.Request, body: bytes) -> web.StreamResponse:
        if not json.loads(body).get("stream"):
            return web.json_response({})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: [DONE]\n\n")
        return response

    world.workers["d0"].reply = stream
    streamed = await ask(world, "POST", CHAT, json={"model": "m", "messages": [], "stream": True})
    whole = await ask(world, "POST", CHAT, json={"model": "m", "messages": []})
    assert streamed.headers.getall("X-Accel-Buffering") == ["no"]
    assert "X-Accel-Buffering" not in whole.headers
    assert streamed.headers["Access-Control-Allow-Origin"] == ORIGIN


@pytest.mark.parametrize("wrong", ["https://chat.example/", "chat.example", "https://*.example", "*,x", "HTTPS://A"])
def test_what_is_no_origin_is_a_mistake_of_the_command_line(wrong, capsys):
    with pytest.raises(SystemExit):
        parse(["--routes-file", "routes.json", "--cors-origins", wrong])
    assert "--cors-origins" in capsys.readouterr().err


@pytest.mark.parametrize("right", ["", "*", "https://a", "http://localhost:3000,app://obsidian.md, http://[::1]:80"])
def test_origins_are_read(right):
    assert len(parse(["--routes-file", "routes.json", "--cors-origins", right]).origins) == len(
        [one for one in right.split(",") if one]
    )
