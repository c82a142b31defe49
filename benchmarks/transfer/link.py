"""A constrained link to measure and to test on: two network namespaces, and between them a third that is the network.

    source 10.77.0.1 -- [ rate, delay, loss ] -- 10.77.0.2 destination

The bottleneck is in the middle, as on a real path: a source that overruns it fills its queue and then loses packets,
where a limit on the source's own interface would only hold it back. The rate is a token bucket (tc tbf) each way. Delay
and loss are a program of ours (`bridge.c`), since not every kernel has netem; without them the kernel itself bridges,
at its own speed.

Nothing of it has a name outside: namespaces are held by this process's descriptors, and end, with what runs in them,
when it does, however that happens. Needs root's rights over namespaces, which
`unshare --user --map-root-user --net` gives too.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from prfaas.errors import ConfigError
from prfaas.processes import ends_with_us

SOURCE_ADDRESS, DESTINATION_ADDRESS = "10.77.0.1", "10.77.0.2"
WIRE = "wire0"
SIDES = ("source", "destination")
QUEUE_MILLIS = 50
BURST_BYTES = 256 << 10
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class Namespace:
    """One network namespace, which lives as long as this object or a process or socket in it."""

    def __init__(self, address: str = ""):
        self.address = address
        # unshare changes its thread alone, so it gets one of its own.
        with ThreadPoolExecutor(1) as thread:
            self._descriptor = thread.submit(_new_namespace).result()

    @property
    def path(self) -> str:
        """A file that stands for it, for programs that take one."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Put the calling thread there: sockets, threads and processes that it makes meanwhile stay there."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check(_libc.setns(self._descriptor, _CLONE_NEWNET))
            yield
        finally:
            _check(_libc.setns(home, _CLONE_NEWNET))
            os.close(home)

    def run(self, *command: str) -> str:
        """Run a program there and return what it prints.

        Raises:
            ConfigError: it failed.

        """
        with self.inside():
            ended = subprocess.run([*ends_with_us(), *command], capture_output=True, text=True, check=False)
        if ended.returncode:
            raise ConfigError(f"{' '.join(command)} failed: {ended.stderr.strip() or ended.stdout.strip()}")
        return ended.stdout

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a program there, which dies with the thread that calls this. Options are those of Popen."""
        with self.inside():
            started = subprocess.Popen([*ends_with_us(), *command], text=True, **options)
        # Until then a death of ours would pass unnoticed. A program has no arguments yet where it has just taken over.
        while started.poll() is None and _program(started.pid) in ("", "setpriv"):
            time.sleep(0.001)
        return started

    def close(self) -> None:
        """Let go of it."""
        os.close(self._descriptor)


def _program(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode()


class Link:
    """A link that stands."""

    def __init__(self, source: Namespace, destination: Namespace, middle: Namespace, mbps: float | None):
        self.source = source
        self.destination = destination
        self._middle = middle
        if mbps is None:
            self._queue("pfifo", "limit", "10000")
        else:
            # Above 2 Gbit/s the kernel's timer needs at least a millisecond's worth.
            burst = max(BURST_BYTES, int(mbps * 1000 / 8))
            rate = f"{round(mbps * 1_000_000)}bit"
            self._queue("tbf", "rate", rate, "burst", f"{burst}b", "latency", f"{QUEUE_MILLIS}ms")

    def _queue(self, *discipline: str) -> None:
        for side in SIDES:
            self._middle.run("tc", "qdisc", "replace", "dev", side, "root", *discipline)


@contextmanager
def link(
    mbps: float | None = None, round_trip_seconds: float = 0.0, loss: float = 0.0, seed: int = 1
) -> Iterator[Link]:
    """Make a link of this rate each way (None: as fast as the machine), added round trip, and share of lost packets.

    Raises:
        ConfigError: this user may make no namespaces, or a program is missing.

    """
    for program, package in {"ip": "iproute2", "tc": "iproute2", "setpriv": "util-linux"}.items():
        if shutil.which(program) is None:
            raise ConfigError(f"a link needs the program {program}: install {package}")
    with ExitStack() as stack:
        source, destination, middle = Namespace(SOURCE_ADDRESS), Namespace(DESTINATION_ADDRESS), Namespace()
        for namespace in (source, destination, middle):
            stack.callback(namespace.close)
        for side, end in zip(SIDES, (source, destination), strict=True):
            _join(middle, side, end)
        if round_trip_seconds or loss:
            stack.enter_context(_slow_bridge(middle, round_trip_seconds, loss, seed))
        else:
            _kernel_bridge(middle)
        yield Link(source, destination, middle, mbps)


def _join(middle: Namespace, side: str, end: Namespace) -> None:
    middle.run("ip", "link", "add", side, "type", "veth", "peer", "name", WIRE, "netns", end.path)
    middle.run("ip", "link", "set", side, "up")
    end.run("ip", "link", "set", "lo", "up")
    end.run("ip", "address", "add", f"{end.address}/24", "dev", WIRE)
    end.run("ip", "link", "set", WIRE, "up")


def _kernel_bridge(middle: Namespace) -> None:
    middle.run("ip", "link", "add", "bridge", "type", "bridge")
    for name in SIDES:
        middle.run("ip", "link", "set", name, "master", "bridge")
    middle.run("ip", "link", "set", "bridge", "up")


@contextmanager
def _slow_bridge(middle: Namespace, round_trip_seconds: float, loss: float, seed: int) -> Iterator[None]:
    compiler = shutil.which("cc")
    if compiler is None:
        raise ConfigError("a link with delay or loss compiles its bridge: install a C compiler (cc)")
    with tempfile.TemporaryDirectory() as directory:
        program = f"{directory}/bridge"
        code = str(Path(__file__).with_name("bridge.c"))
        subprocess.run([compiler, "-O2", "-Wall", "-o", program, code], check=True)
        delay_micros = str(round(round_trip_seconds * 1e6 / 2))
        command = [program, *SIDES, delay_micros, str(loss), str(seed)]
        with middle.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as bridge:
            if bridge.stdout is None or bridge.stdout.readline() != "ready\n":
                raise ConfigError("the bridge of the link did not start: see its message above")
            yield


def _new_namespace() -> int:
    if _libc.unshare(_CLONE_NEWNET):
        raise ConfigError(
            f"a network namespace is not to be had ({os.strerror(ctypes.get_errno())}): "
            "run as root, or under `unshare --user --map-root-user --net`"
        )
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
