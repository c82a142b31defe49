"""The stage in which a test runs, and what a test of the stage `gate` may not do.

    gate      pure: no child process, no wait. Two at a time; a failure is final.
    system    processes, API servers, sandboxes, faults: whatever waits for others. Three at a time.
    quiet     promises of promptness, the demo, whole systems, real clients: one after the other.
    vllm      a real vLLM. One after the other.
    kind      the whole system in containers. One after the other.
    release   what changes rarely and takes long, with a real vLLM: before a release. One after the other.

A test says its stage by the marks `system`, `quiet` and `release`, or by its folder. Without either it is one of
`gate`.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

STAGES: Final = ("gate", "system", "quiet", "vllm", "kind", "release")
BESIDE_OTHERS: Final = ("gate", "system")
FOLDERS: Final = {
    "tests/attacks/gateway/": "system",
    "tests/attacks/workers/": "system",
    "tests/attacks/": "gate",
    "tests/chart/": "system",
    "tests/clients/": "quiet",
    "tests/clusters/": "system",
    "tests/contract/": "system",
    "tests/faults/": "system",
    "tests/sandbox/": "system",
    "tests/verify/": "system",
    "tests/e2e/": "quiet",
    "tests/vllm/": "vllm",
}
STARTS: Final = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec")
TESTS: Final = os.path.dirname(__file__) + os.sep  # noqa: PTH120  # it is compared with the names of code objects
_running: list[tuple[str, str]] = []
"""The stage and the name of the test that runs now, if one does."""


class ImpureTestError(Exception):
    """A test of the stage `gate` started a process or waited, or one that runs beside others promised promptness."""


def stage_of(item: pytest.Item) -> str:
    """Return the stage of a test."""
    folder = next((stage for start, stage in FOLDERS.items() if item.nodeid.startswith(start)), "gate")
    if item.nodeid.startswith("tests/e2e/") and item.get_closest_marker("kind"):
        return "kind"
    if folder == "vllm":
        return "release" if item.get_closest_marker("release") else folder
    marked = next((name for name in ("quiet", "system") if item.get_closest_marker(name)), folder)
    return "quiet" if folder == "quiet" else marked


@contextmanager
def known(item: pytest.Item) -> Iterator[None]:
    """Let the two functions below know which test runs meanwhile."""
    _running.append((stage_of(item), item.nodeid))
    try:
        yield
    finally:
        _running.clear()


def refuse_in_gate(what: str) -> None:
    """Raise ImpureTestError if a test of the stage `gate` runs."""
    for stage, test in _running:
        if stage == "gate":
            raise ImpureTestError(f"{test} {what}: mark it `system`, or inject the clock")


def refuse_beside_others(what: str) -> None:
    """Raise ImpureTestError if the test that runs has a stage whose tests run beside each other."""
    for stage, test in _running:
        if stage in BESIDE_OTHERS:
            raise ImpureTestError(f"{test} {what}: mark it `quiet`, or wait with `eventually`")


def watch() -> None:
    """See, from now on, what tests of `gate` start and where they sleep. Once a process."""
    sys.addaudithook(_see_start)


def _see_start(event: str, arguments: Any) -> None:
    if event in STARTS:
        refuse_in_gate(f"starts a process ({event} {arguments[:1]})")


def is_test_code(frame: Any) -> bool:
    return frame.f_code.co_filename.startswith(TESTS)
