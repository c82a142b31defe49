"""A running sandbox for a program on the host: two clusters, a link, and access to both.

    async with Sandbox.start(Path(".prfaas/sandbox"), link_mbps=100, report=print) as sandbox:
        await sandbox.kubectl(sandbox.hub, "get", "nodes")
        await sandbox.shape_link(5)

When the context or this process ends, no process, mount or interface of the sandbox is left.
"""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import aiohttp

from prfaas.errors import BadInputError, ConfigError, PeerError, UnreachableError
from prfaas.processes import tail
from prfaas_sandbox import prometheus
from prfaas_sandbox.api import connect
from prfaas_sandbox.cluster import API_PORT
from prfaas_sandbox.credentials import read_kubeconfig
from prfaas_sandbox.environment import ClusterAccess, Images, run_in
from prfaas_sandbox.forward import Forwards, HostPort, endpoints
from prfaas_sandbox.network import CLUSTERS, HUB, ClusterNetwork, checked_rate
from prfaas_sandbox.state import Description, NamespaceMessage, SandboxPlan, StateFolder
from prfaas_sandbox.tools import Tools, ensure_tools

DEFAULT_LINK_MBPS = 100
START_TIMEOUT_SECONDS = 120.0
STOP_TIMEOUT_SECONDS = 10.0
POLL_SECONDS = 0.1
HTTP_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
CONTROL_TIMEOUT_SECONDS = 15.0
UNSHARE_TIMEOUT_SECONDS = 10.0
PROGRAMS = {"unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux", "mount": "util-linux"} | {
    "ip": "iproute2",
    "tc": "iproute2",
}
SYSTEM_FOLDERS = "/usr/local/sbin:/usr/sbin:/sbin"
_NAMESPACES = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
_USER_NAMESPACE = ["--user", "--map-root-user"]


class Sandbox:
    """A running sandbox, an `Environment`; get one from `Sandbox.start`."""

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
        cls,
        state_dir: Path,
        *,
        link_mbps: float = DEFAULT_LINK_MBPS,
        scrape_seconds: int = 1,
        report: Callable[[str], None],
    ) -> AsyncIterator[Self]:
        """Build missing programs, start both clusters, and end them with the context.

        The folder `state_dir` gets logs and kubeconfigs; a former sandbox's is emptied first. Raises ConfigError if the
        machine lacks something or another sandbox uses it, PeerError if a part ends, UnreachableError when time is up.
        """
        checked_rate(link_mbps)
        state = StateFolder(state_dir.absolute())
        launcher = unshare_command()
        tools = await asyncio.to_thread(ensure_tools, report)
        with state.hold():
            started = asyncio.get_running_loop().time()
            paths = {name: str(path) for name, path in tools.paths.items()}
            SandboxPlan(paths, link_mbps, scrape_seconds).write(state.plan)
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
        """Wait until a part of the sandbox ends unexpectedly, and with it all; raise PeerError with the reason."""
        while True:
            await self._inside.next_message()

    async def forward(self, cluster: ClusterAccess, namespace: str, service: str, port: int | str) -> str:
        kubeconfig = read_kubeconfig(cluster.kubeconfig)

        async def resolve() -> list[HostPort]:
            query = {"labelSelector": f"kubernetes.io/service-name={service}"}
            slices = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
            async with connect(kubeconfig) as api:
                found = await api.call("GET", f"/api/v1/namespaces/{namespace}/services/{service}")
                listed = await api.call("GET", slices, query=query)
            return endpoints(found, listed["items"], port)

        await resolve()  # a wrong name is told now, not at the first connection
        return f"http://127.0.0.1:{await self._forwards.add(self._state.cluster(cluster.name).forward, resolve)}"

    async def shape_link(self, mbps: float) -> None:
        await change_link(self._state, mbps)

    async def cut_link(self) -> None:
        await _call(self._state.link, "PUT", "/link/cut", {"cut": True})

    async def restore_link(self) -> None:
        await _call(self._state.link, "PUT", "/link/cut", {"cut": False})

    async def kill_pod(self, cluster: ClusterAccess, namespace: str, pod: str) -> None:
        await _call(self._state.cluster(cluster.name).control, "POST", f"/pods/{namespace}/{pod}/kill")

    def program(self, name: str) -> str:
        return name if shutil.which(name) else str(self._tools[name])

    async def kubectl(self, cluster: ClusterAccess, *arguments: str, stdin: str | None = None) -> str:
        return await run_in(self._tools["kubectl"], cluster, arguments, stdin)

    async def helm(self, cluster: ClusterAccess, *arguments: str) -> str:
        return await run_in(self._tools["helm"], cluster, arguments)


