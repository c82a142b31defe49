"""Proves which runs a call makes, and what a folder of runs says."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tests.unit.evaluate.cases import CASE, LIMIT_SECONDS, PAPER, live

from prfaas.cli.evaluation.sections import chapter_of
from prfaas.errors import ConfigError
from prfaas.evaluate.next_runs import WantedRuns
from prfaas.evaluate.record import Run, RunKey
from prfaas_sandbox.evaluate import campaign as module
from prfaas_sandbox.evaluate.campaign import Campaign, in_order_of_chance, read_case, write_report
from prfaas_sandbox.evaluate.made_with import hardware, software


def keep(folder: Path, *runs: Run) -> None:
    for run in runs:
        (folder / f"{run.key.name}.json").write_bytes(msgspec.json.encode(run))


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    return Campaign(
        case=CASE,
        wanted=WantedRuns(asked=(RunKey("threshold", 0.5, 1),), rising=("threshold",)),
        limit_seconds=60.0,
        folder=tmp_path,
        command="prfaas evaluate",
    )


def test_a_folder_of_runs_is_an_evaluation(campaign: Campaign):
    key = RunKey("threshold", 0.5, 1)
    keep(campaign.folder, live(key))
    (campaign.folder / "torn.json").write_bytes(b"{")
    made = campaign.evaluation()

    assert [run.key for run in made.runs] == [key]
    assert [one.name for one in made.unread] == ["torn.json"]
    assert made.summary.rows[0].measured.ttft_mean_seconds == made.summary.rows[0].simulated.ttft_mean_seconds
    assert "PrfaaS-PD" in write_report(chapter_of(made), campaign.folder).read_text()


def test_loads_rise_once_all_that_was_asked_for_is_there_and_nothing_is_simulated(campaign: Campaign, monkeypatch):
    monkeypatch.setattr(module, "simulated_run", lambda *_, **__: pytest.fail("it was simulated"))
    assert campaign.next_runs() == [RunKey("threshold", 0.5, 1)]

    keep(campaign.folder, live(RunKey("threshold", 0.5, 1)))
    assert campaign.next_runs() == [RunKey("threshold", 0.6, 1)]
    assert campaign.next_runs({RunKey("threshold", 0.6, 1)}) == []
    assert replace(campaign, wanted=WantedRuns(asked=campaign.wanted.asked)).next_runs() == []
    assert replace(campaign, limit_seconds=LIMIT_SECONDS / 100).next_runs() == []


def test_runs_are_in_the_same_order_of_chance_each_time():
    asked = [RunKey("threshold", load / 10, seed) for load in range(1, 10) for seed in (1, 2)]
    ordered = in_order_of_chance(CASE, asked)

    assert sorted(ordered) == sorted(asked)
    assert list(ordered) != sorted(asked)
    assert in_order_of_chance(CASE, reversed(asked)) == ordered


def test_a_case_without_a_limit_needs_one(campaign: Campaign):
    with pytest.raises(ConfigError, match=r"slo\.ttftMillis"):
        replace(campaign, limit_seconds=None).evaluation()


def test_runs_stay_of_a_case_whose_comments_change_and_not_of_one_whose_trace_does(tmp_path: Path):
    text = "\n".join(line for line in PAPER.read_text().splitlines() if not line.startswith("  lognormal"))
    text = text.replace("workload:\n  outputTokens: 1024", "workload:\n  trace: trace.csv")
    file, trace = tmp_path / "paper.yaml", tmp_path / "trace.csv"

    def digest(comment: str, tokens: int) -> str:
        at = "2023-11-16 18:17:03"
        file.write_text(f"{text}\n# {comment}\n")
        trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{at}.1,1000,100\n{at}.2,{tokens},100\n")
        return read_case(file, 100, 1.0, 1).digest

    assert digest("as it was", 50_000) == digest("as it is", 50_000)
    assert digest("as it was", 50_000) != digest("as it was", 50_001)


@pytest.mark.system
def test_a_run_says_with_what_it_was_made():
    assert software().startswith("prfaas ")
    assert " cores, " in hardware()
