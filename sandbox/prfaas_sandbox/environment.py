"""What the sandbox and kind have in common: two clusters, a link between them, and ways in.

Whatever installs prfaas or tests it whole takes an environment, and does not know which of the two it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from prfaas_sandbox.processes import Command, run


@dataclass(frozen=True)
class ClusterAccess:
    """How to reach one cluster.

    Args:
        name: hub or member.
        kubeconfig: the administrator's, for use on the host, everything inline.
        internal_server: URL of the API server for use inside, also from the other cluster.

    """

    name: str
    kubeconfig: Path
    internal_server: str


@dataclass(frozen=True)
class Images:
    """The images that pods of prfaas run.

    Args:
        operator, gateway, worker: references, each with a tag.

    """

    operator: str
    gateway: str
    worker: str


class Environment(Protocol):
    """Two clusters that run.

    Attributes:
        command: the subcommand of `prfaas` that changes this environment.
        hub, member: the clusters.
        images: what pods run; None where pods are processes of this checkout.
        prometheus_url: for the host.

    """

    command: str
    hub: ClusterAccess
    member: ClusterAccess
    images: Images | None
    prometheus_url: str

    async def kubectl(self, cluster: ClusterAccess, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl against a cluster and return what it prints; raise PeerError with its message when it fails."""
        ...

    async def helm(self, cluster: ClusterAccess, *arguments: str) -> str:
        """Run Helm against a cluster and return what it prints; raise PeerError with its message when it fails."""
        ...

    async def forward(self, cluster: ClusterAccess, namespace: str, service: str, port: int | str) -> str:
        """Return a URL on 127.0.0.1 for a port of a Service; each connection goes to a pod that is ready then."""
        ...

    async def shape_link(self, mbps: float) -> None:
        """Change the rate of the link, both ways; connections stay."""
        ...

    async def cut_link(self) -> None:
        """Let nothing cross the link, and no connection notice by itself; again is harmless."""
        ...

    async def heal_link(self) -> None:
        """Undo `cut_link`; again is harmless."""
        ...

    async def kill_pod(self, cluster: ClusterAccess, namespace: str, pod: str) -> None:
        """Kill all processes of a pod with SIGKILL; the node then restarts its containers, as after any crash."""
        ...

    def program(self, name: str) -> str:
        """Return what a person types to run one of our programs: its name where PATH has it, else its path."""
        ...


async def run_in(
    program: str | Path, cluster: ClusterAccess, arguments: Sequence[str], stdin: str | None = None
) -> str:
    """Run kubectl or Helm against a cluster, as `Environment` says."""
    shown = f"{Path(program).name} {' '.join(arguments)} ({cluster.name})"
    command = Command([program, *arguments], shown, {"KUBECONFIG": str(cluster.kubeconfig)})
    return await run(command, None if stdin is None else stdin.encode())
