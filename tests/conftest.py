"""For all tests: properties are judged by what they find, never by a machine's speed, and in CI by the same examples
each time; elsewhere every run looks for new ones. What a test logs at is no other test's business.
"""

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from prfaas.ports import PART_VARIABLE
from prfaas.telemetry.logs import OURS

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
    "an installation": ("tests/e2e/",),
    "a sandbox": ("tests/sandbox/",),
    "transformers": ("tests/unit/generic/",),
    "a pair of workers": tuple(WORKER + name for name in ("api", "prefix", "resuming", "two_workers.py")),
}
APART = ("tests/e2e/test_demo.py", "tests/sandbox/test_end.py")


class Scheduler(LoadFileScheduling):
    """Gives a process whole files; those that share something go to the same one."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        if file in APART:
            return file
        return next((shared for shared, begins in TOGETHER.items() if file.startswith(begins)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduler:
    return Scheduler(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest: else one process works on it when the others have nothing left."""
    first = (
        "tests/e2e/",
        "tests/clusters/",
        "tests/sandbox/",
        "tests/unit/worker/",
        "tests/unit/generic/",
        "tests/faults/",
    )

    def place(item: pytest.Item) -> int:
        return next((index for index, folder in enumerate(first) if item.nodeid.startswith(folder)), len(first))

    items.sort(key=place)


@pytest.fixture(autouse=True)
def _levels() -> Iterator[None]:
    """Give loggers their levels back, which a command that is run in this process sets for good."""
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
