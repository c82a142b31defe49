"""Docker as this package uses it: its own command-line client, and what is wrong when that does not work."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from prfaas.errors import ConfigError, PeerError
from prfaas_sandbox.commands import Command, run

INSTALL_ADVICE = (
    "install it (on Debian `apt-get install docker.io debootstrap`, elsewhere see docs.docker.com), or use the "
    "sandbox, which needs none: `make demo`"
)
START_ADVICE = "start it (`systemctl start docker`, or as root without systemd `dockerd` in another terminal)"
QUICK_SECONDS = 60.0


async def docker(*arguments: str | Path, stdin: bytes | None = None, timeout_seconds: float = QUICK_SECONDS) -> str:
    """Run the docker client and return what it prints; raise PeerError with its message when it fails."""
    return (await run(Command(["docker", *arguments], timeout_seconds=timeout_seconds), stdin)).strip()


async def succeeds(*arguments: str) -> bool:
    """Return whether a docker command ends with 0."""
    try:
        await docker(*arguments)
    except PeerError:
        return False
    return True


async def has_image(reference: str) -> bool:
    """Return whether Docker has an image here."""
    return await succeeds("image", "inspect", reference)


async def daemon_answers() -> bool:
    """Return whether a daemon answers us.

    Raises:
        ConfigError: there is no client, or the daemon does not let us in.

    """
    if shutil.which("docker") is None:
        raise ConfigError(f"Docker is not installed: {INSTALL_ADVICE}")
    try:
        await docker("version", "--format", "{{.Server.Version}}")
    except PeerError as error:
        if "permission denied" in str(error).lower():
            raise ConfigError("Docker's socket is closed to you: become root, or join the group `docker`") from error
        return False
    return True


async def free_bytes() -> int | None:
    """Return the free space of Docker's disk; None where the daemon does not run on this machine's files."""
    root = Path(json.loads(await docker("info", "--format", "{{json .DockerRootDir}}")))
    return shutil.disk_usage(root).free if root.is_dir() else None


async def inspect(template: str, *names: str) -> list[str]:
    """Return a line for each of some objects, in the form of a template."""
    return (await docker("inspect", "--format", template, *names)).splitlines()


async def remove_all(kind: Sequence[str], label: str) -> None:
    """Remove every object that has a label; `kind` is (listing, removing), for example ("ps -aq", "rm -f")."""
    listing, removing = kind
    if found := (await docker(*listing.split(), "--filter", f"label={label}")).split():
        await docker(*removing.split(), *found)
