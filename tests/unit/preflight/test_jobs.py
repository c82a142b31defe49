"""Proves that the probe runs anywhere as it is, and that a pod which does not start says why."""

import ast
import sys

import pytest

from prfaas_operator.preflight import jobs
from prfaas_operator.preflight.jobs import Order, probe_pod

ORDER = Order("token", "python:3.13-slim", "10.0.0.1:6443", None, 60.0)
SOURCE = probe_pod(ORDER, "serve")["containers"][0]["command"][-1]


def test_the_probe_imports_the_standard_library_only():
    imported = [node for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {getattr(one, "module", "") or one.names[0].name for one in imported}
    assert len(names) > 5
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def test_kubernetes_finds_nothing_to_replace_in_the_probe():
    assert "$(" not in SOURCE
    assert "$$" not in SOURCE


def pod(phase: str = "Pending", **status) -> dict:
    return {"status": {"phase": phase, **status}}


def waiting(reason: str) -> dict:
    return pod(containerStatuses=[{"state": {"waiting": {"reason": reason, "message": "no such tag"}}}])


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (waiting("ImagePullBackOff"), "ImagePullBackOff: no such tag"),
        (pod("Failed"), "it ended at once"),
        (waiting("ContainerCreating"), ""),
        (pod(), ""),
        ({}, ""),
    ],
)
def test_only_what_no_waiting_cures_ends_the_waiting(found, why):
    assert jobs._stuck(found) == why


def test_a_pod_that_no_node_takes_says_so_in_the_schedulers_words():
    refused = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available: 3 Insufficient cpu."}
    assert jobs._waits([pod(conditions=[refused])]) == refused["message"]
    assert jobs._waits([pod()]) == "it is Pending"
    assert "no pod was made" in jobs._waits([])


def test_the_servers_job_outlives_both_pods_starts_and_the_measuring():
    slow = ORDER._replace(wait_seconds=120.0)
    assert jobs._job("member", slow, "serve")["spec"]["activeDeadlineSeconds"] >= 2 * 120 + jobs.CLIENT_SECONDS
