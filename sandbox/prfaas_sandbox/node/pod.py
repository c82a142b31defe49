"""Runs one pod on the process node, from its binding to its removal."""

import asyncio
import logging
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from prfaas.errors import BadInputError, PeerError
from prfaas.kube import KubeSession, StatusError
from prfaas.kube.session import Object, encode_body
from prfaas.util import LogOnce
from prfaas_sandbox.network import ClusterNetwork, join_pod, leave_pod
from prfaas_sandbox.node.container import Container, ContainerContext, now_text
from prfaas_sandbox.node.images import SYSTEM_PATH, binds_everywhere, content
from prfaas_sandbox.node.process import Mount, ProcessSpec, program_folders, with_programs
from prfaas_sandbox.node.status import PodAddresses, is_done, pod_status
from prfaas_sandbox.node.variables import command_line, environment, field, sources
from prfaas_sandbox.node.volumes import PodVolumes, unsupported_volumes
from prfaas_sandbox.processes import Command, run

log = logging.getLogger(__name__)

FIELD_MANAGER = "process-node"
RETRY_SECONDS = 1.0
REFRESH_SECONDS = 4.0
NOT_FOUND, CONFLICT = 404, 409
DEFAULT_GRACE_SECONDS = 30


@dataclass(frozen=True)
class Node:
    """The common data of a node's pods.

    `folder` holds volumes and container roots and is removed with the node; `logs` stays.
    """

    name: str
    network: ClusterNetwork
    api_port: int
    api: KubeSession
    session: aiohttp.ClientSession
    folder: Path
    logs: Path

    @property
    def address(self) -> str:
        return self.network.address

    def environment(self, hostname: str) -> dict[str, str]:
        """Return the environment variables of every container."""
        # The containers' programs are those of our own virtual environment.
        return {
            "PATH": f"{sys.prefix}/bin:{SYSTEM_PATH}",
            "HOME": "/tmp",  # noqa: S108  # an image's user has a home; here every user has this one
            "HOSTNAME": hostname,
            # As on a node whose pods ask for no GPU: several workers share this machine, and each would take most of
            # one GPU's memory. A pod's own variable wins.
            "CUDA_VISIBLE_DEVICES": "",
            "KUBERNETES_SERVICE_HOST": self.address,
            "KUBERNETES_SERVICE_PORT": str(self.api_port),
        }


def unsupported(pod: Object) -> str:
    """Return the pod's features that the process node lacks, empty if there are none."""
    spec = pod["spec"]
    hooks = [each["name"] for each in spec["containers"] if "postStart" in each.get("lifecycle", {})]
    probes = [
        each["name"]
        for each in spec["containers"]
        if any("grpc" in each.get(f"{kind}Probe", {}) for kind in ("liveness", "readiness", "startup"))
    ]
    sidecars = [each["name"] for each in spec.get("initContainers", []) if "restartPolicy" in each]
    containers = [*spec["containers"], *spec.get("initContainers", [])]
    with_env_from = [each["name"] for each in containers if "envFrom" in each]
    wants = {
        "sidecars": sidecars,
        "volumes": unsupported_volumes(pod),
        "postStart hooks of": hooks,
        "gRPC probes of": probes,
        "envFrom of": with_env_from,
    }
    lacks = [f"{what} {', '.join(names)}" for what, names in wants.items() if names]
    return f"the process node does not offer: {'; '.join(lacks)}" if lacks else ""


