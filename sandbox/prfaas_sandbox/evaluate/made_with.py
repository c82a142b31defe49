"""With what a run is made: version and commit of prfaas, and the machine."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Final

_GIT_SECONDS: Final = 10.0


def software() -> str:
    """Return the version; in a checkout with its commit, and whether files differ from it."""
    is_checkout = bool(_git("ls-files", Path(__file__).name))
    commit = _git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") if is_checkout else ""
    return f"prfaas {version('prfaas')}" + (f", commit {commit}" if commit else "")


def hardware() -> str:
    """Return the machine's processor, cores that this process may use, and memory."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{_processor()}, {cores} cores, {memory_gib:.0f} GiB, {platform.system()} {platform.release()}"


def _git(*words: str) -> str:
    """Return what git says of this folder; nothing where there is no git, or no repository."""
    command = ["git", "-C", str(Path(__file__).parent), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())
