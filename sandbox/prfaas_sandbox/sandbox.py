"""A running sandbox, as a program on the host sees it: two clusters, a link, and ways in.

    async with Sandbox.start(Path(".prfaas/sandbox"), link_mbps=100, report=print) as sandbox:
        await sandbox.kubectl(sandbox.hub, "get", "nodes")
        await sandbox.shape_link(5)

When the context ends, or this process does in whatever way, no process, mount or interface of it is left.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import aiohttp

from prfaas.errors import PeerError, UnreachableError
from prfaas_sandbox import prometheus
from prfaas_sandbox.api import Api
from prfaas_sandbox.build import ensure_tools
from prfaas_sandbox.cluster import API_PORT
from prfaas_sandbox.control import change_link, cut_link, kill_pod
from prfaas_sandbox.kubeconfig import read_kubeconfig
from prfaas_sandbox.messages import Message, parse
from prfaas_sandbox.namespaces import search_path, unshare_command
from prfaas_sandbox.network import CLUSTERS, HUB, ClusterNetwork
from prfaas_sandbox.place import ClusterAccess, Images, run_in
from prfaas_sandbox.processes import tail
from prfaas_sandbox.relay import Forwards, Target
from prfaas_sandbox.services import endpoints
from prfaas_sandbox.state import StateFolder
from prfaas_sandbox.supervisor import Plan, checked_rate
from prfaas_sandbox.tools import Tools

DEFAULT_LINK_MBPS = 100
START_TIMEOUT_SECONDS = 120.0
STOP_TIMEOUT_SECONDS = 10.0
POLL_SECONDS = 0.1
HTTP_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


@dataclass(frozen=True)
class Description:
    """Where everything is; kept in the state folder for other processes of the host.

    Args:
        hub: the cluster that decodes.
        member: the other one.
        prometheus_url: for the host.
        prometheus_internal_url: for pods of both clusters.
        start_seconds: how long the start took.

    """

    hub: ClusterAccess
    member: ClusterAccess
    prometheus_url: str
    prometheus_internal_url: str
    start_seconds: float

    def write(self, path: Path) -> None:
        """Write the description; it appears whole."""
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(self), indent=2, default=str) + "\n")
        fresh.replace(path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote."""
        fields: dict[str, Any] = json.loads(path.read_text())
        for cluster in ("hub", "member"):
            fields[cluster] = ClusterAccess(**{**fields[cluster], "kubeconfig": Path(fields[cluster]["kubeconfig"])})
        return cls(**fields)


