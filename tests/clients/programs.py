"""OpenAI clients as programs: each reads requests with its client's own API, and says what that API shows.

    input   a line for each request: {"url", "api", "body", "extra"}, see `Case.make_request`
    output  once a stream has begun: {"begun": true}; then a line for each request, see `Seen`

A program runs as long as its client is tested, as the processes of users do: connections and imports are there.
"""

import json
import os
import queue
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from prfaas.processes import ends_with_us, tail
from prfaas_sandbox.progress import progress

from ..waiting import take_next
from .cases import Case, Seen, ask_plainly
from .install import ensure_clients


class ClientProgram:
    """A running program. It answers one request at a time."""

    def __init__(self, name: str, command: Sequence[str | Path], log: Path):
        self.name = name
        self._command = command
        self._log = log
        self._start()

    def _start(self) -> None:
        self._is_asked = False
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        with self._log.open("ab") as errors:
            self._process = subprocess.Popen(
                [*ends_with_us(), *self._command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"},
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, args=(self._lines,), name=f"reads {self.name}", daemon=True)
        self._reader.start()

    def begin(self, url: str, case: Case) -> None:
        """Send a request; where it is streamed, wait for the first chunk. `end` has to follow."""
        if self._is_asked:  # an answer that nobody waited for must not pass for the next one
            self.stop()
            self._start()
        self._is_asked = True
        assert self._process.stdin
        self._process.stdin.write(json.dumps(case.make_request() | {"url": f"{url}/v1"}) + "\n")
        self._process.stdin.flush()
        if case.is_streamed:
            line = self._next(case)
            if "begun" not in line:  # it failed before
                self._lines.put(line)

    def end(self, case: Case) -> Seen:
        """Return what the client saw of the request that was begun."""
        seen = Seen(**self._next(case))
        self._is_asked = False
        return seen

    def ask(self, url: str, case: Case) -> Seen:
        self.begin(url, case)
        return self.end(case)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            with suppress(BrokenPipeError):  # it may have ended before it read a request
                pipe.close()

    def _next(self, case: Case) -> dict[str, Any]:
        line = take_next(self._lines, f"{self.name} says what it saw of {case.name!r}")
        assert line is not None, f"{self.name} has ended; its last lines:\n{tail(self._log)}"
        return line

    def _read(self, lines: "queue.SimpleQueue[dict[str, Any] | None]") -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            lines.put(json.loads(line))
        lines.put(None)


Clients = tuple[ClientProgram, ...]


@contextmanager
def client_programs(folder: Path) -> Iterator[Clients]:
    """Run all clients, with logs in a folder, until the block ends; they are installed if needed."""
    with progress() as report:
        commands = ensure_clients(report)
    started: list[ClientProgram] = []
    try:
        for name, command in commands.items():
            started.append(ClientProgram(name, command, folder / f"{name}.log"))
        yield tuple(started)
    finally:
        for one in started:
            one.stop()


def find_differences(clients: Clients, url: str, case: Case) -> dict[str, Seen]:
    """Return what a plain request gets and what those clients saw that saw something else; nothing if none did.

    Raises AssertionError if the plain request itself does not get what the case asks for.
    """
    plain = ask_plainly(url, case)
    case.check(plain)
    seen = {one.name: one.ask(url, case) for one in clients if case.suits(one.name)}
    least = 2 if case.is_streamed and plain.status == 200 else 0
    wrong = {name: one for name, one in seen.items() if one != plain or one.chunks < least}
    return {"a plain request": plain} | wrong if wrong else {}
