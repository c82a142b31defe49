"""The common interface of the sandbox and kind: two clusters, a link between them, and access to both.

Code that installs or tests prfaas takes an environment and does not know which of the two it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from prfaas_sandbox.processes import Command, run


@dataclass(frozen=True)
class ClusterAccess:
    """Access to one cluster.

    `kubeconfig` is the administrator's, for use on the host, with everything inline. `internal_server` is the API
    server's URL inside, also from the other cluster.
    """

    name: str
    kubeconfig: Path
    internal_server: str


@dataclass(frozen=True)
class Images:
    """References of the images of prfaas's pods, each with a tag.

    Args:
        connector: with our connector for vLLM.
        vllm: with vLLM itself; empty if this environment has none.
    """

    operator: str
    gateway: str
    worker: str
    connector: str
    vllm: str = ""


class Environment(Protocol):
    """Two running clusters.

    `command` is the subcommand of `prfaas` that changes this environment. `images` is None if pods are processes of
    this checkout. `prometheus_url` is for the host.
    """

    command: str
    hub: ClusterAccess
    member: ClusterAccess
    images: Images | None
    prometheus_url: str

    async def kubectl(self, cluster: ClusterAccess, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl against a cluster and return its output; raise PeerError with its message if it fails."""
        ...

    async def helm(self, cluster: ClusterAccess, *arguments: str) -> str:
        """Run Helm against a cluster and return its output; raise PeerError with its message if it fails."""
        ...

    async def forward(self, cluster: ClusterAccess, namespace: str, service: str, port: int | str) -> str:
        """Return a URL on 127.0.0.1 for a port of a Service; each connection goes to a ready pod."""
        ...

    async def shape_link(self, mbps: float) -> None:
        """Change the rate of the link, both ways; connections stay."""
        ...

    async def cut_link(self) -> None:
        """Drop all traffic of the link silently; connections do not notice. Repeating is harmless."""
        ...

    async def restore_link(self) -> None:
        """Undo `cut_link`. Repeating is harmless."""
        ...

    async def kill_pod(self, cluster: ClusterAccess, namespace: str, pod: str) -> None:
        """Kill all processes of a pod with SIGKILL; the node restarts its containers, as after any crash."""
        ...

    def program(self, name: str) -> str:
        """Return the command line name of one of our programs: its name if PATH has it, else its path."""
        ...


async def run_in(
    program: str | Path, cluster: ClusterAccess, arguments: Sequence[str], stdin: str | None = None
) -> str:
    """Run kubectl or Helm against a cluster, as `Environment` does."""
    shown = f"{Path(program).name} {' '.join(arguments)} ({cluster.name})"
    command = Command([program, *arguments], shown, {"KUBECONFIG": str(cluster.kubeconfig)})
    return await run(command, None if stdin is None else stdin.encode())