class _Inside:
    """The sandbox's outermost process, which ends with its standard input: see `prfaas_sandbox.supervisor`."""

    def __init__(self, process: asyncio.subprocess.Process, state: StateFolder):
        self._process = process
        self.state = state

    @classmethod
    @asynccontextmanager
    async def run(cls, launcher: list[str], state: StateFolder) -> AsyncIterator[Self]:
        """Run the inside while the context lasts."""
        with (state.logs / "sandbox.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *launcher,
                sys.executable,
                "-m",
                "prfaas_sandbox.supervisor",
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

    async def next_message(self) -> NamespaceMessage:
        """Return the next message of the inside; raise PeerError if a part failed or the inside ended."""
        line = await self._process.stdout.readline() if self._process.stdout is not None else b""
        if not line:
            raise PeerError(f"the sandbox ended; the end of its log:\n{tail(self.state.logs / 'sandbox.log')}")
        message = NamespaceMessage.parse(line)
        if message.kind == "failed":
            raise PeerError(f"{message.process}: {message.text}")
        return message

    async def wait_ready(self, report: Callable[[str], None]) -> None:
        """Wait until both clusters report that they are ready."""
        missing = {network.name for network in CLUSTERS}
        try:
            async with asyncio.timeout(START_TIMEOUT_SECONDS):
                while missing:
                    message = await self.next_message()
                    report(f"{message.process}: {message.text or message.kind}")
                    if message.kind == "ready":
                        missing.discard(message.process)
        except TimeoutError as error:
            names, logs = ", ".join(sorted(missing)), self.state.logs
            reason = f"not ready within {START_TIMEOUT_SECONDS:.0f} s: {names} (logs: {logs})"
            raise UnreachableError(reason) from error


def _environment() -> dict[str, str]:
    """Return the inside's environment: system programs on PATH, and no proxy before the API servers."""
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
    async def resolve() -> list[HostPort]:
        return [(network.address, port)]

    return await forwards.add(state.cluster(network.name).forward, resolve)


async def change_link(state: StateFolder, mbps: float) -> None:
    """Set the link's rate both ways; raise BadInputError for a rate out of range."""
    await _call(state.link, "PUT", "/link", {"mbps": mbps})


async def link_rate(state: StateFolder) -> float:
    return (await _call(state.link, "GET", "/link"))["mbps"]


async def _call(socket: Path, method: str, path: str, body: Any = None) -> Any:
    timeout = aiohttp.ClientTimeout(total=CONTROL_TIMEOUT_SECONDS)
    connector = aiohttp.UnixConnector(str(socket))
    try:
        async with (
            aiohttp.ClientSession("http://sandbox", connector=connector, timeout=timeout) as session,
            session.request(method, path, json=body) as response,
        ):
            answer = await response.json()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UnreachableError(f"no sandbox answers at {socket}: {error}") from error
    if response.status >= 400:
        raise BadInputError(answer["error"])
    return answer


def search_path() -> str:
    """Return PATH with the folders of system programs, which many users' PATH lacks."""
    return f"{os.environ.get('PATH', os.defpath)}:{SYSTEM_FOLDERS}"


def unshare_command() -> list[str]:
    """Return the prefix that runs a command in new namespaces, after a trial.

    Raises ConfigError if a program is missing, or the kernel refuses namespaces.
    """
    missing = {package for program, package in PROGRAMS.items() if not shutil.which(program, path=search_path())}
    if missing:
        raise ConfigError(f"the sandbox needs programs of {' and '.join(sorted(missing))}: install these packages")
    candidates = [[*_USER_NAMESPACE, *_NAMESPACES]]
    if os.geteuid() == 0:
        candidates.insert(0, _NAMESPACES)  # root in a container may lack the capability, but have user namespaces
    reason = ""
    for flags in candidates:
        command = ["unshare", *flags]
        words = [*command, "true"]
        tried = subprocess.run(words, capture_output=True, text=True, timeout=UNSHARE_TIMEOUT_SECONDS, check=False)
        if tried.returncode == 0:
            return command
        reason = tried.stderr.strip()
    raise ConfigError(
        f"neither root nor user namespaces are available here ({reason}), so the sandbox cannot run: "
        "use two kind clusters instead"
    )
