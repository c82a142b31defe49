"""Runs one container of a pod: start, probe, restart with back-off, end."""

import asyncio
import logging
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import aiohttp

from prfaas.conditions import rfc3339
from prfaas.errors import ConfigError, PeerError
from prfaas.kube.session import Object
from prfaas.util import backoff_seconds
from prfaas_sandbox.node.process import ContainerProcess, ProcessSpec, StartError
from prfaas_sandbox.node.status import (
    ContainerFacts,
    ContainerRunning,
    ContainerState,
    ContainerTerminated,
    ContainerWaiting,
    should_restart,
)
from prfaas_sandbox.processes import wait_process

log = logging.getLogger(__name__)
CONFIG_RETRY_SECONDS = 1.0
# Shorter than the kubelet's 10 s to 5 min: what is tried out here is how prfaas heals, not how long one has to wait.
LONGEST_BACK_OFF_SECONDS = 30.0
HEALTHY_AFTER_SECONDS = 60.0
START_ERROR_CODE = 128


@dataclass(frozen=True)
class ContainerContext:
    """What a container gets from its pod.

    `logs` is a folder for one log per run. `prepare` returns the process to run, or raises ConfigError or PeerError.
    `changed` is called after every change of the facts.
    """

    restart_policy: str
    grace_seconds: float
    address: str
    logs: Path
    session: aiohttp.ClientSession
    prepare: Callable[[Object], Awaitable[ProcessSpec]]
    changed: Callable[[], None]


@dataclass(frozen=True)
class ProbeTarget:
    """The target of a container's probes. `session` must not verify certificates, as the kubelet does not."""

    address: str
    ports: dict[str, int]
    process: ContainerProcess
    env: dict[str, str]
    session: aiohttp.ClientSession

    def port(self, port: int | str) -> int:
        """Return a port by number or name; 0, an unused port, for an unknown name."""
        return port if isinstance(port, int) else self.ports.get(port, 0)


class Container:
    """A container; `run` keeps it alive, `stop` ends it after `run` was cancelled."""

    def __init__(self, spec: Object, context: ContainerContext):
        self._spec = spec
        self._around = context
        self._facts = ContainerFacts(spec["name"], spec.get("image", ""), ContainerWaiting("ContainerCreating"))
        self._process: ContainerProcess | None = None
        self._target: ProbeTarget | None = None
        self._around.logs.mkdir(parents=True, exist_ok=True)

    @property
    def facts(self) -> ContainerFacts:
        return self._facts

    @property
    def running(self) -> bool:
        return isinstance(self._facts.state, ContainerRunning)

    def log_file(self, *, previous: bool) -> Path:
        """Return the log of the present or the previous run; it may not exist."""
        return self._around.logs / f"{self._facts.restarts - previous}.log"

    def wait_for(self, reason: str, message: str) -> None:
        """Set the reason for waiting before the first run."""
        self._set(ContainerWaiting(reason, message))

    async def run(self) -> None:
        """Run the container until its pod's restart policy ends it."""
        failures = 0
        while True:
            started = asyncio.get_running_loop().time()
            ended = await self._run_once()
            if not should_restart(self._around.restart_policy, ended.exit_code):
                self._set(ended)
                return
            if asyncio.get_running_loop().time() - started >= HEALTHY_AFTER_SECONDS:
                failures = 0
            seconds = back_off_seconds(failures)
            failures += 1
            self._set(_pause(ended, seconds), last=ended)
            await asyncio.sleep(seconds)
            self._facts = replace(self._facts, restarts=self._facts.restarts + 1)

    async def _run_once(self) -> ContainerTerminated:
        """Start the container as soon as its references exist, and return how it ended."""
        spec = await self._prepared()
        started_at = now_text()
        try:
            self._process = await ContainerProcess.start(spec, self.log_file(previous=False))
        except StartError as error:
            return ContainerTerminated(START_ERROR_CODE, "StartError", started_at, now_text(), str(error))
        ports = {port["name"]: port["containerPort"] for port in self._spec.get("ports", []) if "name" in port}
        self._target = ProbeTarget(self._around.address, ports, self._process, spec.env, self._around.session)
        started = "startupProbe" not in self._spec
        self._set(ContainerRunning(started_at), ready=started and "readinessProbe" not in self._spec, started=started)
        exit_code = await self._supervise(self._process, self._target)
        self._process = None
        return _terminated(exit_code, started_at)

    async def _prepared(self) -> ProcessSpec:
        while True:
            try:
                return await self._around.prepare(self._spec)
            except (ConfigError, PeerError) as error:
                self._set(ContainerWaiting("CreateContainerConfigError", str(error)))
                await asyncio.sleep(CONFIG_RETRY_SECONDS)

    async def _supervise(self, process: ContainerProcess, target: ProbeTarget) -> int:
        probing = asyncio.create_task(self._probe(process, target))
        try:
            return await process.wait()
        finally:
            probing.cancel()
            with suppress(asyncio.CancelledError):
                await probing

    async def _probe(self, process: ContainerProcess, target: ProbeTarget) -> None:
        if startup := self._spec.get("startupProbe"):
            async for result in probe_results(startup, target, initial=None):
                if result is False:
                    await self._end_unhealthy(process, "startup")
                    return
                if result:
                    break
            self._set(self._facts.state, ready="readinessProbe" not in self._spec, started=True)
        async with asyncio.TaskGroup() as group:
            if readiness := self._spec.get("readinessProbe"):
                group.create_task(self._follow_readiness(readiness, target))
            if liveness := self._spec.get("livenessProbe"):
                group.create_task(self._follow_liveness(liveness, process, target))

    async def _follow_readiness(self, probe: Object, target: ProbeTarget) -> None:
        async for result in probe_results(probe, target, initial=False):
            self._set(self._facts.state, ready=bool(result), started=True)

    async def _follow_liveness(self, probe: Object, process: ContainerProcess, target: ProbeTarget) -> None:
        async for result in probe_results(probe, target, initial=True):
            if not result:
                await self._end_unhealthy(process, "liveness")
                return

    async def _end_unhealthy(self, process: ContainerProcess, probe: str) -> None:
        log.info("container %s failed its %s probe and will be restarted", self._facts.name, probe)
        await process.stop(self._around.grace_seconds)

    async def stop(self, grace_seconds: float) -> None:
        """End the process: preStop hook, SIGTERM, SIGKILL after `grace_seconds`. Cancel `run` before."""
        process, state = self._process, self._facts.state
        if process is None or self._target is None or not isinstance(state, ContainerRunning):
            return
        deadline = asyncio.get_running_loop().time() + grace_seconds
        self._set(state)
        if hook := self._spec.get("lifecycle", {}).get("preStop"):
            await self._pre_stop(hook, self._target, grace_seconds)
        await process.stop(max(deadline - asyncio.get_running_loop().time(), 0))
        self._set(_terminated(await process.wait(), state.started_at))

    async def _pre_stop(self, hook: Object, target: ProbeTarget, grace_seconds: float) -> None:
        if "sleep" in hook:
            with suppress(TimeoutError):
                await asyncio.wait_for(target.process.wait(), min(hook["sleep"]["seconds"], grace_seconds))
        elif not await attempt({**hook, "timeoutSeconds": grace_seconds}, target):
            log.warning("preStop hook of container %s failed", self._facts.name)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send(signal.SIGKILL)

    def _set(
        self,
        state: ContainerState,
        *,
        last: ContainerTerminated | None = None,
        ready: bool = False,
        started: bool = False,
    ) -> None:
        self._facts = replace(self._facts, state=state, last=last or self._facts.last, ready=ready, started=started)
        self._around.changed()


