"""A source or a destination in its own process, inside its namespace, asked in lines of JSON.

    python -m benchmarks.transfer.process give|take SOURCE_ADDRESS PLAN

Ends when standard input does, and with the process that started it.
"""

import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.transfer.ends import Destination, Plan, Source
from benchmarks.transfer.link import Link, Namespace
from benchmarks.transfer.movers import PAGED, MoverDestination, MoverSource

from prfaas.errors import PeerError

ROOT = Path(__file__).resolve().parents[2]
AnyEnd: TypeAlias = Source | Destination | MoverSource | MoverDestination


class End:
    """A source or destination as the benchmark sees it."""

    def __init__(self, role: str, namespace: Namespace, source_address: str, plan: Plan):
        command = [sys.executable, "-m", "benchmarks.transfer.process", role, source_address, json.dumps(plan)]
        self._process = namespace.start(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.plan = plan

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def ask(self, what: str, **details: Any) -> Any:
        """Let it do something, and return its answer."""
        self.begin(what, **details)
        return self.answer()

    def begin(self, what: str, **details: Any) -> None:
        """Let it do something whose answer is read later."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, details]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Return the next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"{' '.join(map(str, self._process.args[-3:-1]))} ended: its messages stand above")
        return json.loads(line)

    def pss_mib(self) -> float:
        """Memory that it holds now, shared pages counted by their share."""
        found = re.search(r"Pss:\s+(\d+) kB", Path(f"/proc/{self.pid}/smaps_rollup").read_text())
        return int(found.group(1)) / 1024 if found else 0.0

    def close(self) -> None:
        """End it."""
        self._process.communicate()


@contextmanager
def ends(link: Link, plan: Plan) -> Iterator[tuple[End, End]]:
    """Start a source and a destination at the ends of a link, ready."""
    source = End("give", link.source, link.source.address, plan)
    destination = End("take", link.destination, link.source.address, plan)
    try:
        source.answer(), destination.answer()
        yield source, destination
    finally:
        source.close()
        destination.close()


def _give(source: Source | MoverSource, what: str, details: dict[str, Any]) -> Any:
    if what == "offer":
        return source.offer(**details)
    if what == "prefill ended":
        return source.prefill_ended
    return _either(source, what, details)


def _take(destination: Destination | MoverDestination, what: str, details: dict[str, Any]) -> Any:
    if what != "take":
        return _either(destination, what, details)
    grants = details["grants"]
    started = time.monotonic()
    with ThreadPoolExecutor(len(grants)) as threads:
        taken = sum(threads.map(destination.take, grants, range(len(grants))))
    ended = time.monotonic()
    return {"bytes": taken, "seconds": ended - started, "ended": ended}


def _either(end: AnyEnd, what: str, details: dict[str, Any]) -> Any:
    """Answer what both ends are asked: "cpu" is that of the transfer and, of a mover's engine, that of its copies."""
    if what == "digest":
        return end.caches.digest(**details)
    used = resource.getrusage(resource.RUSAGE_SELF)
    own = used.ru_utime + used.ru_stime
    return [end.mover_cpu, own] if isinstance(end, (MoverSource, MoverDestination)) else [own, 0.0]


def _end(role: str, address: str, plan: Plan) -> AnyEnd:
    if plan.shape in PAGED:
        return MoverSource(address, plan) if role == "give" else MoverDestination(address, plan)
    return Source(address, plan) if role == "give" else Destination(address, plan)


def main() -> None:
    role, address, plan = sys.argv[1], sys.argv[2], Plan(*json.loads(sys.argv[3]))
    end = _end(role, address, plan)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        what, details = json.loads(line)
        gives = isinstance(end, (Source, MoverSource))
        print(json.dumps(_give(end, what, details) if gives else _take(end, what, details)), flush=True)


if __name__ == "__main__":
    main()
