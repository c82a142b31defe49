"""The state folder of a sandbox, and what host and inside tell each other through it and through their pipe.

lock                    held by the process that runs the sandbox; holds its pid
plan.json               what the host asks the inside to do
sandbox.json            where everything is, once it is ready
link.sock               changes the link
logs/                   everybody's logs, also after the end
hub/, member/           kubeconfig (for the host), internal.kubeconfig, forward.sock, control.sock
run/                    a tmpfs that only the inside sees: keys, Secrets, etcd, container roots
"""

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from prfaas.errors import ConfigError
from prfaas.util import replace_file
from prfaas_sandbox.environment import ClusterAccess

# sockaddr_un holds 108 bytes with the final zero.
LONGEST_SOCKET_PATH = 107


class ClusterFolder:
    """The part of the state folder that belongs to one cluster, hub or member."""

    def __init__(self, root: Path, name: str):
        folder = root / name
        self.kubeconfig = folder / "kubeconfig"  # the administrator's, for use on the host
        self.internal_kubeconfig = folder / "internal.kubeconfig"  # with the server's address inside
        self.forward = folder / "forward.sock"  # connects to any address inside, see `prfaas_sandbox.forward`
        self.control = folder / "control.sock"  # kills pods
        self.logs = root / "logs" / name  # of the control plane's programs, and of containers in pods/
        self.run = root / "run" / name  # the cluster's part of the tmpfs
        self.prometheus_kubeconfig = self.run / "prometheus.kubeconfig"  # appears when the cluster is ready


class StateFolder:
    """Paths below the state folder, which is absolute."""

    def __init__(self, root: Path):
        self.root = root
        self.plan = root / "plan.json"
        self.description = root / "sandbox.json"
        self.link = root / "link.sock"
        self.logs = root / "logs"
        self.run = root / "run"

    def cluster(self, name: str) -> ClusterFolder:
        return ClusterFolder(self.root, name)

    def namespace(self, cluster: str) -> Path:
        """Return the file of a cluster's network namespace; only the inside sees it."""
        return self.run / f"{cluster}.net"

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Own the folder, emptied, while the context lasts.

        Raises ConfigError if another sandbox uses the folder, it holds other files, or sockets need a shorter path.
        """
        self._check()
        self.root.mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o700)
        with (self.root / "lock").open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                pid = self.owner()
                message = f"a sandbox runs in {self.root} already (process {pid}): stop it with `prfaas sandbox down`"
                raise ConfigError(message) from error
            self._empty()
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            try:
                yield
            finally:
                self.description.unlink(missing_ok=True)

    def owner(self) -> int | None:
        """Return the pid of the process that runs the sandbox here, None without one."""
        try:
            with (self.root / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return None
        except BlockingIOError:
            return int((self.root / "lock").read_text() or 0)
        return None

    def _check(self) -> None:
        socket = self.cluster("member").control
        if len(os.fsencode(socket)) > LONGEST_SOCKET_PATH:
            raise ConfigError(f"the state folder's path is too long for unix sockets ({socket}): choose a shorter one")
        if self.root.is_dir() and any(self.root.iterdir()) and not (self.root / "lock").exists():
            raise ConfigError(f"{self.root} is not empty and not a state folder of a sandbox: choose another one")

    def _empty(self) -> None:
        for path in self.root.iterdir():
            if path.name == "lock":
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        for folder in (self.run, *(self.root / name for name in ("hub", "member"))):
            folder.mkdir()
        for name in ("hub", "member"):
            self.cluster(name).logs.mkdir(parents=True)


@dataclass(frozen=True)
class NamespaceMessage:
    """A message from a process inside to the host: one JSON object a line, on the common standard output.

    `process` is hub, member or sandbox; `kind` is `progress`, `ready` or `failed`.
    """

    process: str
    kind: str
    text: str = ""

    def send(self) -> None:
        """Write the line at once. Lines of several processes do not mix, because a pipe takes small writes whole."""
        sys.stdout.write(json.dumps(asdict(self)) + "\n")
        sys.stdout.flush()

    @classmethod
    def parse(cls, line: bytes) -> Self:
        return cls(**json.loads(line))


@dataclass(frozen=True)
class SandboxPlan:
    """The host's request to the inside: paths of the programs by name, the link's first rate, and how often metrics
    are read."""

    tools: dict[str, str]
    link_mbps: float
    scrape_seconds: int

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls(**json.loads(path.read_text()))


@dataclass(frozen=True)
class Description:
    """Addresses of everything; kept in the state folder for other processes of the host.

    `prometheus_internal_url` is for pods of both clusters; `start_seconds` is the duration of the start.
    """

    hub: ClusterAccess
    member: ClusterAccess
    prometheus_url: str
    prometheus_internal_url: str
    start_seconds: float

    def write(self, path: Path) -> None:
        """Write the description atomically."""
        replace_file(path, (json.dumps(asdict(self), indent=2, default=str) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> Self:
        fields: dict[str, Any] = json.loads(path.read_text())
        for cluster in ("hub", "member"):
            fields[cluster] = ClusterAccess(**{**fields[cluster], "kubeconfig": Path(fields[cluster]["kubeconfig"])})
        return cls(**fields)
