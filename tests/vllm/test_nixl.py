"""NIXL over TCP as the alternative to our own connector: two servers with the hybrid, behind our gateway."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from prfaas.ports import free_ports

from ..verify.command import verified
from .gateways import gateway, offloaded, table_of
from .servers import StartServer, VllmServer, transferred_tokens

pytestmark = pytest.mark.release

CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
VARIABLES = {"UCX_TLS": "tcp,self,sm", "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
LENGTHS = (5, 64, 127, 128, 129, 600, 1500, 6500)
TOKENS = 12


class Pair(NamedTuple):
    """A source, a destination, and the gateway before them."""

    source: VllmServer
    destination: VllmServer
    url: str


@pytest.fixture(scope="module")
def pair(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    servers = [
        start_server(
            *("--kv-transfer-config", json.dumps(CONNECTOR)), VLLM_NIXL_SIDE_CHANNEL_PORT=str(port), **VARIABLES
        )
        for port in free_ports(2)
    ]
    source, destination = (server.wait_ready() for server in servers)
    folder: Path = tmp_path_factory.mktemp("gateway")
    with gateway(folder, table_of("vllm-nixl", source.url, destination.url)) as (url, _):
        yield Pair(source, destination, url)


@pytest.mark.parametrize("length", LENGTHS)
def test_an_offloaded_prompt_is_answered_as_by_one_server(pair: Pair, length: int):
    """As for `reference_of`, the prompt's last token is the first of an answer."""
    ids = [random.Random(length).randrange(256) for _ in range(length - 1)]
    sampling = {"temperature": 0, "ignore_eos": True, "logprobs": 1, "return_token_ids": True}
    expected = pair.source.post("/v1/completions", prompt=ids, max_tokens=TOKENS + 1, **sampling)["choices"][0]
    first, *tokens = expected["token_ids"]
    before = transferred_tokens(pair.destination)

    body = {"prompt": [*ids, first], "max_tokens": TOKENS} | sampling
    answer = offloaded(pair.url, body)["choices"][0]

    assert answer["token_ids"] == tokens
    assert answer["logprobs"]["token_logprobs"] == expected["logprobs"]["token_logprobs"][1:]
    assert transferred_tokens(pair.destination) - before == length - 1


def test_verify_finds_nothing_wrong_with_the_pair(pair: Pair):
    """A random model's answers may prove little, by chance."""
    found = verified(pair.source.url, pair.destination.url, "--most-tokens", "3000")
    assert (found.record["way"], found.outcomes("fails")) == ("NixlConnector", {})
    assert "a cache of another prompt shows" in found.outcomes("holds", "proves little")
