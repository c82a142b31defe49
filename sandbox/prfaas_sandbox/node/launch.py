"""Launches a container: new mount and PID namespaces, the container's view of the file system, then its command.

Run it as a script, `python -I -S launch.py SPEC_FD REPORT_FD`. It reads a JSON document {scratch, mounts, argv, env,
cwd} from one descriptor. To the other it writes `started PID` or an error. Then it waits for the command, which is pid
1 of its namespace. It ends as the command did, with 128 + N for signal N. (unshare(1) makes SIGKILL a 1.)

The view is the host's file system, with volumes at their mountPaths, which need not exist there. So the root becomes a
tmpfs in which every entry of the host's root is bound. Directories on the path to a mountPath are rebuilt likewise,
entry by entry. The outside sees no change. Only the standard library is imported, because every container starts here.
"""

import ctypes
import json
import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWPID = 0x20000, 0x20000000
PR_SET_PDEATHSIG = 1
# Flags that a mount inherited from a less trusted namespace may not lose when it is remounted read-only (statvfs bits).
KEPT_FLAGS = 2 | 4 | 8  # nosuid, nodev, noexec
EXIT_NOT_STARTED = 128

libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, options: str | None = None) -> None:
    arguments = [text.encode() if text is not None else None for text in (source, target, kind)]
    check(libc.mount(*arguments, flags, options.encode() if options is not None else None), f"mount {target}")


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot {what}: {os.strerror(number)}")


def bind(source: str, target: str, *, read_only: bool = False) -> None:
    if Path(source).is_dir():
        Path(target).mkdir(parents=True, exist_ok=True)
    else:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).touch()
    mount(source, target, flags=MS_BIND | MS_REC)
    if read_only:
        kept = os.statvfs(target).f_flag & KEPT_FLAGS
        mount(None, target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY | kept)


def mirror(path: str, root: str, targets: set[str]) -> None:
    """Bind every entry of directory `path` below `root`; rebuild directories on the path to a target."""
    for entry in os.scandir(path):
        copy = root + entry.path
        if entry.path in targets:
            continue
        # An entry may vanish between being listed and being bound; that is as if it had never been there.
        with suppress(FileNotFoundError):
            if entry.is_symlink():
                Path(copy).symlink_to(Path(entry.path).readlink())
            elif any(target.startswith(entry.path + "/") for target in targets):
                Path(copy).mkdir()
                mirror(entry.path, root, targets)
            else:
                bind(entry.path, copy)


def enter_root(scratch: str, mounts: list[dict[str, Any]]) -> None:
    """Replace the root of this mount namespace by the container's view."""
    mount(None, "/", flags=MS_REC | MS_PRIVATE)
    mount("tmpfs", scratch, "tmpfs", options="mode=755")
    # /var/run is a link to /run: what counts is where a path ends up.
    targets = {os.path.realpath(each["path"]): each for each in mounts}
    mirror("/", scratch, set(targets))
    for path in sorted(targets):  # parents first, for volumes inside volumes
        bind(targets[path]["source"], scratch + path, read_only=targets[path]["read_only"])
    old = Path(scratch) / ".old-root"
    old.mkdir()
    os.chdir(scratch)
    check(libc.pivot_root(b".", b".old-root"), "enter the new root")
    os.chdir("/")
    mount("proc", "/proc", "proc")
    libc.umount2(b"/.old-root", MNT_DETACH)
    Path("/.old-root").rmdir()


def become(spec: dict[str, Any]) -> None:
    """Execute the container's command; return only by an exception."""
    enter_root(spec["scratch"], spec["mounts"])
    os.chdir(spec["cwd"])
    program = shutil.which(spec["argv"][0], path=spec["env"].get("PATH"))
    if program is None:
        raise FileNotFoundError(f'exec: "{spec["argv"][0]}": executable file not found in the container\'s PATH')
    os.execve(program, spec["argv"], spec["env"])  # noqa: S606  # becoming the pod's command is what this is for


def run_child(spec: dict[str, Any], report: int) -> None:
    """Run as the container's first process; never return. Success closes `report`, a failure is written there."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        become(spec)
    except OSError as error:
        os.write(report, str(error).encode())
    finally:
        os._exit(EXIT_NOT_STARTED)


def main() -> None:
    """Launch the container and wait for its end."""
    spec_descriptor, report = (int(argument) for argument in sys.argv[1:3])
    with open(spec_descriptor, "rb") as file:  # noqa: PTH123  # a descriptor has no path
        spec = json.load(file)
    check(libc.unshare(CLONE_NEWNS | CLONE_NEWPID), "make namespaces")
    failure, failure_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(report)
        run_child(spec, failure_end)
    os.close(failure_end)
    with open(failure, "rb") as file:  # noqa: PTH123
        reason = file.read()
    os.write(report, reason or f"started {child}".encode())
    os.close(report)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
