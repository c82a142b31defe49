"""One running sandbox with prfaas installed, shared by all whole-system tests: starting it is the expensive part."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from prfaas_sandbox.demo.install import Installation
from prfaas_sandbox.sandbox import Sandbox


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def installation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Installation]:
    """Install prfaas as the README says, into two fresh clusters joined by a link of 100 Mbit/s."""
    async with Sandbox.start(tmp_path_factory.mktemp("sandbox"), link_mbps=100, report=print) as sandbox:
        yield await Installation.create(sandbox, report=print)
