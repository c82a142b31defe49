"""Planted faults, from the test that fails to the verdict; each in its own pytest."""

import subprocess
import sys
from pathlib import Path

import pytest
from tools.ci.run import ROOT, read_junit
from tools.ci.verdict import StageResult, plan_second_tries

pytestmark = pytest.mark.system

HEAD = """
import os
import pytest
from tests.waiting import NotInTime, eventually
pytestmark = pytest.mark.system
"""
PLANTED = {
    "late": "def test_it(): eventually(lambda: False, 'a pod', 0.01)",
    "late start": "@pytest.fixture\ndef up(): raise TimeoutError('the server')\ndef test_it(up): pass",
    "wrong value": "def test_it(): assert 1 == 2",
    "leak": "@pytest.fixture\ndef pages():\n    yield\n    assert 1 == 0, 'a page is held'\ndef test_it(pages): pass",
    "a process that dies": "def test_it(): os._exit(1)",
    "no import": "import there_is_no_such_thing",
}


def run(folder: Path, text: str, *options: str) -> StageResult:
    (folder / "test_planted.py").write_text(HEAD + text)
    junit = folder / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", ROOT / "pyproject.toml", "-q"]
    command += [f"--rootdir={folder}", "--stage", "system", f"--junitxml={junit}", *options, folder]
    done = subprocess.run(command, cwd=ROOT, timeout=300, check=False, stdout=subprocess.DEVNULL)
    return read_junit("system", junit, done.returncode, 1.0)


@pytest.mark.parametrize("fault", PLANTED)
def test_only_what_came_too_late_is_tried_again(tmp_path: Path, fault: str):
    result = run(tmp_path, PLANTED[fault], *(("-n", "1") if "dies" in fault else ()))
    assert not result.is_green
    plan = plan_second_tries(result, {}, 0)
    assert bool(plan.files) == (fault in ("late", "late start"))


def test_what_passes_is_green_and_counted(tmp_path: Path):
    # The skip is planted: it shows that skipped tests are counted.
    text = "def test_it(): pass\n@pytest.mark.skip(reason='x')\ndef test_not(): pass"
    result = run(tmp_path, text)
    assert (result.is_green, result.passed, result.skipped) == (True, 1, 1)
