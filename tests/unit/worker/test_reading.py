"""Bodies are bounded by what a full context can need, before anything is made of them, and in all that come at once."""

import asyncio
import gzip
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from prfaas.bounds.bodies import HeldBytes
from prfaas.memory import MAX_BODY_BYTES
from prfaas_worker.front.serving import BYTES_BESIDE, BYTES_PER_TOKEN, LONG_BYTES, ServedModel
from prfaas_worker.tokenizer import load_tokenizer

from ...waiting import eventually_async

pytestmark = pytest.mark.system

ASSETS = Path(__file__).parents[3] / "worker/prfaas_worker/assets/kimi-linear-tiny"
SERVED = ServedModel(model_name="tiny", fingerprint="", vocab_size=264, max_context=1000, max_choices=4)
MOST = BYTES_BESIDE + 1000 * BYTES_PER_TOKEN
PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/prefills"]


@pytest.fixture
def loaded(front):
    front.serving.loaded(SERVED, load_tokenizer(ASSETS))
    return front


async def post(client, front, path: str, data: Any) -> tuple[int, dict[str, Any]]:
    sent = io.BytesIO(data) if isinstance(data, bytes) else data
    async with client.session.post(f"{front.url}{path}", data=sent) as answer:
        return answer.status, await answer.json()


def text(size: int) -> bytes:
    return json.dumps({"prompt": "x" * (size - len('{"prompt": ""}'))}).encode()


async def test_the_longest_body_is_read_and_a_longer_one_is_not(client, loaded):
    status, answer = await post(client, loaded, "/tokenize", text(MOST))
    assert (status, answer["count"]) == (200, MOST - len('{"prompt": ""}') + 1)
    assert (await post(client, loaded, "/tokenize", text(MOST + 1)))[0] == 413


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_beyond_what_a_context_needs_is_a_413_that_says_how_much_that_is(client, loaded, path: str):
    status, answer = await post(client, loaded, path, b"x" * (MOST + 1))
    assert (status, answer["error"]["code"]) == (413, "request_too_large")
    assert f"{MOST + 1} bytes; with a context of 1000 tokens at most {MOST}" in answer["error"]["message"]


async def test_a_body_of_unknown_length_ends_at_the_same_bound(client, loaded):
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(MOST // 50_000 + 1):
            yield b"x" * 50_000

    assert (await post(client, loaded, "/v1/completions", parts()))[0] == 413
    assert unread_bytes(loaded) == 0


def test_the_bound_grows_with_the_context_up_to_a_cap():
    sizes = [
        ServedModel(model_name="m", fingerprint="", vocab_size=1, max_context=context, max_choices=1).max_body_bytes
        for context in (1 << 17, 1 << 20, 1 << 27)
    ]
    assert sizes == [3 << 20, 17 << 20, MAX_BODY_BYTES]


async def test_a_body_that_unpacks_to_more_ends_at_the_bound_too(client, loaded):
    data, packed = gzip.compress(text(2 * MOST)), {"content-encoding": "gzip"}
    async with client.session.post(f"{loaded.url}/tokenize", data=data, headers=packed) as answer:
        assert answer.status == 413


async def test_a_body_in_another_encoding_than_it_says_is_a_400(client, loaded):
    packed = {"content-encoding": "gzip"}
    async with client.session.post(f"{loaded.url}/tokenize", data=b"abcde", headers=packed) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (400, "invalid_request")
    assert unread_bytes(loaded) == 0


async def test_more_than_fits_of_bodies_at_once_is_refused_and_counted_off(client, loaded):
    loaded.serving.bodies = HeldBytes(1000)
    status, answer = await post(client, loaded, "/tokenize", text(1001))
    assert (status, answer["error"]["code"]) == (503, "overloaded")
    assert (await post(client, loaded, "/tokenize", text(1000)))[0] == 200
    assert unread_bytes(loaded) == 0


def unread_bytes(front) -> int:
    return front.serving.bodies.all.taken_bytes


async def until_unread(front, wanted: int) -> None:
    await eventually_async(lambda: unread_bytes(front) == wanted, lambda: f"last {unread_bytes(front)}")


async def test_a_client_that_leaves_within_its_body_counts_no_more(loaded):
    _, writer = await asyncio.open_connection(loaded.host, 8000)
    writer.write(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n" + b"x" * 100)
    await until_unread(loaded, 100)
    writer.close()
    await until_unread(loaded, 0)


def test_long_bodies_wait_only_for_each_other(loaded):
    assert loaded.serving.reader(LONG_BYTES + 1) is loaded.serving.reader(MOST) is not loaded.serving.reader(LONG_BYTES)
