"""`prfaas evaluate`: which runs a call makes, what its flags refuse, and what its exit code says."""

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from prfaas.errors import ConfigError
from prfaas.evaluate.expected import simulated_run
from prfaas.evaluate.next_runs import WantedRuns
from prfaas.evaluate.record import MachineTiming, RunKey
from prfaas.evaluate.steady import find_steady
from prfaas.simulate.scenario import PolicyName
from prfaas_sandbox.evaluate import command
from prfaas_sandbox.evaluate.campaign import Campaign, folder_of, read_case

from .evaluated import ROOT

FILE = ROOT / "examples/evaluation.yaml"
SLOW = MachineTiming(mean_late=0.2, p99_late=0.5, busy_share=0.9)
NAIVE, STATIC = RunKey("naive", 0.7, 1), RunKey("static", 0.7, 1)


def campaign(folder: Path, *policies: PolicyName) -> Campaign:
    case = read_case(FILE, requests=300, stretch=2.0, cache_scale=20)
    return Campaign(
        case=case,
        wanted=WantedRuns(asked=tuple(RunKey(policy, 0.7, 1) for policy in policies)),
        limit_seconds=None,
        folder=folder_of(case, folder),
        command="",
    )


def write(made: Campaign, key: RunKey, machine: MachineTiming | None = None) -> None:
    run = simulated_run(made.case, key, Random)
    run = msgspec.structs.replace(run, machine=machine or run.machine)
    made.folder.mkdir(parents=True, exist_ok=True)
    (made.folder / f"{key.name}.json").write_bytes(msgspec.json.encode(run))


def test_a_call_makes_what_its_folder_lacks(tmp_path: Path):
    both = campaign(tmp_path, "naive", "static")
    assert sorted(both.next_runs()) == [NAIVE, STATIC]
    write(both, NAIVE, SLOW)
    write(both, STATIC)
    assert both.next_runs() == [NAIVE]
    assert both.next_runs({NAIVE}) == []


def test_loads_that_one_run_s_name_stands_for_are_one_load(call):
    """Otherwise each call would take the run of one for that of the other, and make it again."""
    asked: list[RunKey] = []
    call("--systems", "static", "--loads", "0.7,0.70001", run=lambda made, *_: asked.extend(made.wanted.asked) or {})
    assert asked == [STATIC]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Call the command without a sandbox: `run` stands for what it makes."""

    def called(*flags: str, file: Path = FILE, run: Any = lambda *_: {}):
        monkeypatch.setattr(Campaign, "run", run)
        monkeypatch.setattr(command, "ensure_tools", lambda _: None)
        words = ["-f", str(file), "--requests", "300", "--runs", str(tmp_path), "--state", str(tmp_path), *flags]
        return CliRunner().invoke(command.app, words)

    return called


def test_what_was_made_is_reported_with_exit_code_0(call, tmp_path: Path):
    def run(self: Campaign, *_: object) -> dict[RunKey, str]:
        write(self, STATIC)
        return {}

    result = call("--systems", "static", "--loads", "0.7", run=run)
    assert result.exit_code == 0, result.output
    assert len(list(tmp_path.glob("*/report.html"))) == len(list(tmp_path.glob("*/evaluation.md"))) == 1


def test_a_failed_run_is_named_and_the_exit_code_says_so(call):
    result = call("--systems", "static", "--loads", "0.7", run=lambda *_: {STATIC: "no pod is ready"})
    assert result.exit_code == 1
    assert f"{STATIC.name} failed: no pod is ready" in result.output


def test_an_invalid_run_is_named_and_the_exit_code_says_so(call):
    def run(self: Campaign, *_: object) -> dict[RunKey, str]:
        write(self, STATIC, SLOW)
        return {}

    result = call("--systems", "static", "--loads", "0.7", run=run)
    assert result.exit_code == 1
    assert STATIC.name in result.output


def test_a_report_of_no_run_is_refused_and_makes_no_folder(call, tmp_path: Path):
    result = call("--report-only", "--stretch", "3")
    assert isinstance(result.exception, ConfigError)
    assert "has no run of this case" in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_a_report_names_what_is_missing_and_the_exit_code_says_so(call, tmp_path: Path):
    def run(self: Campaign, *_: object) -> dict[RunKey, str]:
        write(self, STATIC)
        return {}

    call("--systems", "static", "--loads", "0.7", run=run)
    assert call("--systems", "static", "--loads", "0.7", "--report-only").exit_code == 0
    result = call("--systems", "static", "--loads", "0.5,0.7", "--report-only")
    assert result.exit_code == 1
    assert "static-50-1 is missing" in result.output
    assert not list(tmp_path.glob("*/.*")), "the report is written whole"


def test_an_interruption_says_how_to_go_on(call):
    def run(*_: object):
        raise KeyboardInterrupt

    result = call("--systems", "static", run=run)
    assert result.exit_code == 130
    assert "the same command makes the others" in result.output


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--systems", "static,fastest"), "--systems is 'static,fastest'"),
        (("--systems", ","), "--systems is ','"),
        (("--loads", "0.5,high"), "--loads is '0.5,high'"),
        (("--loads", "0"), "--loads is '0'"),
        (("--loads", "0.00001"), "--loads is '0.00001'"),
        (("--loads", "70"), "--loads is '70'"),
    ],
)
def test_wrong_flags_are_refused(call, flags: tuple[str, ...], says: str):
    assert says in str(call(*flags).exception)


def test_what_cannot_be_run_live_is_refused_before_anything_starts(call, tmp_path: Path):
    started: list[object] = []
    document = yaml.safe_load(FILE.read_text()) | {"simulation": {"prefixShare": 0.3}}
    (file := tmp_path / "shared.yaml").write_text(yaml.safe_dump(document))
    result = call(file=file, run=lambda *_: started.append(0) or {})
    assert isinstance(result.exception, ConfigError)
    assert "prefixShare is simulated only" in str(result.exception)
    assert not started


def test_the_examples_own_command_can_give_a_figure():
    """Its requests leave a steady part behind the warm-up."""
    words = next(line for line in FILE.read_text().splitlines() if "prfaas evaluate" in line).split()
    asked = int(words[words.index("--requests") + 1])
    run = simulated_run(read_case(FILE, asked, 1.0, 32), STATIC, Random)
    assert not find_steady(run).why_not
