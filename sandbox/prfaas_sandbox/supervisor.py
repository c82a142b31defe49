"""The sandbox's inside: pid 1 of its namespaces, and the supervisor that lays the network and starts everything.

`python -m prfaas_sandbox.supervisor STATE`. Its standard input is a pipe whose only writing end the host's process
holds. However that process ends, the pipe ends too; then pid 1 exits. With it the kernel ends every process of the PID
namespace, and the network and mount namespaces.

The supervisor starts one process per cluster and Prometheus, and shapes the link. When one ends, all of it ends.
"""

import asyncio
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

from aiohttp import web

from prfaas.errors import BadInputError, InternalError, PeerError
from prfaas.processes import ChildProcess
from prfaas_sandbox import prometheus
from prfaas_sandbox.network import CLUSTERS, HUB, checked_rate, create_link, cut_link, enter, shape_link
from prfaas_sandbox.state import NamespaceMessage, SandboxPlan, StateFolder

log = logging.getLogger(__name__)
POLL_SECONDS = 0.1
COMMAND_TIMEOUT_SECONDS = 10.0


def main() -> None:
    """Fork the supervisor; stay as pid 1, reap orphans, and end with the host's process."""
    supervisor = os.fork()
    if supervisor == 0:
        supervise(StateFolder(Path(sys.argv[1])))
        return
    threading.Thread(target=_end_with_host, daemon=True).start()
    while True:
        pid, status = os.wait()
        if pid == supervisor:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _end_with_host() -> None:
    while os.read(0, 1):
        continue
    os._exit(0)


def supervise(state: StateFolder) -> None:
    """Run until a part ends; report the reason to the host."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    try:
        asyncio.run(Supervisor(state, SandboxPlan.read(state.plan)).run())
    except (PeerError, InternalError, OSError) as error:
        NamespaceMessage("sandbox", "failed", str(error)).send()
        sys.exit(1)


class Supervisor:
    def __init__(self, state: StateFolder, plan: SandboxPlan):
        self._state = state
        self._plan = plan
        self._mbps = plan.link_mbps
        self._namespaces = {network.name: state.namespace(network.name) for network in CLUSTERS}

    async def run(self) -> None:
        """Start everything and watch over it; return only by an exception."""
        await self._create_network()
        await self._name_prometheus()
        await self._serve_link()
        clusters = [self._start_cluster(network.name) for network in CLUSTERS]
        kubeconfigs = {network.name: self._state.cluster(network.name).prometheus_kubeconfig for network in CLUSTERS}
        while not all(path.exists() for path in kubeconfigs.values()):
            await self._check(clusters)
        children = [*clusters, self._start_prometheus(kubeconfigs)]
        while True:
            await self._check(children)

    async def _check(self, children: list[ChildProcess]) -> None:
        for child in children:
            child.check_running()
        await asyncio.sleep(POLL_SECONDS)

    async def _create_network(self) -> None:
        commands: list[list[str]] = [["mount", "-t", "tmpfs", "-o", "mode=700", "tmpfs", str(self._state.run)]]
        for path in self._namespaces.values():
            commands += [["touch", str(path)], ["unshare", f"--net={path}", "true"]]
        commands += create_link(self._namespaces["hub"], self._namespaces["member"])
        await _run([*commands, *shape_link(tuple(self._namespaces.values()), self._mbps)])

    async def _name_prometheus(self) -> None:
        """Add Prometheus's name to the hosts file: there is no cluster DNS here."""
        hosts = self._state.run / "hosts"
        hosts.write_text(f"{Path('/etc/hosts').read_text()}\n{prometheus.ADDRESS} {prometheus.SERVICE}\n")
        await _run([["mount", "--bind", str(hosts), "/etc/hosts"]])

    def _start_cluster(self, name: str) -> ChildProcess:
        command = [sys.executable, "-m", "prfaas_sandbox.cluster", str(self._state.root), name]
        log_file = self._state.logs / f"{name}.log"
        return ChildProcess(f"the {name} cluster", enter(self._namespaces[name], command), log_file, share_output=True)

    def _start_prometheus(self, kubeconfigs: dict[str, Path]) -> ChildProcess:
        folder = self._state.run / "prometheus"
        folder.mkdir()
        config = folder / "prometheus.yaml"
        config.write_text(prometheus.configuration(kubeconfigs, self._plan.scrape_seconds))
        command = prometheus.command(Path(self._plan.tools["prometheus"]), config, folder / "data")
        entered = enter(self._namespaces[HUB.name], [str(part) for part in command])
        return ChildProcess("Prometheus", entered, self._state.logs / "prometheus.log")

    async def _serve_link(self) -> None:
        """Serve GET and PUT of {"mbps": rate}, and PUT of {"cut": true or false}, at the link's socket."""

        async def put(request: web.Request) -> web.Response:
            try:
                mbps = checked_rate((await request.json())["mbps"])
            except (BadInputError, ValueError, KeyError, TypeError) as error:
                return web.json_response({"error": str(error)}, status=400)
            await _run(shape_link(tuple(self._namespaces.values()), mbps))
            self._mbps = mbps
            return await get(request)

        async def put_cut(request: web.Request) -> web.Response:
            cut = bool((await request.json())["cut"])
            await _run(cut_link(*self._namespaces.values(), cut=cut))
            return web.json_response({"cut": cut})

        async def get(_: web.Request) -> web.Response:
            return web.json_response({"mbps": self._mbps})

        application = web.Application()
        application.add_routes([web.get("/link", get), web.put("/link", put), web.put("/link/cut", put_cut)])
        runner = web.AppRunner(application)
        await runner.setup()
        await web.UnixSite(runner, str(self._state.link)).start()


async def _run(commands: list[list[str]]) -> None:
    for command in commands:
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_SECONDS, check=False
        )
        if done.returncode:
            raise InternalError(f"{' '.join(command)} failed: {done.stderr.strip()}")


if __name__ == "__main__":
    main()
