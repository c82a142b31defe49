"""For all tests: the stage of each, and what its failure means; properties are judged by what they find, never by a
machine's speed, and in CI by the same examples each time, elsewhere by new ones in every run. The level that a test
logs at is no other test's business.
"""

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Coroutine, Generator, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from prfaas.errors import UnreachableError
from prfaas.ports import PART_VARIABLE
from prfaas.telemetry.logs import OURS

from . import stages
from .waiting import NotInTime

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

LOGGERS = ("", *OURS)

# Each process of pytest-xdist, with all that it starts, chooses ports that no other one chooses.
if WORKER_NAME := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ[PART_VARIABLE] = f"{WORKER_NAME.removeprefix('gw')}/{os.environ['PYTEST_XDIST_WORKER_COUNT']}"

# Go programs that tests start (API servers, etcd, kubectl) collect garbage more rarely: a sixth less of their time.
os.environ.setdefault("GOGC", "400")

# Files that share what takes long to start, and so run in one process of pytest-xdist.
WORKER = "tests/unit/worker/test_"
TOGETHER = {
    "a sandbox": ("tests/sandbox/",),
    "transformers": ("tests/unit/qwen3_next/",),
    "workers that are attacked": ("tests/attacks/workers/",),
    "a pair of workers": tuple(WORKER + name for name in ("api", "prefix", "resuming")),
}

WAITING = ("tests/sandbox/", "tests/clusters/", "tests/unit/scheduler/")
"""These leave the CPU idle two thirds of the time."""
LONGEST = (
    *WAITING,
    "tests/contract/",
    "tests/verify/",
    "tests/attacks/workers/",
    "tests/unit/worker/",
    "tests/unit/qwen3_next/",
    "tests/faults/",
    "tests/unit/transfer/",
)


class Scheduler(LoadFileScheduling):
    """Gives a process whole files; those that share something go to the same one."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return next((shared for shared, begins in TOGETHER.items() if file.startswith(begins)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduler:
    return Scheduler(config, log)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes are named by their argument. gzip writes the second into what it packs, and processes of pytest-xdist that
    collect in two seconds would not agree on the tests' names.
    """
    return argname if isinstance(val, bytes) else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stage", choices=stages.STAGES, help="run only the tests of one stage (tests/stages.py)")


def pytest_configure(config: pytest.Config) -> None:
    stages.watch()
    if "PYTEST_XDIST_WORKER" in os.environ and os.getpgid(0) != os.getpid():
        # The kernel shares the CPU among sessions (autogroups). The programs that tests start have a session each; in
        # one session together, the processes that wait for them would get the least.
        os.setsid()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the stage, and order its files."""
    if stage := config.getoption("stage"):
        others = [item for item in items if stages.stage_of(item) != stage]
        items[:] = [item for item in items if stages.stage_of(item) == stage]
        config.hook.pytest_deselected(items=others)
    order = in_turns(dict.fromkeys(file_of(item) for item in items))
    items.sort(key=lambda item: order[file_of(item)])


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def in_turns(files: Iterable[str]) -> dict[str, int]:
    """Return the place of each file: of those that wait for servers and of those that compute one after the other, so
    that both run at any time, the longest first, so that no process works on one when the others are idle.
    """

    def place(file: str) -> int:
        return next((index for index, folder in enumerate(LONGEST) if file.startswith(folder)), len(LONGEST))

    ordered = sorted(files, key=place)
    waiting = [file for file in ordered if file.startswith(WAITING)]
    computing = [file for file in ordered if not file.startswith(WAITING)]
    return {file: index for group in (waiting, computing) for index, file in enumerate(group)}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with stages.known(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note in the report, for tools/ci, which test failed, when, whether it waited in vain, and why."""
    report = yield
    if report.failed and call.excinfo is not None:
        error = call.excinfo.value
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        failure = {"test": item.nodeid, "when": call.when, "late": is_late(error, call.when), "reason": reason}
        item.user_properties.append(("failure", json.dumps(failure)))
        report.user_properties = list(item.user_properties)
    return report


def is_late(error: BaseException, when: str) -> bool:
    """Return whether all that went wrong is that something did not come in time."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_late(each, when) for each in error.exceptions)
    if follows_wrong_value(error):
        return False
    # Python's own, of asyncio.wait_for; the product's time-outs are answers, which tests compare.
    waited = isinstance(error, NotInTime) or type(error) is TimeoutError
    return waited or (when == "setup" and is_late_start(error))


def is_late_start(error: BaseException) -> bool:
    """Return whether what a test needs did not start in time. One that refuses to talk broke."""
    cause = error.__cause__ if isinstance(error, UnreachableError) else error
    return isinstance(cause, (TimeoutError, subprocess.TimeoutExpired))


def follows_wrong_value(error: BaseException) -> bool:
    """Return whether an error came up while a test cleaned up after a wrong value."""
    while not error.__suppress_context__ and (former := error.__context__) is not None:
        if isinstance(former, AssertionError) and not isinstance(former, NotInTime):
            return True
        error = former
    return False


_sleep, _sleep_async = time.sleep, asyncio.sleep


def _checked_sleep(seconds: float, /) -> None:
    if seconds and stages.is_test_code(sys._getframe(1)):
        stages.refuse_in_gate(f"sleeps {seconds} s")
    _sleep(seconds)


def _checked_sleep_async(delay: float, result: Any = None) -> Coroutine[Any, Any, Any]:
    if delay and stages.is_test_code(sys._getframe(1)):
        stages.refuse_in_gate(f"sleeps {delay} s")
    return _sleep_async(delay, result)


time.sleep, asyncio.sleep = _checked_sleep, _checked_sleep_async


@pytest.fixture(autouse=True)
def _levels() -> Iterator[None]:
    """Give loggers their levels back, which a command that is run in this process sets for good."""
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
