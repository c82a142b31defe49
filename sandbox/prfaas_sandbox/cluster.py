"""One cluster inside the sandbox: its control plane, its node agent, and the sockets by which the host reaches both.

`python -m prfaas_sandbox.cluster STATE hub|member`, in the cluster's network namespace.
"""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from prfaas.errors import PeerError
from prfaas.kube import KubeSession
from prfaas.kube.watch import WatchEvent, follow
from prfaas_sandbox.api import connect
from prfaas_sandbox.controlplane import ADMIN_GROUP, ControlPlane, Placement
from prfaas_sandbox.forward import serve_connections
from prfaas_sandbox.network import CLUSTERS, ClusterNetwork
from prfaas_sandbox.node.agent import Folders, NodeAgent
from prfaas_sandbox.state import ClusterFolder, NamespaceMessage, SandboxPlan, StateFolder
from prfaas_sandbox.tools import Tools

API_PORT = 6443
ETCD_PORTS = (2379, 2380)
READY_TIMEOUT_SECONDS = 30.0
CHECK_SECONDS = 0.5
PROMETHEUS_USER = "prometheus"


def main() -> None:
    """Run the cluster until one of its programs ends; report the reason to the host."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    state, name = StateFolder(Path(sys.argv[1])), sys.argv[2]
    network = next(each for each in CLUSTERS if each.name == name)
    tools = Tools({key: Path(value) for key, value in SandboxPlan.read(state.plan).tools.items()})
    try:
        asyncio.run(run(network, state.cluster(name), tools))
    except* (PeerError, OSError) as group:
        NamespaceMessage(name, "failed", "; ".join(str(error) for error in group.exceptions)).send()
        sys.exit(1)


async def run(network: ClusterNetwork, folder: ClusterFolder, tools: Tools) -> None:
    """Run one cluster. It ends only by an exception."""
    placement = Placement(network.address, network.address, network.service_prefix, API_PORT, ETCD_PORTS)
    async with ControlPlane.start(network.name, tools, folder.run / "plane", placement, logs=folder.logs) as plane:
        plane.user("admin", ADMIN_GROUP).write(folder.internal_kubeconfig)
        NamespaceMessage(network.name, "progress", "control plane ready").send()
        folders = Folders(folder.run / "pods", folder.logs / "pods")
        async with (
            NodeAgent.start(plane, network, folders) as agent,
            serve_connections(folder.forward),
            _serve_control(folder.control, agent),
            connect(plane.user("admin", ADMIN_GROUP)) as api,
        ):
            await _admit_prometheus(api)
            plane.user(PROMETHEUS_USER).write(folder.prometheus_kubeconfig)
            await _wait_for_node(api, agent.name)
            NamespaceMessage(network.name, "ready").send()
            while True:
                plane.check_running()
                await asyncio.sleep(CHECK_SECONDS)


async def _admit_prometheus(api: KubeSession) -> None:
    """Let Prometheus read pods, and nothing else."""
    body = {
        "metadata": {"name": PROMETHEUS_USER},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": PROMETHEUS_USER}],
    }
    await api.call("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", body=body)


async def _wait_for_node(api: KubeSession, name: str) -> None:
    """Wait until the controllers have removed a new node's taint, so that pods can be bound to it."""
    async with asyncio.timeout(READY_TIMEOUT_SECONDS):
        async for change in follow(api, "/api/v1/nodes", {"fieldSelector": f"metadata.name={name}"}):
            nodes = [change.object] if isinstance(change, WatchEvent) else change
            if any(not node["spec"].get("taints") for node in nodes):
                return


@asynccontextmanager
async def _serve_control(socket: Path, agent: NodeAgent) -> AsyncIterator[None]:
    """Serve the host's requests to the node: POST /pods/NAMESPACE/NAME/kill."""

    async def kill(request: web.Request) -> web.Response:
        found = agent.kill_pod(request.match_info["namespace"], request.match_info["name"])
        if not found:
            text = f"the {agent.name} runs no pod {request.match_info['namespace']}/{request.match_info['name']}"
            return web.json_response({"error": text}, status=404)
        return web.json_response({})

    application = web.Application()
    application.router.add_post("/pods/{namespace}/{name}/kill", kill)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(socket)).start()
        yield
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    main()
