"""Where one pair of kind clusters keeps its things, and what they are called. Pure."""

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

    Args:
        role: hub or member.
        name: what kind calls it.
        network: its pods' addresses, as its file in kind-configs/ says.
        config: that file.
        kubeconfig: the administrator's, for use on the host.

    """

    role: str
    name: str
    network: ClusterNetwork
    config: Path
    kubeconfig: Path

    @property
    def node(self) -> str:
        """Name of the container that is its one node."""
        return f"{self.name}-control-plane"

    def access(self, address: str) -> ClusterAccess:
        """Return the ways in, for a node of an address."""
        return ClusterAccess(self.role, self.kubeconfig, f"https://{address}:{API_PORT}")


@dataclass(frozen=True)
class Layout:
    """One pair of clusters.

    Args:
        repository: the checkout.
        state: folder of kubeconfigs and logs; it belongs to this pair alone.
        prefix: of the names of clusters and network, so that two pairs can stand side by side.

    """

    repository: Path
    state: Path
    prefix: str = "prfaas"

    @property
    def hub(self) -> KindCluster:
        """The cluster that decodes."""
        return self._cluster("hub", "hub", ClusterNetwork("hub", "10.128", "10.96.0"))

    @property
    def member(self) -> KindCluster:
        """The other one."""
        return self._cluster("member", "prefill", ClusterNetwork("member", "10.129", "10.97.0"))

    @property
    def clusters(self) -> tuple[KindCluster, KindCluster]:
        """Both."""
        return self.hub, self.member

    @property
    def network(self) -> str:
        """Docker network of both nodes."""
        return f"{self.prefix}-kind"

    @property
    def label(self) -> str:
        """Label of containers that only a build needs."""
        return f"{OWNER_LABEL}={self.prefix}"

    @property
    def tools(self) -> Path:
        """What images are built from."""
        return self.repository / "tools"

    @property
    def configs(self) -> Path:
        """The clusters' files."""
        return self.repository / "kind-configs"

    @property
    def logs(self) -> Path:
        """Logs of builds and of our own Docker daemon."""
        return self.state / "logs"

    @property
    def images(self) -> Path:
        """Archives of images on their way into the nodes."""
        return self.state / "images"

    @property
    def daemon_pid(self) -> Path:
        """Process id of the Docker daemon that we started, where we did."""
        return self.state / "dockerd.pid"

    def _cluster(self, role: str, name: str, network: ClusterNetwork) -> KindCluster:
        config = self.configs / f"{name}.yaml"
        return KindCluster(role, f"{self.prefix}-{name}", network, config, self.state / f"{name}.kubeconfig")
