"""Proves that the benchmark of the planner shows each estimate beside what was simulated."""

import pytest
from benchmarks import capacity
from benchmarks.reproduction import sections

from prfaas.cli.plan import load


def test_an_estimated_time_stands_beside_the_simulated_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(capacity, "LOADS", (0.5,))
    monkeypatch.setattr(capacity, "TTFT_REQUESTS", 300)
    file = load(capacity.EXAMPLES / "paper.yaml")
    mean, p90, off = capacity.times(file, "PrfaaS-PD", *sections.plans(file)["prfaas_pd"])

    assert mean.rival == p90.rival == "the simulation"
    assert mean.value < p90.value
    assert mean.rival_value < p90.rival_value
    assert off.value == pytest.approx(100 * max(abs(one.value / one.rival_value - 1) for one in (mean, p90)))
