"""The checks that vLLM makes of its connectors, made of our worker: two of them behind our gateway."""

from pathlib import Path

from .consistency import check_consistency
from .gateways import gateway, offloaded, table_of
from .workers import StartWorker


def test_the_checks_of_vllms_own_project_pass_with_our_workers(start_worker: StartWorker, tmp_path: Path):
    source, destination = (worker.wait_ready().url for worker in [start_worker(), start_worker()])
    with gateway(tmp_path, table_of("prfaas", source, destination)) as url:
        check_consistency(source, destination, url)
        offloaded(url, {"prompt": "another prompt", "max_tokens": 1})
