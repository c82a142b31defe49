"""The load of many emulated workers is the paper's: its profiles, lengths and rate, and who serves what."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from benchmarks.emulated import LONGEST, PLAN, Fleet, Seen, as_measured, drawn, judged, late_share, says_too_slow

from prfaas.capacity.optimum import best
from prfaas.capacity.profile import prefill_seconds
from prfaas.cli.plan import load
from prfaas.errors import CapacityError
from prfaas_worker.emulated.instance import EmulatedInstance
from prfaas_worker.emulated.profile import read_profile

FILE = load(PLAN)
WORKERS: Any = ["offload 1", "offload 2"], ["local"], ["decode 1", "decode 2"]


def test_an_emulated_worker_takes_the_plans_times(tmp_path: Path):
    (offload,), (hub,) = FILE.system.offload, FILE.system.hub
    for profile in (offload.profile, hub.profile):
        path = tmp_path / "profile.json"
        path.write_bytes(msgspec.json.encode(as_measured(profile, hub.step_seconds, hub.max_batch)))
        instance = EmulatedInstance(read_profile(str(path)))
        instance.check_reach(LONGEST + 1024, hub.max_batch)
        assert instance.chunk_seconds(0, 30_000, is_first=True) == pytest.approx(prefill_seconds(profile, 30_000))
        assert instance.profile.times.decode_seconds(hub.max_batch, 500_000) == pytest.approx(0.025)


def test_prompts_come_as_the_plan_says_and_go_in_turn_to_who_serves_their_length():
    plan, made = best(FILE.system, FILE.workload), drawn(FILE, Fleet(*WORKERS), 0.5, 2000.0, random.Random(3))
    assert len(made) == pytest.approx(plan.lambda_max * 2000, rel=0.1), "two copies at half the rate"
    long = [one for one in made if one.tokens > plan.threshold_tokens]
    assert len(long) / len(made) == pytest.approx(0.5, abs=0.03)
    assert [str(one.source) for one in long[:3]] == ["offload 1", "offload 2", "offload 1"]
    assert {str(one.source) for one in made if one not in long} == {"local"}
    assert [str(one.destination) for one in made[:3]] == ["decode 1", "decode 2", "decode 1"]


def test_the_bound_of_99_percent_is_of_all_workers_together():
    def text(*counts: int) -> str:
        bounds = zip(("0.01", "0.05", "+Inf"), counts, strict=True)
        return "".join(
            f'prfaas_emulation_late_ratio_bucket{{step="{step}",le="{bound}"}} {count}\n'
            for bound, count in bounds
            for step in ("prefill", "other")
        )

    assert late_share([text(90, 100, 100), text(100, 100, 100)], "prefill") == 0.05
    assert late_share([text(99, 100, 100), text(100, 100, 100)], "prefill") == 0.01
    assert late_share([text(90, 97, 100)], "prefill") == float("inf")


def test_an_emulated_run_counts_by_what_the_worker_says_of_its_machine():
    assert says_too_slow("prfaas_emulation_too_slow 1.0\n")
    assert not says_too_slow("prfaas_emulation_too_slow 0.0\n")
    assert not says_too_slow("prfaas_decode_steps_total 1.0\n"), "an engine that computes"


def test_one_worker_whose_machine_was_too_slow_takes_all_figures_with_it():
    kept, slow = (f"prfaas_emulation_too_slow {value}\n" for value in (0, 1))

    def first(*metrics: str) -> str:
        return next(judged(Seen(0, 0, 0.1, [1.0, 1.0], 0, list(metrics)), 5.0)).name

    assert first(kept, kept) == "2 emulated workers: until all are ready"
    with pytest.raises(CapacityError, match="too slow for 1 of 2 workers"):
        first(kept, slow)
