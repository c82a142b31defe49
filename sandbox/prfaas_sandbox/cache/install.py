"""Python packages that prfaas does not share: each list of them, with hashes, has a folder, which uv fills."""

import asyncio
import csv
import hashlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from prfaas.errors import ConfigError, PeerError
from prfaas.processes import ends_with_us
from prfaas_sandbox.cache.entries import ensure_folder
from prfaas_sandbox.processes import Command, run, run_logged
from prfaas_sandbox.progress import OnProgress, ticking

INSTALL_TIMEOUT_SECONDS: Final = 1800.0


def ensure_environment(name: str, lock: Path, shown: str, report: OnProgress) -> Path:
    """Return the virtual environment of the packages of `lock`, which is made in the cache if needed. Its folder's name
    is `name` and a hash of the list. Errors as of `ensure_folder` and `make_environment`."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}\n"
    stamp = hashlib.sha256(version.encode() + lock.read_bytes()).hexdigest()[:12]
    return ensure_folder(
        f"{name}-{stamp}", lambda folder: asyncio.run(make_environment(folder, lock, shown, report)), report
    )


async def make_environment(folder: Path, lock: Path, shown: str, report: OnProgress) -> None:
    """Make a virtual environment of the packages of `lock`; progress calls it `shown`. It may be moved.

    Raises:
        ConfigError: there is no uv.
        PeerError: the installation failed, with its last lines, or left files out.
        UnreachableError: it took longer than half an hour.
    """
    # Without `--relocatable` its programs begin with the path of a Python that is gone once the folder is moved.
    options = ["--quiet", "--allow-existing", "--relocatable", "--python", sys.executable]
    await run(Command([_uv(), "venv", *options, folder]))
    await _uv_pip(["sync", "--python", folder / "bin" / "python", "--require-hashes", lock], folder, shown, report)


async def fetch_packages(folder: Path, lock: Path, shown: str, report: OnProgress) -> None:
    """Put the packages of `lock` alone into a folder, none of what they need. Errors as of `make_environment`."""
    # Without uv's cache, which would keep a GB of kernels.
    options = ["--python", sys.executable, "--no-cache", "--no-deps", "--require-hashes", "--target", folder]
    await _uv_pip(["install", *options, "-r", lock], folder, shown, report)


def missing_files(folder: Path) -> list[Path]:
    """Return the files that the packages of an environment, or of a folder of packages, list and that are not there."""
    packages = [*folder.glob("lib/python*/site-packages/*.dist-info"), *folder.glob("*.dist-info")]
    return [file for package in packages for file in _listed(package) if not file.exists()]


def check_files(folder: Path) -> None:
    """Raise PeerError if a file of the packages below `folder` is missing."""
    if missing := missing_files(folder):
        raise PeerError(f"{len(missing)} files of installed packages are missing, {missing[0]} first: try again")


def find_uv() -> str | None:
    """Return uv: that of our environment, else that of PATH."""
    return shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}")


def _uv() -> str:
    uv = find_uv()
    if uv is None:
        raise ConfigError("packages are installed by uv, which is not on PATH: run `make setup`, or install uv")
    return uv


async def _uv_pip(arguments: Sequence[str | Path], folder: Path, shown: str, report: OnProgress) -> None:
    """Run `uv pip`, with its last line as progress, and check what it left."""
    last = ""

    def note(line: str) -> None:
        nonlocal last
        last = f" ({line.strip()})"

    # A uv that outlived us would write into the folder that the next one makes.
    words = [*ends_with_us(), _uv(), "pip", *arguments]
    command = Command(words, shown="uv pip", timeout_seconds=INSTALL_TIMEOUT_SECONDS)
    async with ticking(report, lambda: f"{shown}{last}"):
        await run_logged(command, folder / "install.log", note)
    check_files(folder)


def _listed(package: Path) -> list[Path]:
    """Return the files of an installed package by its list, and the list itself.

    Some lists name what another Python compiled and what their wheel does not hold.
    """
    record = package / "RECORD"
    if not record.exists():
        return [record]
    with record.open(encoding="utf-8", newline="") as lines:
        rows = [row[0] for row in csv.reader(lines) if row and not row[0].endswith(".pyc")]
    return [record, *(package.parent / name for name in rows)]
