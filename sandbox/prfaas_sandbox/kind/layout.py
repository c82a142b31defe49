"""Names and folders of one pair of kind clusters. Pure."""

from dataclasses import dataclass
from pathlib import Path

from prfaas_sandbox.environment import ClusterAccess
from prfaas_sandbox.network import ClusterNetwork

OWNER_LABEL = "io.prfaas.kind"
API_PORT = 6443
GATEWAY_NODE_PORT = 30080
NODE_PORTS = (GATEWAY_NODE_PORT, 30081, 30082)
PROMETHEUS_NODE_PORT = 30090


@dataclass(frozen=True)
class KindCluster:
    """One of the two clusters.

    `name` is kind's name of it, `network` the addresses of its pods, `config` its file in kind-configs/. `kubeconfig`
    is the administrator's, for use on the host.
    """

    role: str
    name: str
    network: ClusterNetwork
    config: Path
    kubeconfig: Path

    @property
    def node(self) -> str:
        """Name of the container that is its only node."""
        return f"{self.name}-control-plane"

    def access(self, address: str) -> ClusterAccess:
        """Return the access by a node's address."""
        return ClusterAccess(self.role, self.kubeconfig, f"https://{address}:{API_PORT}")


class Layout:
    """One pair of clusters. Only this pair uses the folder `state`. `prefix` keeps the names of two pairs apart."""

    def __init__(self, repository: Path, state: Path, prefix: str = "prfaas"):
        self.repository = repository
        self.state = state
        self.tools = repository / "tools"  # what images are built from
        self.configs = repository / "kind-configs"
        self.logs = state / "logs"  # of builds and of our own Docker daemon
        self.images = state / "images"  # archives on their way into the nodes
        self.daemon_pid = state / "dockerd.pid"  # of the Docker daemon that we started, where we did
        self.network = f"{prefix}-kind"  # Docker's, of both nodes
        self.label = f"{OWNER_LABEL}={prefix}"  # of containers that only a build needs
        self.hub = self._cluster("hub", f"{prefix}-hub", ClusterNetwork("hub", "10.128", "10.96.0"))
        self.member = self._cluster("member", f"{prefix}-prefill", ClusterNetwork("member", "10.129", "10.97.0"))
        self.clusters = (self.hub, self.member)

    def _cluster(self, role: str, name: str, network: ClusterNetwork) -> KindCluster:
        file = name.rpartition("-")[2]
        return KindCluster(role, name, network, self.configs / f"{file}.yaml", self.state / f"{file}.kubeconfig")
