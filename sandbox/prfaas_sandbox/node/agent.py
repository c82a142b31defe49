"""The node agent: registers the process node, keeps its Lease, runs the pods bound to it, and serves `kubectl logs`."""

import asyncio
import logging
import os
import platform
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Self

import aiohttp
from aiohttp import web

from prfaas.errors import PeerError
from prfaas.kube.session import Object, encode_body
from prfaas.kube.watch import DELETED, WatchEvent, follow
from prfaas_sandbox.api import connect
from prfaas_sandbox.controlplane import ControlPlane
from prfaas_sandbox.credentials import write_pair
from prfaas_sandbox.network import ClusterNetwork
from prfaas_sandbox.node.container import Container, now_text
from prfaas_sandbox.node.pod import Node, Pod

log = logging.getLogger(__name__)
LEASE_SECONDS = 40
RENEW_SECONDS = 10.0
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
# Nothing here enforces requests, so the node offers more than anybody asks for: no placement depends on the machine.
CAPACITY = {"cpu": "1000", "memory": "1000Gi", "ephemeral-storage": "1000Gi", "pods": "1000"}
PORT = 10250
POLL_SECONDS = 0.1
CHUNK_BYTES = 64 * 1024
API_SERVER_USER = "kube-apiserver-kubelet"
# Lines carry no time of their own here, so what selects or shows by time cannot be offered.
UNSUPPORTED = ("timestamps", "sinceSeconds", "sinceTime", "limitBytes")
Find = Callable[[str, str, str], Container | None]


@dataclass(frozen=True)
class Folders:
    """The agent's folders: volumes and container roots, and logs of containers."""

    run: Path
    logs: Path


class NodeAgent:
    """The agent of one cluster's only node; get one from `start`."""

    def __init__(self, node: Node, network: ClusterNetwork):
        self._node = node
        self._network = network
        self._pods: dict[str, Pod] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._next_address = 0

    @classmethod
    @asynccontextmanager
    async def start(cls, plane: ControlPlane, network: ClusterNetwork, folders: Folders) -> AsyncIterator[Self]:
        """Register the node with `plane` and run its pods until the context ends.

        If the agent fails, the context's task is cancelled, with the error as the cause.
        """
        name = f"{network.name}-node"
        folders.run.mkdir(parents=True)
        user = plane.user(f"system:node:{name}", "system:nodes")
        # As the kubelet, probes look at the answer, not at certificates; and a probe must not find a stale connection.
        connector = aiohttp.TCPConnector(ssl=False, force_close=True, limit=0)
        async with connect(user) as api, aiohttp.ClientSession(connector=connector) as session:
            node = Node(name, network, plane.api_port, api, session, folders.run, folders.logs)
            agent = cls(node, network)
            async with (
                serve_logs(network.address, _server_tls(plane, network, folders.run), agent._find),
                asyncio.TaskGroup() as group,
            ):
                await agent._register()
                running = [group.create_task(agent._renew_lease()), group.create_task(agent._follow_pods())]
                try:
                    yield agent
                finally:
                    for task in (*running, *agent._tasks.values()):
                        task.cancel()

    @property
    def name(self) -> str:
        return self._node.name

    def kill_pod(self, namespace: str, name: str) -> bool:
        """Kill all processes of a pod; return whether the node runs it."""
        pod = self._pod(namespace, name)
        if pod is None:
            return False
        pod.kill()
        return True

    def _pod(self, namespace: str, name: str) -> Pod | None:
        return next((pod for pod in self._pods.values() if pod.name == (namespace, name)), None)

    def _find(self, namespace: str, pod: str, container: str) -> Container | None:
        found = self._pod(namespace, pod)
        return found.container(container) if found else None

    async def _register(self) -> None:
        labels = {
            "kubernetes.io/hostname": self._node.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": _architecture(),
        }
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self._node.name, "labels": labels}}
        await self._node.api.call("POST", "/api/v1/nodes", body=body)
        await self._lease()
        path, status = f"/api/v1/nodes/{self._node.name}/status", {"status": _node_status(self._node.address)}
        await self._node.api.call("PATCH", path, body=status)

    async def _renew_lease(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                await self._lease()
            except PeerError as error:
                log.warning("the node's lease was not renewed: %s", error)

    async def _lease(self) -> None:
        renewed = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": self._node.name, "leaseDurationSeconds": LEASE_SECONDS, "renewTime": renewed}
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._node.name},
            "spec": spec,
        }
        path, query = f"{LEASES}/{self._node.name}", {"fieldManager": "process-node", "force": "true"}
        await self._node.api.call("PATCH", path, query=query, body=encode_body(body))

    async def _follow_pods(self) -> None:
        chosen = {"fieldSelector": f"spec.nodeName={self._node.name}"}
        async for change in follow(self._node.api, "/api/v1/pods", chosen):
            if not isinstance(change, WatchEvent):
                for uid in self._pods.keys() - {item["metadata"]["uid"] for item in change}:
                    self._pods[uid].vanish()
                for item in change:
                    self._observe(item)
            elif change.type != DELETED:
                self._observe(change.object)
            elif pod := self._pods.get(change.object["metadata"]["uid"]):
                pod.vanish()

    def _observe(self, item: Object) -> None:
        uid = item["metadata"]["uid"]
        if pod := self._pods.get(uid):
            pod.observe(item)
            return
        pod = self._pods[uid] = Pod(item, self._node, self._free_address())
        self._tasks[uid] = asyncio.create_task(self._run(uid, pod))
        pod.observe(item)

    async def _run(self, uid: str, pod: Pod) -> None:
        try:
            await pod.run()
        except Exception:
            log.exception("pod %s/%s: the node agent failed", *pod.name)
        finally:
            del self._pods[uid], self._tasks[uid]

    def _free_address(self) -> str:
        """Return the unused address that was free longest."""
        taken = {pod.address for pod in self._pods.values()}
        while True:
            address = self._network.pod_address(self._next_address)
            self._next_address += 1
            if address not in taken:
                return address


