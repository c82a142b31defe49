"""A test of `gate` is pure, and a failure is late only if something did not come in time."""

import asyncio
import re
import subprocess
import time
from pathlib import Path

import pytest
from tests.conftest import is_late
from tests.stages import TESTS, ImpureTestError
from tests.waiting import NotInTime, eventually, eventually_async

from prfaas.errors import UnreachableError


def test_a_test_of_the_gate_starts_no_process():
    with pytest.raises(ImpureTestError, match="starts a process"):
        subprocess.run(["true"], check=False)


def test_a_test_of_the_gate_does_not_sleep():
    with pytest.raises(ImpureTestError, match="sleeps"):
        time.sleep(0.001)


async def test_nor_does_it_wait_in_an_event_loop():
    with pytest.raises(ImpureTestError, match="sleeps"):
        await asyncio.sleep(0.001)
    await asyncio.sleep(0)
    with pytest.raises(ImpureTestError, match="waits"):
        eventually(lambda: True, "nothing")
    with pytest.raises(ImpureTestError, match="waits"):
        await eventually_async(lambda: True, "nothing")


@pytest.mark.system
def test_a_test_that_is_marked_may_do_both():
    assert subprocess.run(["true"], check=True).returncode == 0
    time.sleep(0.001)
    assert eventually(lambda: 3, "nothing") == 3


@pytest.mark.system
async def test_what_never_comes_is_named_and_late():
    with pytest.raises(NotInTime, match=r"not within 0.01 s: a thing"):
        eventually(lambda: False, "a thing", 0.01)
    with pytest.raises(NotInTime, match="what was found"):
        await eventually_async(lambda: False, lambda: "what was found", 0.01)


@pytest.mark.parametrize(
    ("error", "when", "late"),
    [
        (NotInTime("x"), "call", True),
        (TimeoutError("x"), "call", True),
        (ExceptionGroup("x", [NotInTime("x"), TimeoutError("y")]), "call", True),
        (UnreachableError("x"), "setup", True),
        (subprocess.TimeoutExpired("x", 1), "setup", True),
        (UnreachableError("x"), "call", False),
        (AssertionError("x"), "call", False),
        (ExceptionGroup("x", [NotInTime("x"), ValueError("y")]), "call", False),
        (ImpureTestError("x"), "call", False),
        (OSError("x"), "setup", False),
    ],
)
def test_only_waits_in_vain_are_late(error: Exception, when: str, late: bool):
    assert is_late(error, when) is late


SCRIPTS = {"device_caches.py", "kda_caches.py", "rank_caches.py"}
"""They run in vLLM's environment, which has no pytest."""


def test_no_other_file_counts_seconds_until_something_comes():
    files = (file for file in Path(TESTS).rglob("*.py") if file.name not in {"waiting.py", *SCRIPTS})
    loops = [file.name for file in files if re.search(r"monotonic\(\)\s*\+", file.read_text())]
    assert loops == []
