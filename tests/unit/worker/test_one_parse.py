"""A request's JSON is parsed once in the front, whatever is made of it: the prompt and the byte map."""

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prfaas.wire.engine import Ready
from prfaas_worker.front import openai_bodies
from prfaas_worker.front.serving import ServedModel
from prfaas_worker.tokenizer import load_tokenizer

pytestmark = pytest.mark.system

ASSETS = Path(__file__).parents[3] / "worker/prfaas_worker/assets/kimi-linear-tiny"
LONG = "What is the weather? " * 2000
CHAT = {"messages": [{"role": "user", "content": "x" * 300}]}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CALLED = [*CHAT["messages"], {"role": "assistant", "content": None, "tool_calls": [CALL]}]


@contextmanager
def json_parses() -> Iterator[list[str]]:
    """Collect the calls that parse JSON, of this thread and of those that begin meanwhile."""
    found: list[str] = []

    def profile(frame: Any, event: str, called: Any) -> None:
        owner = getattr(called, "__self__", None)
        parses = called is msgspec.json.decode or isinstance(owner, msgspec.json.Decoder)
        if (event == "c_call" and parses) or (event == "call" and frame.f_code is json.loads.__code__):
            found.append(f"{frame.f_code.co_qualname} in {frame.f_code.co_filename}")

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]


@pytest.fixture
async def loaded(front):
    """A front with the model that ships along."""
    model = ServedModel(model_name="tiny", fingerprint="f" * 64, vocab_size=264, max_context=100_000, max_choices=4)
    front.serving.loaded(model, load_tokenizer(ASSETS))
    await front.say(Ready("f" * 64, str(ASSETS), 264, 100_000, 9000))
    await front.serving.engine.ready
    return front


async def until_learned(client, front, path: str, fields: dict[str, Any]) -> list[str]:
    """Send a request, wait until the byte map knows it, and return where its JSON was parsed."""
    body = msgspec.json.encode({"model": "tiny", **fields})
    with json_parses() as found:
        asking = asyncio.create_task(client.session.post(f"{front.url}{path}", data=body).__aenter__())
        await front.hear()
        while front.serving.events.byte_map.next_seq == 0:
            assert await front.serving.events.wait(5)
        asking.cancel()
    return found


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "def main(" * 60}),
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/chat/completions", {"messages": CALLED, "metadata": {"a": "b"}}),
    ],
)
async def test_a_request_is_parsed_once(client, loaded, path: str, fields: dict[str, Any]):
    (place,) = await until_learned(client, loaded, path, fields)
    assert place.startswith("read_body in ")


async def test_a_second_parse_would_be_seen(client, loaded, monkeypatch):
    real: Callable[..., Any] = openai_bodies.read_messages

    def parsing_again(messages: list[dict[str, Any]]) -> Any:
        msgspec.json.decode(msgspec.json.encode(messages))
        msgspec.json.Decoder().decode(b"[]")
        json.loads("[]")
        return real(messages)

    monkeypatch.setattr("prfaas_worker.front.openai_in.read_messages", parsing_again)
    messages = [{"role": "user", "content": LONG}]  # read in a thread
    assert len(await until_learned(client, loaded, "/v1/chat/completions", {"messages": messages})) == 4


async def test_tokenize_parses_once(client, loaded):
    with json_parses() as found:
        async with client.session.post(f"{loaded.url}/tokenize", data=json.dumps(CHAT)) as answer:
            assert answer.status == 200
    assert [place.partition(" ")[0] for place in found] == ["read_body"]
