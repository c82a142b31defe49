"""Proves the `prfaas` command's frame: what is listed, how mistakes end, and what a missing extra says."""

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from prfaas.cli import main

ROOT = Path(__file__).resolve().parents[3]


def prfaas(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prfaas.cli.main", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=180, check=False)


def test_every_installed_part_is_listed():
    listed = prfaas("--help").stdout
    assert {"bench", "certs", "cluster", "crds", "demo", "sandbox", "version"} <= set(listed.split())


@pytest.mark.parametrize(
    "command", [["bench"], ["certs", "issue"], ["cluster", "join"], ["crds", "write"], ["demo"], ["sandbox", "up"]]
)
def test_every_command_explains_itself_with_an_example(command):
    explained = prfaas(*command, "--help")
    assert (explained.returncode, "Example: prfaas" in " ".join(explained.stdout.split())) == (0, True)


@pytest.mark.parametrize("arguments", [["--nope"], ["demo", "--nope"], ["nowhere"], ["sandbox", "link", "wide"]])
def test_a_wrong_word_ends_with_2_and_one_explanation(arguments):
    ended = prfaas(*arguments)
    assert (ended.returncode, "Traceback" in ended.stderr) == (2, False)
    assert "Error" in ended.stderr


def test_benchmarks_are_listed_and_an_unknown_one_names_them(tmp_path):
    names = prfaas("bench").stdout.split()
    assert {"gateway", "scheduler", "worker", "worker_memory"} <= set(names)
    assert "report" not in names
    unknown = prfaas("bench", "nothing")
    assert (unknown.returncode, ", ".join(names) in unknown.stderr) == (1, True)
    outside = prfaas("bench", cwd=tmp_path)
    assert (outside.returncode, "run from a checkout" in outside.stderr) == (1, True)


def test_further_arguments_reach_the_benchmark():
    refused = prfaas("bench", "worker", "--nope", "somewhere")
    assert (refused.returncode, "unrecognized arguments: --nope somewhere" in refused.stderr) == (2, True)


def test_a_part_whose_extra_is_missing_says_how_to_install_it(monkeypatch):
    point = EntryPoint(name="fleet", value="prfaas_operator.no_such_module:app", group=main.ENTRY_POINT_GROUP)
    monkeypatch.setattr(main, "entry_points", lambda **_: [point])
    monkeypatch.setattr(main, "app", typer.Typer())
    ended = CliRunner().invoke(main.build(), ["fleet", "join", "--help"])
    assert ended.exit_code == 2
    assert "pip install 'prfaas[operator]'" in ended.output


@pytest.mark.parametrize("command", ["demo", "kind", "sandbox"])
def test_a_command_of_the_sandbox_without_the_sandbox_says_in_one_sentence_where_it_is(monkeypatch, command):
    monkeypatch.setattr(main, "entry_points", lambda **_: [])
    monkeypatch.setattr(main, "app", typer.Typer())
    ended = CliRunner().invoke(main.build(), [command, "--keep"])
    assert ended.exit_code == 2
    assert ended.output.startswith(f"prfaas {command}: not installed: clone the repository and run `make ")
    assert ended.output.count("\n") == 1
