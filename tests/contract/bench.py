"""Engines that a test may also harm: each with its data port, its log, and the way in which it is killed."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from prfaas.cli.contract.calls import CheckedEngine
from prfaas.cli.contract.checks import EnginePair

LISTENS = "0A"


class Instance(NamedTuple):
    """One running engine."""

    engine: CheckedEngine
    address: tuple[str, int]
    log: Path
    kill: Callable[[], None]

    def kill_mover(self) -> None:
        """Kill the process that has the data port; the engine starts another."""
        if mover := listener(*self.address):
            os.kill(mover, signal.SIGKILL)

    def sentences(self) -> int:
        """Return how many requests of this destination had no cache, by its log."""
        return self.log.read_text().count("is computed here, its cache did not come")


class Bench(NamedTuple):
    """A source and a destination that tests share and none may kill, and a way to start one to be killed."""

    source: Instance
    destination: Instance
    start: Callable[[], Instance]
    noise_nats: float

    def pair(self, source: Instance | None = None, destination: Instance | None = None) -> EnginePair:
        one, other = source or self.source, destination or self.destination
        return EnginePair(one.engine, other.engine, one.address[1], self.noise_nats)


def listener(host: str, port: int) -> int:
    """Return the process that listens at an address; 0 if none does."""
    places = {f"{bytes(map(int, one.split('.')))[::-1].hex().upper()}:{port:04X}" for one in (host, "0.0.0.0")}
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{line[9]}]" for line in lines if line[1] in places and line[3] == LISTENS}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(one.readlink()) in sockets for one in (process / "fd").iterdir()):
                return int(process.name)
        except OSError:
            continue  # it has ended, or is another user's
    return 0
