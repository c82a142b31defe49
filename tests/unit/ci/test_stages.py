"""A test of `gate` is pure, and a failure is late only if something did not come in time."""

import asyncio
import gzip
import re
import subprocess
import time
from pathlib import Path

import pytest
from tests.conftest import in_turns, is_late
from tests.stages import FOLDERS, TESTS, ImpureTestError
from tests.waiting import NotInTime, assert_freed, assert_prompt, eventually, eventually_async, within

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
def test_a_test_that_runs_beside_others_promises_nothing():
    with pytest.raises(ImpureTestError, match="promises promptness: mark it `quiet`"):
        within(1, lambda: True, "nothing")
    with pytest.raises(ImpureTestError, match="promises promptness"):
        assert_prompt(0, 1, "nothing")


@pytest.mark.quiet
def test_a_quiet_test_may_promise():
    assert within(1, lambda: 3, "nothing") == 3
    with pytest.raises(NotInTime, match=r"it took 2\.00 s"):
        assert_prompt(2, 1, "nothing")


def test_files_that_wait_alternate_with_files_that_compute_and_the_longest_begin():
    waiting = ["tests/clusters/test_a.py", "tests/sandbox/test_b.py"]
    computing = ["tests/unit/worker/test_c.py", "tests/unit/worker/test_d.py", "tests/unit/api/test_e.py"]
    order = in_turns([*reversed(computing), *reversed(waiting)])
    assert sorted(computing, key=order.__getitem__)[-1] == "tests/unit/api/test_e.py"
    assert [order[file] for file in waiting] == [1, 0]
    assert sorted(order.values()) == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("packed", [gzip.compress(b"{}", mtime=1), gzip.compress(b"{}", mtime=2)])
def test_processes_that_collect_in_two_seconds_name_a_test_alike(packed: bytes, request: pytest.FixtureRequest):
    assert request.node.name.removeprefix(request.node.originalname) in ("[packed0]", "[packed1]")


@pytest.mark.system
async def test_what_never_comes_is_named_and_late():
    with pytest.raises(NotInTime, match=r"not within 0.01 s: a thing"):
        eventually(lambda: False, "a thing", 0.01)
    with pytest.raises(NotInTime, match="what was found"):
        await eventually_async(lambda: False, lambda: "what was found", 0.01)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def after(error: BaseException, former: BaseException) -> BaseException:
    error.__context__ = former
    return error


@pytest.mark.parametrize(
    ("error", "when", "late"),
    [
        (NotInTime("x"), "call", True),
        (TimeoutError("x"), "call", True),
        (ExceptionGroup("x", [NotInTime("x"), TimeoutError("y")]), "call", True),
        (caused(UnreachableError("x"), TimeoutError("y")), "setup", True),
        (caused(UnreachableError("x"), ConnectionRefusedError("y")), "setup", False),
        (UnreachableError("x"), "setup", False),
        (subprocess.TimeoutExpired("x", 1), "setup", True),
        (UnreachableError("x"), "call", False),
        (AssertionError("x"), "call", False),
        (ExceptionGroup("x", [NotInTime("x"), ValueError("y")]), "call", False),
        (ImpureTestError("x"), "call", False),
        (after(NotInTime("x"), AssertionError("assert 1 == 2")), "call", False),
        (after(TimeoutError("x"), after(asyncio.CancelledError(), AssertionError("y"))), "call", False),
        (after(NotInTime("x"), NotInTime("y")), "call", True),
        (after(TimeoutError("x"), asyncio.CancelledError()), "call", True),
        (OSError("x"), "setup", False),
    ],
)
def test_only_waits_in_vain_are_late(error: BaseException, when: str, late: bool):
    assert is_late(error, when) is late


SCRIPTS = {"device_caches.py", "kda_caches.py", "rank_caches.py", "runner_calls.py"}
"""They run in vLLM's environment, which has no pytest."""


def test_no_other_file_counts_seconds_until_something_comes():
    files = (file for file in Path(TESTS).rglob("*.py") if file.name not in {"waiting.py", *SCRIPTS})
    loops = [file.name for file in files if re.search(r"monotonic\(\)\s*\+", file.read_text())]
    assert loops == []


def test_every_test_file_is_found_and_belongs_to_a_stage():
    files = [f"tests/{file.relative_to(TESTS)}" for file in Path(TESTS).rglob("*test*.py")]
    assert [file for file in files if file.endswith("_test.py")] == []
    tests = [file for file in files if "/test_" in file]
    assert [file for file in tests if not file.startswith(("tests/unit/", *FOLDERS))] == []


@pytest.mark.system
def test_what_is_still_held_is_a_leak_and_not_late(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.waiting.eventually", lambda check, what, _seconds: eventually(check, what, 0.01))
    assert_freed(lambda: True, "a page")
    with pytest.raises(AssertionError, match="a page") as leak:
        assert_freed(lambda: False, "a page")
    assert not is_late(leak.value, "call")
