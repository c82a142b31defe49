"""A server of vLLM that dies in the middle of streams: they continue at the other one, and nothing shows where. Real
clients get to the end, with the usage of the whole.

In bf16 two batches may choose differently between tokens that are about as likely. So an answer is compared with the
model itself: given the tokens before it, each one is the most likely, and usage and text fit the tokens.

The server that dies counts tokens itself, and no stream ends before it is dead: this process may be too busy to see the
moment.
"""

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from prfaas.names import HUB
from prfaas.wire import headers
from prfaas.wire.routes import Instance

from ..clients.cases import HELLO, STREAMED, Case
from ..clients.programs import Clients
from ..waiting import NotInTime
from .gateways import gateway, table_of
from .servers import StartServer, VllmServer

TEMPLATE = "{% for one in messages %}{{ one.content }}{% endfor %}"
TOKENS = 400
BEGUN = 40
NEAR_TIE = 0.25
SAMPLING = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}
OF_A_CLIENT = Case(
    "a long answer", STREAMED | {"messages": HELLO, "max_tokens": TOKENS, "temperature": 0}, extra={"ignore_eos": True}
)


class Servers(NamedTuple):
    """Two decode instances, and the gateway before them. `dead` exists once `one` has killed itself."""

    one: VllmServer
    other: VllmServer
    url: str
    admin_url: str
    dead: Path


@pytest.fixture
def servers(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("gateway")
    dead, flags = folder / "dead", ("--chat-template", TEMPLATE, "--max-num-seqs", "16")
    variables = {"HOLD_FROM": str(BEGUN), "HOLD_UNTIL": str(dead)}
    started = [start_server(*flags, **variables, DIES="yes"), start_server(*flags, **variables)]
    one, other = (server.wait_ready() for server in started)
    table = msgspec.structs.replace(
        table_of("vllm-prfaas", one.url, other.url),
        instances=tuple(
            Instance(name=name, pool="decode", cluster=HUB, role="decode", url=server.url, engine="vllm-prfaas")
            for name, server in (("one", one), ("other", other))
        ),
    )
    with gateway(folder, table) as (url, admin_url):
        yield Servers(one, other, url, admin_url, dead)


class Streamed(NamedTuple):
    text: str
    prompt_ids: list[int]
    ids: list[int]
    usage: dict[str, int]
    instance: str


def requests() -> list[tuple[str, dict[str, Any]]]:
    """Return completions and chats of several lengths, some with stop strings that never come."""
    calls: list[tuple[str, dict[str, Any]]] = []
    for number in range(8):
        text = f"The number {number} is " * (5 + 20 * number)
        more = {"stop": ["\0never", "\0at all"]} if number % 3 == 0 else {}
        if number % 2:
            calls.append(("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]} | more))
        else:
            calls.append(("/v1/completions", {"prompt": text} | more))
    return calls


def stream(url: str, path: str, body: dict[str, Any]) -> Streamed:
    """Read a stream to its end; fail if it has none."""
    data = json.dumps({"model": "tiny", "stream": True, "return_token_ids": True} | SAMPLING | body).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"})
    text, prompt_ids, ids, usage = "", [], [], {}
    with urllib.request.urlopen(request, timeout=300) as answer:
        instance = answer.headers.get(headers.DECODE_INSTANCE, "")
        for line in answer:
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]\n":
                return Streamed(text, prompt_ids, ids, usage, instance)
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            prompt_ids = prompt_ids or chunk.get("prompt_token_ids") or []
            for choice in chunk["choices"]:
                prompt_ids = prompt_ids or choice.get("prompt_token_ids") or []
                text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                ids = ids + (choice.get("token_ids") or [])
            usage = chunk.get("usage") or usage
    raise AssertionError(f"the stream ended without [DONE] after {text!r}")


def worst_gap(server: VllmServer, prompt_ids: list[int], ids: list[int]) -> float:
    """Return by how much a token of an answer was less likely than the best one at its place."""
    reply = server.post("/v1/completions", prompt=prompt_ids + ids, max_tokens=1, prompt_logprobs=1)
    places = reply["choices"][0]["prompt_logprobs"][len(prompt_ids) :]
    gaps = []
    for token, place in zip(ids, places, strict=True):
        likely = {int(name): one["logprob"] for name, one in place.items()}
        gaps.append(max(likely.values()) - likely[token])
    return max(gaps)


def resumed(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(one.split()[1]) for one in lines if one.startswith("prfaas_gateway_resumes_total "))


def test_streams_of_a_killed_server_continue_at_the_other(clients: Clients, servers: Servers):
    calls = requests()
    with ThreadPoolExecutor(len(clients) + len(calls)) as pool:
        seeing = [pool.submit(one.ask, servers.url, OF_A_CLIENT) for one in clients]
        got = [one.result() for one in [pool.submit(stream, servers.url, *each) for each in calls]]
        seen = {one.name: found.result() for one, found in zip(clients, seeing, strict=True)}
    if not servers.dead.exists():
        raise NotInTime("the server never had two streams at once")

    ends = {
        name: (one.usage and one.usage[1], [each["finish_reason"] for each in one.choices])
        for name, one in seen.items()
    }
    assert ends == dict.fromkeys(ends, (TOKENS, ["length"])), seen
    broken = [one for one in got if one.instance == "one"]
    of_clients = resumed(servers.admin_url) - len(broken)
    assert len(broken) >= 2, "both servers had streams"
    assert 0 <= of_clients <= len(clients)
    if not of_clients:
        raise NotInTime("no client had a stream at the server that died")
    for one in got:
        assert len(one.ids) == one.usage["completion_tokens"] == TOKENS
        assert len(one.prompt_ids) == one.usage["prompt_tokens"]
        assert servers.other.post("/detokenize", tokens=one.ids)["prompt"] == one.text
        assert worst_gap(servers.other, one.prompt_ids, one.ids) < NEAR_TIE

    # In any of them but those that go round in circles, where the same again is what the model itself says.
    half = TOKENS // 2
    for wrong in (lambda ids: ids[:half] + ids[half + 1 :], lambda ids: ids[:BEGUN] * 2):
        shown = [worst_gap(servers.other, one.prompt_ids, wrong(one.ids)) for one in broken]
        assert max(shown) > NEAR_TIE, "a lost or a repeated token shows"
