"""Where images are made: each under a tag that carries a hash of what it is made of, so that nothing is made twice."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from prfaas.errors import ConfigError, PeerError
from prfaas_sandbox.build import cache_folder
from prfaas_sandbox.commands import Command, run_logged
from prfaas_sandbox.kind.docker import INSTALL_ADVICE, docker, free_bytes
from prfaas_sandbox.kind.layout import Layout
from prfaas_sandbox.progress import Report, ticking

BUILD_TIMEOUT_SECONDS = 1800.0
PULL_TIMEOUT_SECONDS = 900.0
NEEDED_BYTES = 8 * 2**30
WORK_PREFIX = "kind-build-"
STEP_MARK = "== "
ROOT_TOOLS = ("debootstrap", "tar", "apt-get")


@dataclass(frozen=True)
class Workshop:
    """Makes images, and says how it goes.

    Args:
        layout: whose sources, logs and label.
        report: gets lines of progress.

    """

    layout: Layout
    report: Report

    async def pulls(self, reference: str) -> bool:
        """Return whether an image can be had from its registry; afterwards Docker has it."""
        async with ticking(self.report, lambda: f"{reference} (pulling)"):
            try:
                await docker("pull", reference, timeout_seconds=PULL_TIMEOUT_SECONDS)
            except PeerError:
                return False
        return True

    async def check_space(self) -> None:
        """Raise ConfigError when Docker's disk has no room for what is built."""
        free = await free_bytes()
        if free is not None and free < NEEDED_BYTES:
            raise ConfigError(
                f"Docker's disk has {free / 2**30:.1f} GiB free and the images need about {NEEDED_BYTES / 2**30:.0f}: "
                "make room (`docker system df` shows what holds it, `make kind-down PURGE=1` removes ours)"
            )

    async def script(self, name: str, reference: str, environment: Mapping[str, str] | None = None) -> None:
        """Build an image by a script of tools/kind, from Debian packages."""
        if os.geteuid() != 0 or missing_programs(ROOT_TOOLS):
            needs = ", ".join(missing_programs(ROOT_TOOLS)) or "root"
            raise ConfigError(
                "no image can be pulled here, so they are built from Debian packages, and that needs "
                f"{needs}: {INSTALL_ADVICE}"
            )
        async with self._folder() as work:
            command = Command(
                [self.layout.tools / "kind" / name, work, reference],
                shown=f"building {reference}",
                environment=environment or {},
                timeout_seconds=BUILD_TIMEOUT_SECONDS,
            )
            await self.run(command, reference)

    async def run(self, command: Command, reference: str) -> None:
        """Run what builds an image; its output goes to a log of the image's name."""
        step = ""

        def read(line: str) -> None:
            nonlocal step
            if line.startswith(STEP_MARK):
                step = f", {line.removeprefix(STEP_MARK)}"

        await self.check_space()
        log = self.layout.logs / f"{reference.replace('/', '-').replace(':', '-')}.log"
        async with ticking(self.report, lambda: reference + step):
            await run_logged(command, log, read)

    @asynccontextmanager
    async def _folder(self) -> AsyncIterator[Path]:
        """Give an empty folder on the cache's disk, gone afterwards."""
        cache_folder().mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=WORK_PREFIX, dir=cache_folder()))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def clear_work() -> None:
    """Remove the folders of builds that were killed."""
    for folder in cache_folder().glob(f"{WORK_PREFIX}*"):
        shutil.rmtree(folder, ignore_errors=True)


def missing_programs(names: Sequence[str]) -> list[str]:
    """Return which of some programs PATH does not have."""
    return [name for name in names if shutil.which(name) is None]


def digest(root: Path, parts: Iterable[str], *more: str) -> str:
    """Return a short hash of files and folders below `root`, names and contents, and of more words."""
    total = hashlib.sha256("\0".join(more).encode())
    for part in parts:
        path = root / part
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        for file in files:
            if "__pycache__" not in file.parts:
                content = file.read_bytes()
                total.update(f"{file.relative_to(root)}\0{len(content)}\0".encode() + content)
    return total.hexdigest()[:12]
