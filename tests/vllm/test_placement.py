"""The gateway before a real vLLM with cache events: its match of a prompt is the prefix that vLLM finds cached.

That holds for chats and texts by the token ids of vLLM's /tokenize, too.
"""

import json
import re
import socket
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pytest

from prfaas.names import HUB, KV_EVENTS_PORT, kv_log_port
from prfaas.ports import free_ports
from prfaas.wire import headers
from prfaas.wire.routes import EngineName, Instance, Threshold

from ..waiting import eventually
from .connected import CONNECTOR
from .gateways import gateway, table_of
from .servers import StartServer, VllmServer

BY_MOVER = {"enable_kv_cache_events": True, "publisher": "null"}
OVER_ZMQ = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": f"tcp://*:{KV_EVENTS_PORT}",
    "replay_endpoint": f"tcp://*:{kv_log_port(ranks=1)}",
}
TEMPLATE = (
    "{% for one in messages %}<{{ one.role }}>{{ one.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SYSTEM = " ".join(f"Rule {number}: the answer to {number} is {number * number}." for number in range(160))
CHAT = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "And now?"}]
NEXT_TURN = [*CHAT, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}]


class Answered(NamedTuple):
    """What a client got."""

    kind: str
    instance: str
    body: str


class Served(NamedTuple):
    """A vLLM, and the gateway before it."""

    server: VllmServer
    url: str
    admin_url: str
    engine: EngineName

    def ask(self, path: str, **body: Any) -> Answered:
        data = json.dumps({"model": "tiny"} | body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            head = answer.headers
            return Answered(head["content-type"], head[headers.DECODE_INSTANCE], answer.read().decode())

    def matched(self) -> float:
        return total(self.admin_url, "prfaas_gateway_kv_matched_tokens_total")

    def batches(self) -> float:
        return total(self.admin_url, "prfaas_gateway_kv_batches_total")

    def hits(self) -> float:
        return total(self.server.url, "vllm:prefix_cache_hits_total")

    def placed(self, path: str, **body: Any) -> tuple[float, float]:
        """Return the gateway's match of a prompt, and vLLM's own hit; what was computed is known then."""
        matched, hits, batches = self.matched(), self.hits(), self.batches()
        assert self.ask(path, max_tokens=1, **body).instance == "destination"
        found = self.matched() - matched, self.hits() - hits
        eventually(lambda: found[1] or self.batches() > batches, "the gateway hears of the prompt's blocks", poll=0.05)
        return found


def total(url: str, metric: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = re.findall(rf"^{metric}(?:\{{[^}}]*\}})? (\S+)$", answer.read().decode(), re.MULTILINE)
    return sum(map(float, lines))


@pytest.fixture(scope="module", params=["vllm-prfaas", "vllm-nixl"])
def served(
    start_server: StartServer, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Served]:
    """A vLLM whose events our connector's mover tells, and one that publishes them itself, which needs no connector."""
    engine: EngineName = request.param
    flags, data_port = ("--chat-template", TEMPLATE, "--mamba-cache-mode", "align", "--enable-prefix-caching"), 0
    if engine == "vllm-prfaas":
        (data_port,) = free_ports(1)
        connector = json.dumps(CONNECTOR | {"kv_port": data_port})
        flags += ("--kv-transfer-config", connector, "--kv-events-config", json.dumps(BY_MOVER))
    else:
        flags += ("--kv-events-config", json.dumps(OVER_ZMQ))
    server = start_server(*flags).wait_ready()
    table = table_of(engine, server.url, server.url)
    # A second instance, so that there is a choice. It is not there: IPv6, where nothing listens.
    url = f"http://[::1]:{free_ports(1)[0]}"
    absent = Instance(name="absent", pool="decode", cluster=HUB, role="decode", url=url, engine=engine)
    (destination,) = (one for one in table.instances if one.role == "decode")
    never = Threshold(mode="Disabled", tokens=1, min_tokens=1, max_tokens=1)
    destination = msgspec.structs.replace(destination, data_port=data_port)
    table = msgspec.structs.replace(table, instances=(destination, absent), threshold=never)
    with gateway(tmp_path_factory.mktemp("gateway"), table) as (url, admin_url):
        yield Served(server, url, admin_url, engine)


def test_with_our_connector_nobody_hears_vllms_events_in_clear(served: Served):
    with socket.socket() as sock:
        is_open = sock.connect_ex(("127.0.0.1", KV_EVENTS_PORT)) == 0
    assert is_open == (served.engine == "vllm-nixl")


def test_the_match_of_a_chat_is_the_prefix_that_vllm_finds(served: Served):
    """vLLM keeps a state of some prompts only when it meets them again: until then attention without it is no match."""
    found = [served.placed("/v1/chat/completions", messages=one) for one in (CHAT, CHAT, CHAT, NEXT_TURN)]
    assert all(matched == hit for matched, hit in found), found
    assert found[0] == (0, 0)
    assert found[-1][1] > 1000


def test_a_text_and_its_token_ids_have_one_match(served: Served):
    text = SYSTEM[::-1]
    found = [served.placed("/v1/completions", prompt=text) for _ in range(3)]
    found.append(served.placed("/v1/completions", prompt=served.server.post("/tokenize", prompt=text)["tokens"]))
    assert all(matched == hit for matched, hit in found), found
    assert found[-1] == found[-2]
    assert found[-1][1] > 1000
