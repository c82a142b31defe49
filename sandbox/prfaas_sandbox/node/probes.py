"""Liveness, readiness and startup probes of a container: one attempt, and the counting of attempts."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

import aiohttp

from prfaas_sandbox.api import Object
from prfaas_sandbox.node.process import ContainerProcess
from prfaas_sandbox.processes import wait_process

KINDS = ("httpGet", "tcpSocket", "exec")


@dataclass(frozen=True)
class Target:
    """What probes of one container aim at.

    Args:
        address: the pod's IP address.
        ports: the container's ports by name.
        process: for exec probes.
        env: the container's environment, for exec probes.
        session: for HTTP probes; must not verify certificates, as the kubelet does not.

    """

    address: str
    ports: dict[str, int]
    process: ContainerProcess
    env: dict[str, str]
    session: aiohttp.ClientSession

    def port(self, port: int | str) -> int:
        """Return a port by number or name; 0, which nobody serves, for a name that the container does not have."""
        return port if isinstance(port, int) else self.ports.get(port, 0)


class Outcomes:
    """Counts attempts; the verdict changes when enough of them in a row say so.

    Args:
        probe: its spec.
        initial: the verdict before that, None when there is none.

    """

    def __init__(self, probe: Object, *, initial: bool | None):
        self._needed = {True: probe.get("successThreshold", 1), False: probe.get("failureThreshold", 3)}
        self._verdict = initial
        self._last: bool | None = None
        self._in_a_row = 0

    def add(self, *, succeeded: bool) -> bool | None:
        """Count an attempt and return the verdict that holds now."""
        self._in_a_row = self._in_a_row + 1 if succeeded == self._last else 1
        self._last = succeeded
        if self._in_a_row >= self._needed[succeeded]:
            self._verdict = succeeded
        return self._verdict


async def verdicts(probe: Object, target: Target, *, initial: bool | None) -> AsyncIterator[bool | None]:
    """Attempt for ever and yield the verdict after each attempt."""
    outcomes = Outcomes(probe, initial=initial)
    await asyncio.sleep(probe.get("initialDelaySeconds", 0))
    while True:
        yield outcomes.add(succeeded=await attempt(probe, target))
        await asyncio.sleep(probe.get("periodSeconds", 10))


async def attempt(probe: Object, target: Target) -> bool:
    """Return whether one attempt succeeds within the probe's timeout."""
    try:
        async with asyncio.timeout(probe.get("timeoutSeconds", 1)):
            return await perform(probe, target)
    except (OSError, TimeoutError, aiohttp.ClientError, ValueError):
        return False


async def perform(action: Object, target: Target) -> bool:
    """Do what a probe or a lifecycle hook asks for and return whether it went well."""
    if "httpGet" in action:
        return await _http(action["httpGet"], target)
    if "exec" in action:
        return await run_in(target, action["exec"]["command"]) == 0
    goal = action["tcpSocket"]
    _, writer = await asyncio.open_connection(goal.get("host") or target.address, target.port(goal["port"]))
    writer.close()
    return True


async def _http(get: Object, target: Target) -> bool:
    host = get.get("host") or target.address
    url = f"{get.get('scheme', 'HTTP').lower()}://{host}:{target.port(get['port'])}/{get.get('path', '/').lstrip('/')}"
    headers = {header["name"]: header["value"] for header in get.get("httpHeaders", [])}
    async with target.session.get(url, headers=headers, allow_redirects=False) as response:
        return 200 <= response.status < 400


async def run_in(target: Target, command: list[str]) -> int:
    """Run a command inside the container and return its status; it is killed when the caller stops waiting."""
    process = subprocess.Popen(  # noqa: ASYNC220  # only its end takes time, and that is awaited
        target.process.enter_command(command),
        env=target.env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        return await wait_process(process)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
