"""Proves that a received request never changes and that its body is read once; what becomes of it stands in the log."""

import asyncio
import json
import threading
from contextlib import suppress
from dataclasses import FrozenInstanceError, fields
from unittest.mock import Mock

import pytest
from tests.waiting import eventually_async

from prfaas.errors import RequestError
from prfaas.routing.prompt_size import LARGE_BYTES, Unit, prompt_size, prompt_values
from prfaas.wire import headers
from prfaas_gateway import dispatch, request
from prfaas_gateway.api import API_ROUTES
from prfaas_gateway.kv import manager
from prfaas_gateway.request import (
    MAX_FIELDS,
    SOME_VALUES,
    GatewayRequest,
    ReadingWay,
    read_aside,
    read_fields,
    read_salted,
)
from prfaas_gateway.upstream import Upstream

BODY = b'{"model": "m", "prompt": "x", "seed": 7}'
KEY = "sk-alice-0123456789abcdef"


def received(body: bytes = BODY, *, every: bool = False) -> GatewayRequest:
    model, found = read_fields(body, every=every)
    found = found if every else {}
    api = API_ROUTES["/v1/completions"]
    return GatewayRequest(
        api=api, request_id="r", model=model, body=body, fields=found, has_every_field=every, headers={}
    )


@pytest.mark.parametrize("name", [one.name for one in fields(GatewayRequest)])
def test_a_received_request_never_changes(name):
    with pytest.raises(FrozenInstanceError):
        setattr(received(), name, None)


@pytest.mark.parametrize(("every", "times"), [(False, 1), (True, 0)])
def test_an_engine_that_comes_later_has_the_body_read_once_more_and_not_at_each_attempt(monkeypatch, every, times):
    one, read = received(every=every), []
    monkeypatch.setattr(request, "read_fields", lambda *given, **how: read.append(how) or read_fields(*given, **how))
    assert {name: bytes(raw) for name, raw in one.every_field.items()} == {
        "model": b'"m"',
        "prompt": b'"x"',
        "seed": b"7",
    }
    assert one.every_field is one.every_field
    assert len(read) == times


@pytest.mark.parametrize(
    ("salt_of", "sent"),
    [
        (lambda own: f"{own} of a", b'{"model":"m","prompt":"x","seed":7,"cache_salt":" of a"}'),
        pytest.param(None, BODY, id="control: without a salt"),
    ],
)
def test_a_body_is_read_once_also_with_a_salt_and_kept_once(monkeypatch, salt_of, sent):
    read, decoder = [], request._every_field
    monkeypatch.setattr(request, "_every_field", Mock(decode=lambda given: read.append(given) or decoder.decode(given)))
    came = bytearray(BODY)
    _, found, body = read_salted(came, ReadingWay(True, salt_of))
    assert (body, found) == (sent, decoder.decode(sent))
    assert [given for given in read if given != b"{}"] == [BODY]
    came.clear()  # it raises where a field is still a part of what came


@pytest.mark.parametrize(
    "rest", [b"", b', "caf\xc3\xa9" : "caf\\u00e9"', b',"cache_salt":"own", "a\\"b":[1,\n2], "model":"x"']
)
def test_the_fields_of_a_salted_body_are_parts_of_it(rest):
    came = b'{"model": "m"' + rest + b" }"
    _, found, body = read_salted(came, ReadingWay(True, lambda own: f"{own} of a"))
    assert list(found.items()) == list(request._every_field.decode(body).items())
    own = json.loads(came).get("cache_salt", "")
    assert json.loads(body) == json.loads(came) | {"cache_salt": f"{own} of a"}


async def test_a_salted_body_is_written_once_for_all_legs_and_its_digest(world, monkeypatch, tmp_path):
    (keys := tmp_path / "keys").mkdir()
    (keys / "alice").write_text(KEY)
    written, sent, write, post = [], [], request._write, Upstream.post
    monkeypatch.setattr(request, "_write", lambda fields: written.append(fields) or write(fields))
    monkeypatch.setattr(Upstream, "post", lambda *given, **how: sent.append(given[4]) or post(*given, **how))
    await world.start("d0", "d1", keys_dir=keys)

    async def die(http, _body):
        http.transport.abort()
        await asyncio.Event().wait()

    for worker in world.workers.values():
        worker.reply = die
    got = await world.post(BODY, "/v1/completions", headers={"Authorization": f"Bearer {KEY}"})
    assert got.json["error"]["code"] == "request_quarantined"
    assert (len(written), len(sent)) == (1, 2)
    assert sent[0] is sent[1]


