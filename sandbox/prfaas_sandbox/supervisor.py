"""The sandbox's inner supervisor: lays the network, starts one process per cluster and Prometheus, shapes the link.

It ends, and everything with it, as soon as one of them ends.
"""

import asyncio
import json
import logging
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from prfaas.errors import BadInputError, InternalError, PeerError
from prfaas_sandbox import prometheus
from prfaas_sandbox.messages import Message
from prfaas_sandbox.network import CLUSTERS, HUB, Command, create_link, cut_link, enter, shape_link
from prfaas_sandbox.processes import Child
from prfaas_sandbox.state import StateFolder

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
COMMAND_TIMEOUT_SECONDS = 10.0
LARGEST_MBPS = 100_000
SMALLEST_MBPS = 0.1


@dataclass(frozen=True)
class Plan:
    """What the host asks for.

    Args:
        tools: paths of the programs by name.
        link_mbps: rate of the link at the start.

    """

    tools: dict[str, str]
    link_mbps: float

    def write(self, path: Path) -> None:
        """Write the plan."""
        path.write_text(json.dumps({"tools": self.tools, "link_mbps": self.link_mbps}))

    @classmethod
    def read(cls, path: Path) -> "Plan":
        """Read what `write` wrote."""
        return cls(**json.loads(path.read_text()))


def main(root: Path) -> None:
    """Run until something ends; the reason goes to the host."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    state = StateFolder(root)
    try:
        asyncio.run(Supervisor(state, Plan.read(state.plan)).run())
    except (PeerError, InternalError, OSError) as error:
        Message("sandbox", "failed", str(error)).send()
        sys.exit(1)


class Supervisor:
    """See the module."""

    def __init__(self, state: StateFolder, plan: Plan):
        self._state = state
        self._plan = plan
        self._mbps = plan.link_mbps
        self._namespaces = {network.name: state.namespace(network.name) for network in CLUSTERS}

    async def run(self) -> None:
        """Start everything and watch over it; return only by an exception."""
        await self._lay_network()
        await self._name_prometheus()
        await self._serve_link()
        clusters = [self._start_cluster(network.name) for network in CLUSTERS]
        kubeconfigs = {network.name: self._state.cluster(network.name).prometheus_kubeconfig for network in CLUSTERS}
        while not all(path.exists() for path in kubeconfigs.values()):
            await self._check(clusters)
        children = [*clusters, self._start_prometheus(kubeconfigs)]
        while True:
            await self._check(children)

    async def _check(self, children: list[Child]) -> None:
        for child in children:
            child.check_running()
        await asyncio.sleep(POLL_SECONDS)

    async def _lay_network(self) -> None:
        commands: list[Command] = [["mount", "-t", "tmpfs", "-o", "mode=700", "tmpfs", str(self._state.run)]]
        for path in self._namespaces.values():
            commands += [["touch", str(path)], ["unshare", f"--net={path}", "true"]]
        commands += create_link(self._namespaces["hub"], self._namespaces["member"])
        await _run([*commands, *shape_link(tuple(self._namespaces.values()), self._mbps)])

    async def _name_prometheus(self) -> None:
        """Give Prometheus the name that cluster DNS would: there is none here, so the hosts file says it."""
        hosts = self._state.run / "hosts"
        hosts.write_text(f"{Path('/etc/hosts').read_text()}\n{prometheus.ADDRESS} {prometheus.SERVICE}\n")
        await _run([["mount", "--bind", str(hosts), "/etc/hosts"]])

    def _start_cluster(self, name: str) -> Child:
        command = [sys.executable, "-m", "prfaas_sandbox.cluster", str(self._state.root), name]
        log_file = self._state.logs / f"{name}.log"
        return Child(f"the {name} cluster", enter(self._namespaces[name], command), log_file, share_output=True)

    def _start_prometheus(self, kubeconfigs: dict[str, Path]) -> Child:
        folder = self._state.run / "prometheus"
        folder.mkdir()
        config = folder / "prometheus.yaml"
        config.write_text(prometheus.configuration(kubeconfigs))
        command = prometheus.command(Path(self._plan.tools["prometheus"]), config, folder / "data")
        entered = enter(self._namespaces[HUB.name], [str(part) for part in command])
        return Child("Prometheus", entered, self._state.logs / "prometheus.log")

    async def _serve_link(self) -> None:
        """Serve GET and PUT of {"mbps": rate}, and PUT of {"cut": whether}, at the link's socket."""

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


def checked_rate(mbps: Any) -> float:
    """Return a link rate in Mbit/s; raise BadInputError for one that no link here can have."""
    if not isinstance(mbps, int | float) or not SMALLEST_MBPS <= mbps <= LARGEST_MBPS:
        raise BadInputError(f"a link of {mbps} Mbit/s cannot be made: choose {SMALLEST_MBPS} to {LARGEST_MBPS}")
    return mbps


async def _run(commands: list[Command]) -> None:
    """Run commands one after the other; raise InternalError when one fails."""
    for command in commands:
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_SECONDS, check=False
        )
        if done.returncode:
            raise InternalError(f"{' '.join(command)} failed: {done.stderr.strip()}")
