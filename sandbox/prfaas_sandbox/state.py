"""The state folder of a sandbox: the one place where host and inside meet.

lock                    held by the process that runs the sandbox; holds its pid
plan.json               what the host asks the inside to do
sandbox.json            where everything is, once it is ready
link.sock               changes the link
logs/                   everybody's logs, also after the end
hub/, member/           kubeconfig (for the host), internal.kubeconfig, relay.sock, control.sock
run/                    a tmpfs that only the inside sees: keys, Secrets, etcd, container roots
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prfaas.errors import ConfigError

# sockaddr_un holds 108 bytes with the final zero.
LONGEST_SOCKET_PATH = 107


@dataclass(frozen=True)
class ClusterFolder:
    """The part of the state folder that belongs to one cluster."""

    root: Path
    name: str

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig for use on the host."""
        return self.root / self.name / "kubeconfig"

    @property
    def internal_kubeconfig(self) -> Path:
        """The administrator's kubeconfig with the server's address inside."""
        return self.root / self.name / "internal.kubeconfig"

    @property
    def relay(self) -> Path:
        """Socket that connects to any address inside, see `prfaas_sandbox.relay`."""
        return self.root / self.name / "relay.sock"

    @property
    def control(self) -> Path:
        """Socket of the cluster's control API."""
        return self.root / self.name / "control.sock"

    @property
    def logs(self) -> Path:
        """Logs of the control plane's programs, and of containers in pods/."""
        return self.root / "logs" / self.name

    @property
    def run(self) -> Path:
        """The cluster's part of the tmpfs."""
        return self.root / "run" / self.name

    @property
    def prometheus_kubeconfig(self) -> Path:
        """What Prometheus uses; it appears when the cluster is ready for it."""
        return self.run / "prometheus.kubeconfig"


@dataclass(frozen=True)
class StateFolder:
    """Paths below the state folder, which is absolute."""

    root: Path

    def cluster(self, name: str) -> ClusterFolder:
        """Return the part of a cluster, hub or member."""
        return ClusterFolder(self.root, name)

    @property
    def plan(self) -> Path:
        """What the host asks the inside to do."""
        return self.root / "plan.json"

    @property
    def description(self) -> Path:
        """Where everything is, once the sandbox is ready."""
        return self.root / "sandbox.json"

    @property
    def link(self) -> Path:
        """Socket that changes the link."""
        return self.root / "link.sock"

    @property
    def logs(self) -> Path:
        """Logs of everybody."""
        return self.root / "logs"

    @property
    def run(self) -> Path:
        """The tmpfs of the inside."""
        return self.root / "run"

    def namespace(self, cluster: str) -> Path:
        """Return the file at which the inside keeps a cluster's network namespace."""
        return self.run / f"{cluster}.net"

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Own the folder, emptied, as long as the context lasts.

        Raises:
            ConfigError: another sandbox runs in it, it holds something else, or its path is too long for sockets.

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
        """Return the pid of the process that runs the sandbox here, None when there is none."""
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
            raise ConfigError(f"{self.root} is no state folder of a sandbox and not empty: choose another one")

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