def test_a_field_that_steers_caches_is_refused_also_then():
    one = received(b'{"model": "m", "prompt": "x", "kv_transfer_params": {}}')
    for _ in range(2):
        with pytest.raises(RequestError, match="kv_transfer_params"):
            _ = one.every_field


def test_a_body_has_no_more_than_so_many_fields_where_all_are_kept():
    body = json.dumps({"model": "m"} | {f"f{number}": 0 for number in range(MAX_FIELDS)}).encode()
    assert read_fields(body, every=False)[0] == "m"
    with pytest.raises(RequestError, match="1001 fields, more than 1000"):
        read_fields(body, every=True)


@pytest.mark.parametrize(
    ("path", "rest"),
    [
        ("/v1/chat/completions", b'"messages":[{"role":"user","content":"caf\\u00e9"}],"tools":[{"a":1}]'),
        pytest.param("/v1/chat/completions", b'"messages":"' + b"x" * LARGE_BYTES + b'"', id="large"),
        ("/v1/completions", b'"prompt":[[1,2],[3]]'),
        ("/v1/completions", b'"prompt":"hi","messages":[1]'),
        ("/v1/responses", b'"input":"hi","instructions":"ok","previous_response_id":"r"'),
        ("/v1/messages", b'"messages":[{"content":[{"text":"hi"}]}],"system":"ok"'),
        ("/v1/messages", b'"messages":null'),
    ],
)
def test_a_prompt_has_one_size_whether_its_body_is_read_for_an_engine_of_others_or_not(path, rest):
    body, names = b'{"model":"m",' + rest + b"}", API_ROUTES[path].fields
    sizes = [prompt_size(prompt_values(read_fields(body, every=every)[1], names)) for every in (False, True)]
    assert sizes[0] == sizes[1]


def test_no_depth_of_nesting_is_an_error_of_the_gateway():
    """What can just be decoded may be too deep to be encoded again, for the match of prefixes."""
    api, nested = API_ROUTES["/v1/chat/completions"], 0
    for depth in range(1, 1000):
        body = b'{"model":"m","messages":[{"content":' + b"[" * depth + b"]" * depth + b"}]}"
        with suppress(RequestError):
            found = read_fields(body, every=False)[1]
            values = prompt_values(found, api.fields)
            one = GatewayRequest(api=api, request_id="r", model="m", body=body, fields={}, headers={})
            nested += manager._read_prompt(one, values) is not None
            assert prompt_size(values).counts[Unit.MESSAGE] in (0, 2)
    assert nested > 100


async def test_the_values_of_a_body_are_counted_once_for_all_that_is_read_of_it(monkeypatch):
    counted, one = [], received()
    monkeypatch.setattr(request, "count_marks", lambda body: counted.append(body) or 0)
    assert [await read_aside(one, lambda number=number: number) for number in range(2)] == [0, 1]
    assert counted == [BODY]


@pytest.mark.system
async def test_a_body_of_many_values_is_read_in_a_thread_so_that_no_stream_must_wait(world, monkeypatch):
    threads: dict[str, int] = {}

    def note(module, name):
        read = getattr(module, name)

        def noted(*given):
            threads[name] = threading.get_ident()
            return read(*given)

        monkeypatch.setattr(module, name, noted)

    note(dispatch, "prompt_size")
    note(manager, "_read_prompt")
    await world.start("d0", "d1")
    world.change_instances(engine="vllm-nixl")
    for messages, is_aside in ((SOME_VALUES, True), (3, False)):
        threads.clear()

        async def are_both_read(body={"model": "m", "messages": [{}] * messages}) -> bool:  # noqa: B006
            await world.post(body, "/v1/chat/completions")
            return len(threads) == 2

        await eventually_async(are_both_read, "the gateway looks for the prompt at its instances")
        asides = {name: found != threading.get_ident() for name, found in threads.items()}
        assert asides == {"prompt_size": is_aside, "_read_prompt": is_aside}


async def test_the_log_names_a_request_whose_body_is_refused(world, caplog):
    caplog.set_level("INFO")
    await world.start("d0")
    assert (await world.post(b"{", headers={headers.REQUEST_ID: "damaged-1"})).status == 400
    assert (
        "request request_id=damaged-1 decision=none outcome=invalid estimated_tokens=0 peer=127.0.0.1 status=400"
        in caplog.text
    )
