"""The figures of movers: those of all ranks at one port, and those that the scheduler needs."""

import re
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from prfaas.ports import free_ports
from prfaas.wire.engine import Stats
from prfaas_scheduler.engines import LINK
from prfaas_transfer.mover.metrics import MAX_SCRAPES, REQUEST_SECONDS, MoverMetrics, cache_bytes, serve

from ...waiting import PATIENCE_SECONDS, eventually
from .engines import make_options, read_samples
from .layout import GROUPS, PAGE_TOKENS

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("_patience")]


def test_the_first_rank_serves_the_figures_of_all_ranks(start_engine):
    port, _ = free_ports(2)
    source, _ = (start_engine(rank=rank, ranks=2, mover=rank, movers=2, metrics_port=port) for rank in (0, 1))
    stranger, destination = start_engine(), start_engine(ranks=2)
    stranger.fetch(source, source.offer())
    assert "manifest field rank" in stranger.take_ended_fetch().reason
    destination.fetch(source, source.offer())
    assert destination.take_ended_fetch().reason == ""
    for _ in range(2):  # that of the stranger ends, too
        source.take_ended_offer()
    samples = {(one.name, one.labels["rank"], one.labels.get("outcome", "")): one.value for one in read_samples(port)}
    assert samples["prfaas_transfers_total", "0", "delivered"] == 1
    assert samples["prfaas_transfer_sent_bytes_total", "0", ""] > 12_000
    assert samples["prfaas_transfer_sent_bytes_total", "1", ""] == 0
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_SECONDS) as answer:
        assert answer.read().count(b"# TYPE prfaas_transfers_total counter") == 1


@pytest.mark.parametrize("is_file", [False, True])
def test_the_movers_of_an_instance_have_its_egress_cap_together(start_engine, tmp_path: Path, is_file: bool):
    (tmp_path / "mbps").write_text("41")
    cap = {"egress_file": str(tmp_path / "mbps")} if is_file else {"egress_mbps": 41}
    port, _ = free_ports(2)
    for rank in (0, 1):
        start_engine(rank=rank, ranks=2, mover=rank, movers=2, metrics_port=port, **cap)
    assert [one.value for one in read_samples(port) if one.name == "prfaas_egress_cap_mbps"] == [20, 20]


def test_silent_peers_cost_a_mover_few_threads_and_its_figures_only_for_a_moment(start_engine):
    (port,) = free_ports(1)
    tasks = Path(f"/proc/{start_engine(metrics_port=port).mover_pid}/task")
    at_rest = len(list(tasks.iterdir()))
    silent = [socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) for _ in range(100)]
    for one in silent:
        one.sendall(b"GET /metrics HTTP/1.1\r\n")
    eventually(lambda: len(list(tasks.iterdir())) > at_rest, "the mover serves")
    assert len(list(tasks.iterdir())) <= at_rest + MAX_SCRAPES
    eventually(lambda: len(list(tasks.iterdir())) <= at_rest, f"their threads end after {REQUEST_SECONDS} s")
    assert read_samples(port)
    for one in silent:
        one.close()


def test_a_mover_shows_what_the_scheduler_reads_of_a_link_and_the_size_of_a_cache(start_engine):
    port, _ = free_ports(2)
    start_engine(rank=0, ranks=2, copies=(1, 2), metrics_port=port)
    samples = read_samples(port)
    wanted = {name for query in LINK.values() for name in re.findall(r"prfaas_\w+", query)}
    assert len(wanted) == 4
    assert wanted <= {sample.name for sample in samples}
    sizes = {one.labels["tokens"]: one.value for one in samples if one.name == "prfaas_profile_cache_bytes"}
    state_bytes, token_bytes = 2 * GROUPS[0].nbytes, GROUPS[1].nbytes // PAGE_TOKENS
    assert sizes["1024"] == 2 * state_bytes + 1024 * token_bytes, "a state of each rank, rows that both hold once"
    assert sizes["65536"] - sizes["1024"] == (65_536 - 1024) * token_bytes
    apart = cache_bytes(make_options(ranks=2), 1024)
    assert apart == 2 * (state_bytes + 1024 * token_bytes), "each rank has other rows"


def test_a_missing_rank_costs_only_its_own_figures_and_other_paths_are_none(caplog):
    port, missing = free_ports(2)
    serve("127.0.0.1", port, MoverMetrics(make_options(), lambda: Stats(sent_bytes=5)), (missing,))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics?x=1", timeout=PATIENCE_SECONDS) as answer:
        assert 'prfaas_transfer_sent_bytes_total{rank="0"} 5.0' in answer.read().decode()
    assert f"the figures of the rank at port {missing} are missing" in caplog.text
    with pytest.raises(urllib.error.HTTPError, match="404") as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=PATIENCE_SECONDS)
    refused.value.close()
