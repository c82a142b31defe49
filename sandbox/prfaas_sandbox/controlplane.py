"""One Kubernetes control plane as child processes: etcd, API server, controller manager, scheduler.

They are the real programs with the real admission, RBAC, node authorisation and controllers. Only the kubelet is
replaced (see `prfaas_sandbox.node`). One folder holds all their data. No data survives a restart, on purpose: etcd does
not sync its files, and each start makes a new CA.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from prfaas.errors import PeerError, UnreachableError
from prfaas.kube import KubeSession
from prfaas.ports import free_ports
from prfaas.processes import ChildProcess
from prfaas.util import replace_file
from prfaas_sandbox.api import connect
from prfaas_sandbox.credentials import ClusterAuthority, Kubeconfig, service_account_key, write_pair
from prfaas_sandbox.tools import Tools

log = logging.getLogger(__name__)

READY_TIMEOUT_SECONDS = 90.0
POLL_SECONDS = 0.1
CLIENT_GRACE_SECONDS = 3.0
# The API server drains watches for up to a minute on SIGTERM; nothing here is worth that wait.
API_SERVER_GRACE_SECONDS = 0.5
LOOPBACK = "127.0.0.1"
# EndpointSlices refuse loopback addresses, so a control plane on loopback advertises one that is nobody's (RFC 5737).
NOBODYS_ADDRESS = "192.0.2.1"
ADMIN_GROUP = "system:masters"


@dataclass(frozen=True)
class Placement:
    """The addresses of a control plane.

    `advertised` is in the Endpoints of the Service `kubernetes`, and no loopback address. `service_prefix` is the first
    three octets of the /24 for cluster IPs. `etcd_ports` are loopback ports for clients and for peers.
    """

    address: str
    advertised: str
    service_prefix: str
    api_port: int
    etcd_ports: tuple[int, int]

    @classmethod
    def on_loopback(cls) -> Self:
        api, client, peer = free_ports(3)
        return cls(LOOPBACK, NOBODYS_ADDRESS, "10.96.0", api, (client, peer))

    @property
    def server(self) -> str:
        return f"https://{self.address}:{self.api_port}"

    @property
    def etcd_url(self) -> str:
        return f"https://{LOOPBACK}:{self.etcd_ports[0]}"

    def server_names(self) -> list[str]:
        """Return every name by which clients may reach the API server."""
        cluster_names = [
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
            "kubernetes.default.svc.cluster.local",
        ]
        return [LOOPBACK, self.address, f"{self.service_prefix}.1", "localhost", *cluster_names]


class ControlPlane:
    """A control plane that is up, with its CA as `authority`; get one from `ControlPlane.start`."""

    def __init__(self, name: str, folder: Path, placement: Placement, logs: Path):
        self.name = name
        self.server = placement.server
        self.api_port = placement.api_port
        self.authority = ClusterAuthority(f"{name}-ca")
        self._folder = folder
        self._placement = placement
        self._pki = folder / "pki"
        self._logs = logs
        self._children: list[ChildProcess] = []
        for each in (self._pki, self._logs):
            each.mkdir(parents=True, exist_ok=True)
        self.kubeconfig = self.user("admin", ADMIN_GROUP).write(folder / "kubeconfig")

    @classmethod
    @contextlib.asynccontextmanager
    async def start(
        cls,
        name: str,
        tools: Tools,
        folder: Path,
        placement: Placement | None = None,
        *,
        logs: Path | None = None,
        scheduler: bool = True,
    ) -> AsyncIterator[Self]:
        """Start a control plane in the empty folder `folder`, and end it with the block.

        `placement` is free loopback ports by default, `logs` the folder's logs/. `scheduler` says whether to bind pods
        to nodes. Raises PeerError if a program ends, UnreachableError if it is not ready in time.
        """
        plane = cls(name, folder, placement or Placement.on_loopback(), logs or folder / "logs")
        try:
            plane._start_servers(tools)
            await plane._wait_for("/readyz")
            plane._start_clients(tools, scheduler=scheduler)
            await plane._wait_for("/api/v1/namespaces/default/serviceaccounts/default")
            yield plane
        finally:
            await plane._stop()

    def user(self, name: str, *groups: str) -> Kubeconfig:
        """Return a kubeconfig for use inside, with a new client certificate of user `name` in `groups`."""
        return Kubeconfig(self.name, self.server, self.authority.certificate, self.authority.client(name, *groups))

    def check_running(self) -> None:
        """Raise PeerError with the end of its log if one of the programs has ended."""
        for child in self._children:
            child.check_running()

    def _start_servers(self, tools: Tools) -> None:
        (self._pki / "ca.crt").write_bytes(self.authority.certificate)
        private, public = service_account_key()
        replace_file(self._pki / "service-account.key", private, 0o600)
        (self._pki / "service-account.pub").write_bytes(public)
        self._child("etcd", tools, self._etcd_flags())
        self._child("kube-apiserver", tools, self._api_server_flags())

    def _start_clients(self, tools: Tools, *, scheduler: bool) -> None:
        """Start the programs that need the built-in roles: a refusal would cost them seconds of back-off."""
        self._child("kube-controller-manager", tools, self._controller_manager_flags())
        if scheduler:
            kubeconfig = self.user("system:kube-scheduler").write(self._folder / "scheduler.kubeconfig")
            self._child("kube-scheduler", tools, _client_flags(kubeconfig))

    def _child(self, name: str, tools: Tools, flags: dict[str, object]) -> None:
        command = [tools[name], *(f"--{flag}={value}" for flag, value in flags.items())]
        self._children.append(ChildProcess(f"{self.name}'s {name}", command, self._logs / f"{name}.log"))

    def _etcd_flags(self) -> dict[str, object]:
        certificate, key = write_pair(self.authority.server("etcd", [LOOPBACK]), self._pki, "etcd")
        authority = self._pki / "ca.crt"
        peer = f"https://{LOOPBACK}:{self._placement.etcd_ports[1]}"
        return {
            "data-dir": self._folder / "etcd",
            "listen-client-urls": self._placement.etcd_url,
            "advertise-client-urls": self._placement.etcd_url,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            "client-cert-auth": "true",
            "trusted-ca-file": authority,
            "cert-file": certificate,
            "key-file": key,
            "peer-client-cert-auth": "true",
            "peer-trusted-ca-file": authority,
            "peer-cert-file": certificate,
            "peer-key-file": key,
            "unsafe-no-fsync": "true",
            "log-level": "warn",
        }

    def _api_server_flags(self) -> dict[str, object]:
        placement, pki = self._placement, self._pki
        certificate, key = write_pair(
            self.authority.server("kube-apiserver", placement.server_names()), pki, "apiserver"
        )
        etcd_certificate, etcd_key = write_pair(self.authority.client("apiserver"), pki, "apiserver-etcd")
        node_client = self.authority.client("kube-apiserver-kubelet", ADMIN_GROUP)
        node_certificate, node_key = write_pair(node_client, pki, "apiserver-node")
        return {
            "bind-address": placement.address,
            "advertise-address": placement.advertised,
            "secure-port": placement.api_port,
            "service-cluster-ip-range": f"{placement.service_prefix}.0/24",
            "client-ca-file": pki / "ca.crt",
            "tls-cert-file": certificate,
            "tls-private-key-file": key,
            "etcd-servers": placement.etcd_url,
            "etcd-cafile": pki / "ca.crt",
            "etcd-certfile": etcd_certificate,
            "etcd-keyfile": etcd_key,
            "kubelet-certificate-authority": pki / "ca.crt",
            "kubelet-client-certificate": node_certificate,
            "kubelet-client-key": node_key,
            "kubelet-preferred-address-types": "InternalIP",
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-key-file": pki / "service-account.pub",
            "service-account-signing-key-file": pki / "service-account.key",
            "authorization-mode": "Node,RBAC",
            "enable-admission-plugins": "NodeRestriction",
            "allow-privileged": "true",
            "profiling": "false",
        }

    def _controller_manager_flags(self) -> dict[str, object]:
        kubeconfig = self.user("system:kube-controller-manager").write(self._folder / "controller-manager.kubeconfig")
        return _client_flags(kubeconfig) | {
            "root-ca-file": self._pki / "ca.crt",
            "service-account-private-key-file": self._pki / "service-account.key",
            # Each controller acts with its own role, as on any cluster; the shared user may do next to nothing.
            "use-service-account-credentials": "true",
        }

    async def _wait_for(self, path: str) -> None:
        """Wait until the API server answers `path`; stop when a program ends or time is up."""
        reason: PeerError | None = None
        async with connect(self.user("admin", ADMIN_GROUP)) as api:
            try:
                async with asyncio.timeout(READY_TIMEOUT_SECONDS):
                    while reason := await _failure(api, path):
                        self.check_running()
                        await asyncio.sleep(POLL_SECONDS)
            except TimeoutError as error:
                message = f"{self.name}'s control plane was not ready within {READY_TIMEOUT_SECONDS:.0f} s"
                raise UnreachableError(f"{message} (logs: {self._logs}): {reason}") from error

    async def _stop(self) -> None:
        """End clients before servers: the API server waits for its watches, etcd for none."""
        children = {child.name.rsplit(" ", 1)[1]: child for child in self._children}
        server, store = children.pop("kube-apiserver", None), children.pop("etcd", None)
        await asyncio.gather(*(asyncio.to_thread(child.stop, CLIENT_GRACE_SECONDS) for child in children.values()))
        for child in (server, store):
            if child is not None:
                await asyncio.to_thread(child.stop, API_SERVER_GRACE_SECONDS)


def _client_flags(kubeconfig: Path) -> dict[str, object]:
    """Return the flags of controller manager and scheduler: one replica, no listener, no client-side throttling."""
    return {
        "kubeconfig": kubeconfig,
        "leader-elect": "false",
        "secure-port": 0,
        "kube-api-qps": 200,
        "kube-api-burst": 400,
        "profiling": "false",
    }


async def _failure(api: KubeSession, path: str) -> PeerError | None:
    try:
        async with api.stream("GET", path):
            return None
    except PeerError as error:
        return error
