"""Docker's client, and its daemon: the running one, or our own if no other would be started.

Our daemon runs on after `prfaas kind up`, as the clusters do; `prfaas kind down` ends it. A root without
CAP_SYS_RESOURCE, as in some virtual machines, needs our daemon or one with its settings. Nodes are privileged
containers, and there only a runtime that asks for less can start them.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from prfaas.errors import ConfigError, PeerError
from prfaas.processes import tail
from prfaas.util import Deadline
from prfaas_sandbox.kind.layout import Layout
from prfaas_sandbox.processes import Command, run
from prfaas_sandbox.progress import OnProgress

INSTALL_ADVICE = (
    "install it (on Debian `apt-get install docker.io debootstrap`, elsewhere see docs.docker.com), or use the "
    "sandbox, which needs none: `make demo`"
)
START_ADVICE = "start it (`systemctl start docker`, or as root without systemd `dockerd` in another terminal)"
QUICK_SECONDS = 60.0
CAP_SYS_RESOURCE = 24
RUNTIME = "prfaas-runc"
START_TIMEOUT_SECONDS = 60.0
PIDFILE_SECONDS = 10.0  # dockerd writes it at once
STOP_TIMEOUT_SECONDS = 60.0
POLL_SECONDS = 0.2
SYSTEMD = Path("/run/systemd/system")


async def docker(*arguments: str | Path, stdin: bytes | None = None, timeout_seconds: float = QUICK_SECONDS) -> str:
    """Run the docker client and return its output; raise PeerError with its message if it fails."""
    return (await run(Command(["docker", *arguments], timeout_seconds=timeout_seconds), stdin)).strip()


async def succeeds(*arguments: str) -> bool:
    try:
        await docker(*arguments)
    except PeerError:
        return False
    return True


async def has_image(reference: str) -> bool:
    return await succeeds("image", "inspect", reference)


async def daemon_answers() -> bool:
    """Return whether a daemon answers; raise ConfigError if there is no client or the daemon denies access."""
    if shutil.which("docker") is None:
        raise ConfigError(f"Docker is not installed: {INSTALL_ADVICE}")
    try:
        await docker("version", "--format", "{{.Server.Version}}")
    except PeerError as error:
        if "permission denied" in str(error).lower():
            raise ConfigError("Docker's socket denies access: become root, or join the group `docker`") from error
        return False
    return True


async def free_bytes() -> int | None:
    """Return the free space of Docker's disk; None if the daemon uses other files than this machine's."""
    root = Path(json.loads(await docker("info", "--format", "{{json .DockerRootDir}}")))
    return shutil.disk_usage(root).free if root.is_dir() else None


async def inspect(template: str, *names: str) -> list[str]:
    """Return a line for each object, in the form of a template."""
    return (await docker("inspect", "--format", template, *names)).splitlines()


async def remove_all(kind: Sequence[str], label: str) -> None:
    """Remove every object with a label; `kind` is (listing, removing), for example ("ps -aq", "rm -f")."""
    listing, removing = kind
    if found := (await docker(*listing.split(), "--filter", f"label={label}")).split():
        await docker(*removing.split(), *found)


async def ensure_daemon(layout: Layout, report: OnProgress) -> None:
    """Return when a Docker daemon answers that can run kind's nodes.

    Raises ConfigError, with the cure, if Docker is missing or we may not start it; PeerError, with the log's end, if
    our daemon ends.
    """
    if not await daemon_answers():
        why = _not_ours_to_start()
        if why:
            raise ConfigError(f"Docker's daemon does not run: {START_ADVICE} ({why})")
        report("starting Docker's daemon, until `prfaas kind down`")
        await asyncio.to_thread(_start, layout)
    runtime = await docker("info", "--format", "{{.DefaultRuntime}}")
    if lacks_resource_capability() and runtime != RUNTIME:
        raise ConfigError(
            "Docker's daemon cannot run privileged containers here, because root lacks CAP_SYS_RESOURCE: end the "
            "daemon, and `make kind` starts one that can; or give yours the default runtime "
            f"{layout.tools}/kind/runc-without-resource under the name {RUNTIME}"
        )


def _not_ours_to_start() -> str:
    """Return the reason why we cannot start a daemon, empty if we can."""
    if os.geteuid() != 0:
        return "only root can"
    if SYSTEMD.exists():
        return "it is systemd's to start"
    return "" if shutil.which("dockerd") else "there is no dockerd on PATH, only Docker's client"


def lacks_resource_capability(status: str | None = None) -> bool:
    """Return whether we are root without CAP_SYS_RESOURCE; `status` is the text of /proc/self/status."""
    status = status or Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return os.geteuid() == 0 and not int(effective, 16) >> CAP_SYS_RESOURCE & 1


def _start(layout: Layout) -> None:
    # Nobody's child: neither Ctrl-C nor our end is the clusters' end.
    command: list[str | Path] = ["setsid", "--fork", "dockerd", "--pidfile", layout.daemon_pid]
    if lacks_resource_capability():
        wrapper = layout.tools / "kind" / "runc-without-resource"
        command += ["--add-runtime", f"{RUNTIME}={wrapper}", "--default-runtime", RUNTIME]
    path = layout.logs / "dockerd.log"
    with path.open("ab") as log:
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)
    started = time.monotonic()
    while not asyncio.run(daemon_answers()):
        seconds = time.monotonic() - started
        if seconds > START_TIMEOUT_SECONDS or (seconds > PIDFILE_SECONDS and our_daemon(layout) is None):
            stop_daemon(layout)
            raise PeerError(f"dockerd did not answer after {seconds:.0f} s; the end of its log:\n{tail(path)}")
        time.sleep(POLL_SECONDS)


def our_daemon(layout: Layout) -> int | None:
    """Return the process id of our running daemon, if there is one."""
    try:
        pid = int(layout.daemon_pid.read_text())
    except (OSError, ValueError):
        return None
    return pid if _is_daemon(pid) else None


def _is_daemon(pid: int) -> bool:
    """Return whether a process is a running dockerd; a zombie is not."""
    try:
        name, _, state = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(") ")
    except OSError:
        return False
    return name == "dockerd" and not state.startswith("Z")


def stop_daemon(layout: Layout) -> bool:
    """End our daemon, if there is one; return whether there was."""
    pid = our_daemon(layout)
    if pid is None:
        return False
    os.kill(pid, signal.SIGTERM)
    deadline = Deadline(STOP_TIMEOUT_SECONDS)
    while _is_daemon(pid):  # its file is gone before it is
        if deadline.is_over:
            raise PeerError(f"dockerd (process {pid}) did not end within {STOP_TIMEOUT_SECONDS:.0f} s of SIGTERM")
        time.sleep(POLL_SECONDS)
    return True
