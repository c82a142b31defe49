"""The checks that vLLM makes of its connectors, made of ours and of our worker: two of either behind our gateway."""

from pathlib import Path

import pytest

from . import consistency
from .consistency import MAX_LOGPROB_DELTA, NUM_TOKENS, PROMPTS, check_consistency
from .gateways import connected_servers, gateway, offloaded, table_of
from .servers import StartServer, transferred_tokens
from .workers import StartWorker


def test_the_checks_of_vllms_own_project_pass_with_our_connector(start_server: StartServer, tmp_path: Path):
    with connected_servers(start_server, tmp_path) as (source, destination, url, _):
        check_consistency(source.url, destination.url, url)
        assert transferred_tokens(destination) > 0.9 * sum(map(len, PROMPTS.values()))
        assert "its cache did not come" not in destination.log.read_text()
        offloaded(url, {"prompt": "another prompt", "max_tokens": 1})


def test_the_checks_of_vllms_own_project_pass_with_our_workers(start_worker: StartWorker, tmp_path: Path):
    source, destination = (worker.wait_ready() for worker in [start_worker(), start_worker()])
    with gateway(tmp_path, table_of("prfaas", source.url, destination.url, source.data_port)) as (url, _):
        check_consistency(source.url, destination.url, url)
        offloaded(url, {"prompt": "another prompt", "max_tokens": 1})


@pytest.mark.parametrize("one", ["source", "destination", "joined"])
def test_one_answer_of_another_state_fails_the_checks(monkeypatch: pytest.MonkeyPatch, one: str):
    """The control."""
    moved = [-1.0, -1.0 - MAX_LOGPROB_DELTA, *[-1.0] * (NUM_TOKENS - 2)]
    monkeypatch.setattr(consistency, "logprobs_of", lambda url, _: moved if url == one else [-1.0] * NUM_TOKENS)
    with pytest.raises(AssertionError, match="short"):
        check_consistency("source", "destination", "joined")
