"""Proves that a process ends on SIGTERM, also where its work does not, and then names that work."""

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.system

SCRIPT = """
import asyncio, logging, sys
from prfaas_operator import election

election.GRACE_SECONDS = 0.5
logging.basicConfig()

async def main(heeds):
    shutdown = election.Shutdown()
    shutdown.listen()
    print("listening", flush=True)
    await shutdown.term.wait()
    if not heeds:
        await asyncio.create_task(asyncio.Event().wait(), name="stubborn")

asyncio.run(main(sys.argv[1] == "heeds"))
"""


@pytest.mark.parametrize(("heeds", "code"), [("heeds", 0), ("ignores", 70)])
def test_a_process_ends_on_sigterm(heeds: str, code: int):
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, heeds], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    assert process.returncode == code, log
    assert ("these tasks still run: Task-1, stubborn; ending" in log) == (code == 70)
