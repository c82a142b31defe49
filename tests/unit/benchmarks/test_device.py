"""Proves that the benchmark of an accelerator runs, in small on CPUs, and that it fails where a value is wrong."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from benchmarks.device import blocks, worker
from benchmarks.device.cases import PARTS, Case, Outcome, Part, run_part
from benchmarks.report import Figure

from prfaas.util import Deadline

ROOT = Path(__file__).parents[3]
STATES = blocks.FORMS[-1]


@pytest.mark.system
def test_every_case_is_measured_in_small_on_cpus(tmp_path):
    rows = tmp_path / "rows.md"
    command = [sys.executable, "-m", "prfaas.cli.main", "bench", "device", "--device", "cpu", "-o", "json"]
    done = subprocess.run(
        [*command, "--rows", rows],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert not report["failures"]
    assert not report["left_out"]
    lines = [line for line in rows.read_text().splitlines() if line.startswith("| ")]
    assert [one["name"] for one in report["figures"]] == [line.split(" | ")[0][2:] for line in lines[1:]]
    assert len(report["figures"]) >= sum(len(part.cases("cpu")) for part in PARTS) > 20


@pytest.mark.system
def test_what_is_not_measured_in_time_is_named():
    outcomes = run_part(Part("benchmarks.device.blocks", 0.1), "cpu", Deadline(60))
    assert [one.case.name for one in outcomes] == [case.name for case in blocks.cases("cpu")]
    assert all(one.failures == [f"{one.case.name}: the time was over"] for one in outcomes)


def test_a_gpu_has_all_that_cpus_check_and_more():
    checks = {
        device: {case.name for part in PARTS for case in part.cases(device) if case.is_check}
        for device in ("cpu", "cuda")
    }
    assert checks["cpu"] < checks["cuda"]


def figures(value: float) -> list[Figure]:
    return [Figure(name="wrong bytes", value=value, unit="bytes", reach=0)]


def test_a_wrong_value_and_a_missing_one_fail_the_run():
    must, check = Case("a", list), Case("a", list, is_check=True)
    assert Outcome(check, figures(0)).failures == []
    assert Outcome(check, figures(1)).failures == ["wrong bytes: 1 bytes, and at most 0 is right"]
    assert Outcome(check, figures(float("nan"))).failures
    assert Outcome(must, figures(1)).failures == []
    assert Outcome(must, [], "no memory").failures == ["a: no memory"]
    assert Outcome(must._replace(is_must=False), [], "no memory").failures == []


@pytest.mark.parametrize("name", ["read_blocks", "write_blocks", "read_slice", "write_slice"])
def test_a_wrong_byte_is_found(monkeypatch, name):
    right = getattr(blocks, name)
    count = partial(blocks.wrong_in_slices if "slice" in name else blocks.wrong_in_blocks, STATES, "cpu")

    def read_wrong(tensors, numbers, room, *cuts):
        right(tensors, numbers, room, *cuts)
        room[-1] ^= 1

    def write_wrong(tensors, numbers, room, *cuts):
        room[-1] ^= 1
        right(tensors, numbers, room, *cuts)

    assert count() == 0
    monkeypatch.setattr(blocks, name, read_wrong if "read" in name else write_wrong)
    assert count() > 0


def test_a_byte_written_beside_a_block_is_found(monkeypatch):
    right = blocks.write_blocks

    def wrong(tensors, numbers, room):
        right(tensors, numbers, room)
        tensors[0][0, 0] ^= 1

    monkeypatch.setattr(blocks, "write_blocks", wrong)
    assert blocks.wrong_in_blocks(STATES, "cpu") > 0


def test_a_model_that_computes_otherwise_is_found(monkeypatch):
    load = worker.MODELS[worker.TINY]

    def changed(device, dtype):
        model = load(device, dtype)
        model.embedding = model.embedding * 1.01
        return model

    (right,) = worker.parity(worker.TINY, "float32", "cpu")
    assert right.value <= worker.EXACT_REACH
    monkeypatch.setitem(worker.MODELS, worker.TINY, changed)  # the CPU's own values are kept
    (wrong,) = worker.parity(worker.TINY, "float32", "cpu")
    assert wrong.value > worker.EXACT_REACH
