"""One running sandbox for the tests that need it, and what they share to talk to it."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from tests.waiting import PATIENCE_SECONDS, NotInTime, eventually_async

from prfaas.errors import PeerError
from prfaas_sandbox.environment import ClusterAccess
from prfaas_sandbox.sandbox import Sandbox


class Pods:
    """Pods in one namespace of a cluster, in the few words that tests need."""

    def __init__(self, sandbox: Sandbox, cluster: ClusterAccess):
        self._sandbox = sandbox
        self.cluster = cluster

    async def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return await self._sandbox.kubectl(self.cluster, *arguments, stdin=stdin)

    async def apply(self, *objects: dict[str, Any]) -> None:
        body = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        await self.kubectl("apply", "-f", "-", stdin=json.dumps(body))

    async def run(self, name: str, *command: str, spec: dict[str, Any] | None = None, **container: Any) -> None:
        """Create a pod of one container called main that runs `command`; `spec` adds to the pod, keywords to it."""
        main = {"name": "main", "image": "none", "command": list(command), **container}
        body = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 5, "containers": [main], **(spec or {})}
        await self.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": body})

    async def get(self, name: str) -> dict[str, Any]:
        return json.loads(await self.kubectl("get", "pod", name, "-o", "json"))

    async def main(self, name: str) -> dict[str, Any]:
        """Return the status of container main, empty while there is none."""
        statuses = (await self.get(name))["status"].get("containerStatuses", [])
        return next((each for each in statuses if each["name"] == "main"), {})

    async def until(self, name: str, phase: str) -> None:
        """Wait for a phase of the pod."""
        await self._wait(name, f"jsonpath={{.status.phase}}={phase}")

    async def ready(self, name: str) -> None:
        await self._wait(name, "condition=Ready")

    async def _wait(self, name: str, condition: str) -> None:
        try:
            await self.kubectl("wait", f"--for={condition}", f"pod/{name}", f"--timeout={PATIENCE_SECONDS:g}s")
        except PeerError as error:
            if "timed out waiting" in str(error):
                raise NotInTime(f"pod {name} does not reach {condition}: {(await self.get(name))['status']}") from error
            raise

    async def output(self, name: str, *command: str, **more: Any) -> str:
        """Run a pod to its end and return its log; it must succeed."""
        await self.run(name, *command, **more)
        await self.until(name, "Succeeded")
        return await self.kubectl("logs", name)

    async def eventually(self, check: Callable[[], Awaitable[Any]], what: str) -> Any:
        """Return the first true result of `check`, or fail saying what did not come about."""
        return await eventually_async(check, what, poll=0.3)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def sandbox(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sandbox]:
    async with Sandbox.start(tmp_path_factory.mktemp("sandbox") / "state", link_mbps=100, report=print) as running:
        yield running


@pytest.fixture
def hub(sandbox: Sandbox) -> Pods:
    return Pods(sandbox, sandbox.hub)


@pytest.fixture
def member(sandbox: Sandbox) -> Pods:
    return Pods(sandbox, sandbox.member)
