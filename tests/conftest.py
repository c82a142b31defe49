"""For all tests: properties are judged by what they find, never by a machine's speed, and in CI by the same examples
each time; elsewhere every run looks for new ones. What a test logs at is no other test's business.
"""

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from prfaas.telemetry.logs import OURS

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

LOGGERS = ("", *OURS, "prfaas_operator")


@pytest.fixture(autouse=True)
def _levels() -> Iterator[None]:
    """Give loggers their levels back, which a command that is run in this process sets for good."""
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