def back_off_seconds(failures: int) -> float:
    """Return the pause after `failures` restarts: 0, 1, 2, 4, ... up to the longest."""
    return 0.0 if failures == 0 else backoff_seconds(failures, 1.0, LONGEST_BACK_OFF_SECONDS, jitter=False)


def _pause(ended: ContainerTerminated, seconds: float) -> ContainerWaiting:
    if ended.reason == "StartError":
        return ContainerWaiting("RunContainerError", ended.message)
    return ContainerWaiting(
        "CrashLoopBackOff", f"ended with exit code {ended.exit_code}; starting again in {seconds:.0f} s"
    )


def _terminated(exit_code: int, started_at: str) -> ContainerTerminated:
    return ContainerTerminated(exit_code, "Error" if exit_code else "Completed", started_at, now_text())


def now_text() -> str:
    """Return the time in the API's form (RFC 3339, UTC, whole seconds)."""
    return rfc3339(datetime.now(UTC))


class ProbeCounter:
    """Counts attempts; the result changes after enough equal ones in a row. `initial` is None if there is none."""

    def __init__(self, probe: Object, *, initial: bool | None):
        self._needed = {True: probe.get("successThreshold", 1), False: probe.get("failureThreshold", 3)}
        self._result = initial
        self._last: bool | None = None
        self._in_a_row = 0

    def add(self, *, succeeded: bool) -> bool | None:
        """Count an attempt and return the present result."""
        self._in_a_row = self._in_a_row + 1 if succeeded == self._last else 1
        self._last = succeeded
        if self._in_a_row >= self._needed[succeeded]:
            self._result = succeeded
        return self._result


async def probe_results(probe: Object, target: ProbeTarget, *, initial: bool | None) -> AsyncIterator[bool | None]:
    counter = ProbeCounter(probe, initial=initial)
    await asyncio.sleep(probe.get("initialDelaySeconds", 0))
    while True:
        yield counter.add(succeeded=await attempt(probe, target))
        await asyncio.sleep(probe.get("periodSeconds", 10))


async def attempt(probe: Object, target: ProbeTarget) -> bool:
    """Return whether one attempt succeeds within the probe's timeout."""
    try:
        async with asyncio.timeout(probe.get("timeoutSeconds", 1)):
            return await perform(probe, target)
    except (OSError, TimeoutError, aiohttp.ClientError, ValueError):
        return False


async def perform(action: Object, target: ProbeTarget) -> bool:
    """Run the action of a probe or a lifecycle hook and return whether it succeeded."""
    if "httpGet" in action:
        return await _http(action["httpGet"], target)
    if "exec" in action:
        return await run_in(target, action["exec"]["command"]) == 0
    goal = action["tcpSocket"]
    _, writer = await asyncio.open_connection(goal.get("host") or target.address, target.port(goal["port"]))
    writer.close()
    return True


async def _http(get: Object, target: ProbeTarget) -> bool:
    host = get.get("host") or target.address
    url = f"{get.get('scheme', 'HTTP').lower()}://{host}:{target.port(get['port'])}/{get.get('path', '/').lstrip('/')}"
    headers = {header["name"]: header["value"] for header in get.get("httpHeaders", [])}
    async with target.session.get(url, headers=headers, allow_redirects=False) as response:
        return 200 <= response.status < 400


async def run_in(target: ProbeTarget, command: list[str]) -> int:
    """Run a command inside the container and return its status; kill it if the caller is cancelled."""
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