def _server_tls(plane: ControlPlane, network: ClusterNetwork, folder: Path) -> ssl.SSLContext:
    """Return a context with the node's certificate that requires client certificates of the cluster's CA."""
    pair = plane.authority.server(f"{network.name}-node", [network.address])
    certificate, key = write_pair(pair, folder, "node")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cadata=plane.authority.certificate.decode())
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificate, key)
    return context


def _architecture() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def _node_status(address: str) -> Object:
    now = now_text()
    pressure = {f"{kind}Pressure": "False" for kind in ("Memory", "Disk", "PID")}
    conditions = [
        {
            "type": kind,
            "status": status,
            "reason": "ProcessNode",
            "message": "containers run as local processes",
            "lastHeartbeatTime": now,
            "lastTransitionTime": now,
        }
        for kind, status in {**pressure, "Ready": "True"}.items()
    ]
    info = {
        "kubeletVersion": "process-node",
        "containerRuntimeVersion": "process://1",
        "kernelVersion": os.uname().release,
        "osImage": "the host's",
        "operatingSystem": "linux",
        "architecture": _architecture(),
        "machineID": "",
        "systemUUID": "",
        "bootID": "",
        "kubeProxyVersion": "",
    }
    # No Hostname address: the API server would try it first, and nothing here resolves it.
    addresses = [{"type": "InternalIP", "address": address}]
    endpoints = {"kubeletEndpoint": {"Port": PORT}}
    sizes = {"capacity": CAPACITY, "allocatable": CAPACITY}
    return {**sizes, "addresses": addresses, "conditions": conditions, "nodeInfo": info, "daemonEndpoints": endpoints}


@asynccontextmanager
async def serve_logs(address: str, tls: ssl.SSLContext, find: Find) -> AsyncIterator[None]:
    """Serve logs at `address`; `find` takes namespace, pod and container. `tls` must require client certificates."""

    async def handle(request: web.Request) -> web.StreamResponse:
        _authorise(request)
        where = request.match_info
        container = find(where["namespace"], where["pod"], where["container"])
        if container is None:
            raise web.HTTPNotFound(text=f"this node runs no container {where['container']} of pod {where['pod']}")
        return await _send(request, container)

    application = web.Application()
    application.router.add_get("/containerLogs/{namespace}/{pod}/{container}", handle)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, address, PORT, ssl_context=tls, shutdown_timeout=0).start()
        yield
    finally:
        await runner.cleanup()


def _authorise(request: web.Request) -> None:
    """Refuse every user but the API server; TLS has checked the certificate's CA."""
    certificate = request.get_extra_info("peercert") or {}
    names = {value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"}
    if names != {API_SERVER_USER}:
        raise web.HTTPForbidden(text="only the API server may read logs here")


async def _send(request: web.Request, container: Container) -> web.StreamResponse:
    query = request.query
    if unsupported := [name for name in UNSUPPORTED if query.get(name) not in (None, "false")]:
        raise web.HTTPBadRequest(text=f"the process node cannot select logs by {', '.join(unsupported)}")
    path = container.log_file(previous=query.get("previous") == "true")
    if not path.is_file():
        raise web.HTTPNotFound(
            text=f"there is no such log yet: container {request.match_info['container']} has not run"
        )
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    await response.prepare(request)
    with path.open("rb") as file:
        if "tailLines" in query:
            file.seek(tail_offset(file, int(query["tailLines"])))
        follow = query.get("follow") == "true"
        async for chunk in _chunks(file, lambda: follow and container.running and _is_current(container, path)):
            await response.write(chunk)
    return response


def _is_current(container: Container, path: Path) -> bool:
    return container.log_file(previous=False) == path


async def _chunks(file: BinaryIO, may_grow: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Yield the file's content, and additions while `may_grow()`."""
    while True:
        more = may_grow()  # asked before reading, so that the last words are not missed
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
        if not more:
            return
        await asyncio.sleep(POLL_SECONDS)


def tail_offset(file: BinaryIO, lines: int) -> int:
    """Read a file to its end, and return where its last `lines` lines begin."""
    last = deque(file, maxlen=lines)
    return file.tell() - sum(map(len, last))