class Pod:
    """A pod of this node; `run` returns when it is removed."""

    def __init__(self, pod: Object, node: Node, address: str):
        self.address = address
        self._pod = pod
        self._node = node
        self._stopping = asyncio.Event()
        self._vanished = False
        self._changed = asyncio.Event()
        self._sent: Object = {}
        metadata = pod["metadata"]
        self._path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        self._folder = node.folder / metadata["uid"]
        self._addresses = PodAddresses(address, node.address)
        self._volumes = PodVolumes(node.api, pod, self._folder / "volumes", (address, node.address))
        policy = pod["spec"].get("restartPolicy", "Always")
        once = "Never" if policy == "Never" else "OnFailure"
        self._containers = {
            spec["name"]: Container(spec, self._context(spec, policy)) for spec in pod["spec"]["containers"]
        }
        self._init_containers = {
            spec["name"]: Container(spec, self._context(spec, once)) for spec in pod["spec"].get("initContainers", [])
        }
        wants_network = any(binds_everywhere(spec.get("image", "")) for spec in pod["spec"]["containers"])
        self._network = self._folder / "network" if wants_network else None

    def _context(self, spec: Object, restart_policy: str) -> ContainerContext:
        metadata, pod_spec = self._pod["metadata"], self._pod["spec"]
        folder = f"{metadata['namespace']}_{metadata['name']}_{metadata['uid'][:8]}"
        return ContainerContext(
            restart_policy=restart_policy,
            grace_seconds=pod_spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_SECONDS),
            address=self.address,
            logs=self._node.logs / folder / spec["name"],
            session=self._node.session,
            prepare=self._prepare,
            changed=self._changed.set,
        )

    @property
    def name(self) -> tuple[str, str]:
        return self._pod["metadata"]["namespace"], self._pod["metadata"]["name"]

    def container(self, name: str) -> Container | None:
        return {**self._init_containers, **self._containers}.get(name)

    def observe(self, pod: Object) -> None:
        """Take a newer state of the pod object."""
        self._pod = self._volumes.pod = pod
        self._changed.set()
        if pod["metadata"].get("deletionTimestamp"):
            self._stopping.set()

    def vanish(self) -> None:
        """End everything at once: the pod object is deleted."""
        self._vanished = True
        self._stopping.set()

    def kill(self) -> None:
        """Kill all processes of the pod, as a crash would; its restart policy applies."""
        for container in self._containers.values():
            container.kill()

    async def run(self) -> None:
        """Run the pod until its object is deleted and all is cleaned up."""
        reporting = asyncio.create_task(self._report())
        working = asyncio.create_task(self._work())
        try:
            await self._stopping.wait()
            working.cancel()
            await asyncio.wait({working})
            grace = (
                0 if self._vanished else self._pod["metadata"].get("deletionGracePeriodSeconds", DEFAULT_GRACE_SECONDS)
            )
            everything = (*self._init_containers.values(), *self._containers.values())
            await asyncio.gather(*(container.stop(grace) for container in everything))
        finally:
            reporting.cancel()
            working.cancel()
        if not self._vanished:
            await self._finish()
        if self._network is not None:
            await self._change_network(leave_pod(self._network, self.address))
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _work(self) -> None:
        if lack := unsupported(self._pod):
            await self._wait_for("Unsupported", lack)
            return
        await self._write_volumes()
        if self._network is not None:
            await self._change_network(join_pod(self._network, self._node.network, self.address))
        refreshing = asyncio.create_task(self._refresh_volumes())
        try:
            if await self._initialized():
                await asyncio.gather(*(container.run() for container in self._containers.values()))
        except Exception:
            log.exception("pod %s/%s: the node agent failed", *self.name)
        finally:
            refreshing.cancel()

    async def _initialized(self) -> bool:
        """Run the init containers one after the other; return false if one failed for good."""
        for init_container in self._init_containers.values():
            for container in self._containers.values():
                container.wait_for("PodInitializing", "")
            await init_container.run()
            if not is_done(init_container.facts):
                return False
        return True

    async def _change_network(self, commands: list[list[str]]) -> None:
        for command in commands:
            try:
                await run(Command(command))
            except PeerError as error:
                log.warning("pod %s/%s: its network: %s", *self.name, error)

    async def _write_volumes(self) -> None:
        """Write all volumes; report missing sources in the containers' status and in an Event."""
        once = LogOnce(log)
        while True:
            try:
                return await self._volumes.write()
            except (BadInputError, PeerError, OSError) as error:
                if once.failed("volumes", "pod {}/{}: {}".format(*self.name, error)):
                    await self._wait_for("CreateContainerConfigError", str(error))
                await asyncio.sleep(RETRY_SECONDS)

    async def _wait_for(self, reason: str, message: str) -> None:
        for container in self._containers.values():
            container.wait_for(reason, message)
        metadata = self._pod["metadata"]
        event = {
            "metadata": {"generateName": f"{metadata['name']}-", "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "type": "Warning",
            "reason": reason,
            "message": message[:1024],
            "source": {"component": FIELD_MANAGER, "host": self._node.name},
            "firstTimestamp": now_text(),
            "lastTimestamp": now_text(),
            "count": 1,
        }
        try:
            await self._node.api.call("POST", f"/api/v1/namespaces/{metadata['namespace']}/events", body=event)
        except PeerError as error:
            log.warning("pod %s/%s: %s (event not recorded: %s)", *self.name, message, error)

    async def _refresh_volumes(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                await self._volumes.write()
            except (BadInputError, PeerError, OSError) as error:
                log.warning("pod %s/%s: volumes stay as they are: %s", *self.name, error)

    async def _prepare(self, spec: Object) -> ProcessSpec:
        """Return the process of a container, from the present objects that it refers to."""
        data = await self._volumes.data(sources(spec))
        addresses = (self.address, self._node.address)
        image = content(spec.get("image", ""), self._node.folder)
        base = self._node.environment(self._pod["metadata"]["name"]) | dict(image.env)
        env = environment(spec, base, data, lambda path: field(self._pod, path, addresses))
        volumes = [self._mount(mount) for mount in spec.get("volumeMounts", [])]
        mounts = with_programs([*image.mounts, *volumes], program_folders() | image.folders)
        argv, scratch = command_line(spec, env), self._folder / "roots" / spec["name"]
        network = str(self._network) if self._network is not None else ""
        return ProcessSpec(argv, env, spec.get("workingDir") or "/", mounts, str(scratch), network)

    def _mount(self, mount: Object) -> Mount:
        source = self._volumes.folder / mount["name"]
        if sub_path := mount.get("subPath"):
            source = source / sub_path
            if not source.exists():  # as the kubelet does: a new folder
                source.mkdir(parents=True)
        return Mount(mount["mountPath"].rstrip("/") or "/", str(source), mount.get("readOnly", False))

    async def _report(self) -> None:
        """Update the status after every change."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._send_status()
            except PeerError as error:
                if isinstance(error, StatusError) and error.status in (NOT_FOUND, CONFLICT):
                    continue  # the object is gone or another one has its name: the watch will tell
                log.warning("pod %s/%s: status not written, trying again: %s", *self.name, error)
                self._changed.set()
                await asyncio.sleep(RETRY_SECONDS)

    async def _send_status(self) -> None:
        facts = [container.facts for container in self._containers.values()]
        init = [container.facts for container in self._init_containers.values()]
        status = pod_status(self._pod, facts, self._addresses, now_text(), init)
        if status == self._sent:
            return
        # The uid keeps us from writing to another pod of the same name.
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"uid": self._pod["metadata"]["uid"]}, "status": status}
        path, query = f"{self._path}/status", {"fieldManager": FIELD_MANAGER, "force": "true"}
        self._pod = await self._node.api.call("PATCH", path, query=query, body=encode_body(body))
        self._sent = status

    async def _finish(self) -> None:
        """Report the containers' ends and release the pod object."""
        with suppress(PeerError):
            await self._send_status()
        precondition = {"uid": self._pod["metadata"]["uid"]}
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0, "preconditions": precondition}
        while not self._vanished:
            try:
                await self._node.api.call("DELETE", self._path, body=options)
            except StatusError as error:
                log.info("pod %s/%s: %s", *self.name, error)
                return
            except PeerError:
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return
