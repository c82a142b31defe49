"""Proves that every benchmark can be imported, lists its flags and keeps a log, in an installation for tests."""

import runpy
import sys
from pathlib import Path

import msgspec
import pytest
from benchmarks.report import Figure, Report, append

ROOT = Path(__file__).parents[3]
NAMES = sorted(
    {path.stem for path in (ROOT / "benchmarks").glob("*.py")}.union(
        path.parent.name for path in (ROOT / "benchmarks").glob("*/__main__.py")
    )
    - {"report"}
)


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_lists_its_flags(name, monkeypatch, capsys):
    for used in (f"benchmarks.{name}", f"benchmarks.{name}.__main__"):  # another test may have used it
        monkeypatch.delitem(sys.modules, used, raising=False)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    assert ended.value.code == 0
    assert f"Usage: prfaas bench {name}" in capsys.readouterr().out


def test_figures_are_appended_to_a_log(tmp_path):
    figures = [Figure(name="look-up", value=15.0, unit="us")]
    report = Report(bench="kvindex", time="2026-11-27T12:00:00Z", commit="abc", machine="x86_64", figures=figures)
    append(report, tmp_path / "log")
    append(report, tmp_path / "log")
    lines = (tmp_path / "log/kvindex.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line, type=Report) for line in lines] == [report, report]
