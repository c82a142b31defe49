"""The control planes of the sandbox are real: they authenticate, admit, control, and know nothing of each other."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import eventually

pytestmark = pytest.mark.clusters


def test_server_reports_the_pinned_version(hub):
    assert json.loads(hub.kubectl("version", "-o", "json"))["serverVersion"]["gitVersion"] == "v1.34.4"


def test_controllers_run(hub):
    hub.kubectl("create", "deployment", "echo", "--image=none", "--replicas=2")
    hub.kubectl("wait", "--for=jsonpath={.status.replicas}=2", "deployment/echo", "--timeout=60s")


def test_clusters_share_nothing(hub, member):
    hub.kubectl("create", "namespace", "only-here")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        member.kubectl("get", "namespace", "only-here")
    assert "NotFound" in refused.value.stderr


async def test_fixture_serves_async_tests_too(hub):
    assert hub.kubectl("get", "--raw", "/readyz") == "ok"


HOLD = """
import asyncio, sys
from pathlib import Path
from prfaas_sandbox.tools import ensure_tools
from prfaas_sandbox.controlplane import ControlPlane

async def main():
    async with ControlPlane.start("left", ensure_tools(print), Path(sys.argv[1])):
        print("ready", flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


def running_in(folder: Path) -> list[int]:
    """Return the pids of processes that have the folder in their arguments."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (process / "cmdline").read_text()
        except OSError:
            continue
        if str(folder) in arguments:
            found.append(int(process.name))
    return found


def test_programs_end_with_a_parent_that_is_killed(tmp_path):
    folder = tmp_path / "plane"
    with subprocess.Popen([sys.executable, "-c", HOLD, folder], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert any(line == "ready\n" for line in parent.stdout)
        assert len(running_in(folder)) == 5  # the parent, and four programs
        parent.kill()
    eventually(lambda: not running_in(folder), lambda: f"all programs end: {running_in(folder)}")
