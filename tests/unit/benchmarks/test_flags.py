"""Proves that every benchmark can be imported and tells its flags, in an installation for tests."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NAMES = sorted(
    {path.stem for path in (ROOT / "benchmarks").glob("*.py")}.union(
        path.parent.name for path in (ROOT / "benchmarks").glob("*/__main__.py")
    )
    - {"report"}
)


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_tells_its_flags(name, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, f"benchmarks.{name}", raising=False)  # another test may have used it
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    assert ended.value.code == 0
    assert f"Usage: prfaas bench {name}" in capsys.readouterr().out