class Sandbox:
    """A sandbox that is up; get one from `Sandbox.start`. It is a `Place`.

    Attributes:
        description: where everything is.
        hub, member: the two clusters.
        prometheus_url, prometheus_internal_url: as in the description.

    """

    command = "sandbox"
    images: Images | None = None

    def __init__(self, inside: "_Inside", tools: Tools, forwards: Forwards, description: Description):
        self._inside = inside
        self._state = inside.state
        self._tools = tools
        self._forwards = forwards
        self.description = description
        self.hub, self.member = description.hub, description.member
        self.prometheus_url = description.prometheus_url
        self.prometheus_internal_url = description.prometheus_internal_url

    @classmethod
    @asynccontextmanager
    async def start(
        cls, state_dir: Path, *, link_mbps: float = DEFAULT_LINK_MBPS, report: Callable[[str], None]
    ) -> AsyncIterator[Self]:
        """Build what is missing, start both clusters, and end them with the context.

        Args:
            state_dir: folder for logs and kubeconfigs; emptied first if it was a sandbox's.
            link_mbps: rate of the link, each way.
            report: gets lines of progress.

        Raises:
            ConfigError: the machine lacks something, or a sandbox runs in the folder already.
            PeerError: a part of the sandbox ended; the message carries the end of its log.
            UnreachableError: it was not ready in time.

        """
        checked_rate(link_mbps)
        state = StateFolder(state_dir.absolute())
        launcher = unshare_command()
        tools = await asyncio.to_thread(ensure_tools, report)
        with state.hold():
            started = asyncio.get_running_loop().time()
            Plan({name: str(path) for name, path in tools.paths.items()}, link_mbps).write(state.plan)
            async with _Inside.run(launcher, state) as inside, Forwards() as forwards:
                await inside.wait_ready(report)
                hub, member = [await _open(state, network, forwards) for network in CLUSTERS]
                url = await _open_prometheus(state, forwards)
                seconds = asyncio.get_running_loop().time() - started
                description = Description(hub, member, url, prometheus.INTERNAL_URL, round(seconds, 1))
                description.write(state.description)
                report(f"both clusters ready after {seconds:.1f} s")
                yield cls(inside, tools, forwards, description)

    async def wait_broken(self) -> None:
        """Wait until a part of the sandbox ends by itself, and with it all; raise PeerError with the reason."""
        while True:
            await self._inside.next_message()

    async def forward(self, cluster: ClusterAccess, namespace: str, service: str, port: int | str) -> str:
        """Return a URL on 127.0.0.1 for a port of a Service; each connection goes to a pod that is ready then."""
        kubeconfig = read_kubeconfig(cluster.kubeconfig)

        async def resolve() -> list[Target]:
            selector = f"kubernetes.io/service-name={service}"
            slices = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
            async with Api(kubeconfig) as api:
                found = await api.get(f"/api/v1/namespaces/{namespace}/services/{service}")
                listed = await api.get(slices, labelSelector=selector)
            return endpoints(found, listed["items"], port)

        await resolve()  # a wrong name is told now, not at the first connection
        return f"http://127.0.0.1:{await self._forwards.add(self._state.cluster(cluster.name).relay, resolve)}"

    async def shape_link(self, mbps: float) -> None:
        """Change the rate of the link, both ways; connections stay."""
        await change_link(self._state, mbps)

    async def cut_link(self) -> None:
        """Let nothing cross the link, and no connection notice by itself; again is harmless."""
        await cut_link(self._state, cut=True)

    async def heal_link(self) -> None:
        """Undo `cut_link`; again is harmless."""
        await cut_link(self._state, cut=False)

    async def kill_pod(self, cluster: ClusterAccess, namespace: str, pod: str) -> None:
        """Kill all processes of a pod with SIGKILL; the node then restarts its containers, as after any crash."""
        await kill_pod(self._state.cluster(cluster.name), namespace, pod)

    def program(self, name: str) -> str:
        """Return what a person types to run one of our programs: its name where PATH has it, else its path."""
        return name if shutil.which(name) else str(self._tools[name])

    async def kubectl(self, cluster: ClusterAccess, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl against a cluster and return what it prints; raise PeerError with its message when it fails."""
        return await run_in(self._tools["kubectl"], cluster, arguments, stdin)

    async def helm(self, cluster: ClusterAccess, *arguments: str) -> str:
        """Run Helm against a cluster and return what it prints; raise PeerError with its message when it fails."""
        return await run_in(self._tools["helm"], cluster, arguments)


class _Inside:
    """The sandbox's outermost process, whose life hangs on its standard input: see `prfaas_sandbox.inside`."""

    def __init__(self, process: asyncio.subprocess.Process, state: StateFolder):
        self._process = process
        self.state = state

    @classmethod
    @asynccontextmanager
    async def run(cls, launcher: list[str], state: StateFolder) -> AsyncIterator[Self]:
        """Run the inside as long as the context lasts."""
        with (state.logs / "sandbox.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *launcher,
                sys.executable,
                "-m",
                "prfaas_sandbox.inside",
                str(state.root),
                env=_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for us; the inside ends with its standard input
            )
        try:
            yield cls(process, state)
        finally:
            if process.stdin is not None:
                process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), STOP_TIMEOUT_SECONDS)
            except TimeoutError:
                process.kill()  # --kill-child takes the rest along
                await process.wait()

    async def next_message(self) -> Message:
        """Return what the inside says next; raise PeerError when it says that something failed, or has ended."""
        line = await self._process.stdout.readline() if self._process.stdout is not None else b""
        if not line:
            raise PeerError(f"the sandbox ended; the end of its log:\n{tail(self.state.logs / 'sandbox.log')}")
        message = parse(line)
        if message.kind == "failed":
            raise PeerError(f"{message.sender}: {message.text}")
        return message

    async def wait_ready(self, report: Callable[[str], None]) -> None:
        """Wait until both clusters say that they are ready."""
        missing = {network.name for network in CLUSTERS}
        try:
            async with asyncio.timeout(START_TIMEOUT_SECONDS):
                while missing:
                    message = await self.next_message()
                    report(f"{message.sender}: {message.text or message.kind}")
                    if message.kind == "ready":
                        missing.discard(message.sender)
        except TimeoutError as error:
            names, logs = ", ".join(sorted(missing)), self.state.logs
            reason = f"not ready within {START_TIMEOUT_SECONDS:.0f} s: {names} (logs: {logs})"
            raise UnreachableError(reason) from error


def _environment() -> dict[str, str]:
    """Return our environment for the inside: system programs on PATH, and no proxy on the way to the API servers."""
    kept = {name: value for name, value in os.environ.items() if name.lower() not in HTTP_PROXIES}
    return {**kept, "PATH": search_path()}


async def _open(state: StateFolder, network: ClusterNetwork, forwards: Forwards) -> ClusterAccess:
    """Forward a port to the cluster's API server and write a kubeconfig for it."""
    folder = state.cluster(network.name)
    port = await _forward(state, network, API_PORT, forwards)
    internal = read_kubeconfig(folder.internal_kubeconfig)
    kubeconfig = replace(internal, server=f"https://127.0.0.1:{port}").write(folder.kubeconfig)
    return ClusterAccess(network.name, kubeconfig, internal.server)


async def _open_prometheus(state: StateFolder, forwards: Forwards) -> str:
    """Forward a port to Prometheus and wait until it answers."""
    url = f"http://127.0.0.1:{await _forward(state, HUB, prometheus.PORT, forwards)}"
    try:
        async with asyncio.timeout(START_TIMEOUT_SECONDS), aiohttp.ClientSession() as session:
            while True:
                try:
                    async with session.get(f"{url}/-/ready") as response:
                        if response.status == 200:
                            return url
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError as error:
        raise UnreachableError(f"Prometheus did not become ready:\n{tail(state.logs / 'prometheus.log')}") from error


async def _forward(state: StateFolder, network: ClusterNetwork, port: int, forwards: Forwards) -> int:
    async def resolve() -> list[Target]:
        return [(network.address, port)]

    return await forwards.add(state.cluster(network.name).relay, resolve)
