"""The life of `prfaas serve`: start a worker and a gateway, keep the gateway told, end both.

They run as processes beside this one, which is what a scheduler is in an installation: once a second it reads what a
prefill costs here and there and tells the gateway; prfaas.cli.serve.plan decides what. The service may come and go at
any time: while it does not answer everything is prefilled here, and so is a request that it fails in the middle of.
Whatever ends a process of ours ends all of them, with the end of its log.
"""

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import msgspec
import typer

from prfaas.cli.serve.calls import Caller, tell
from prfaas.cli.serve.plan import (
    INTERVAL_SECONDS,
    Ports,
    Settings,
    gateway_command,
    gateway_url,
    objection,
    routing_table,
    update_of,
    worker_command,
    worker_url,
)
from prfaas.cli.serve.processes import Child
from prfaas.errors import InternalError, PeerError
from prfaas.names import HUB
from prfaas.wire.profile import ProfileAnswer

LOOK_SECONDS: Final = 0.25
SHOW_SECONDS: Final = 15.0
GRACE_SECONDS: Final = 35.0
"""For a process to end by itself; requests that run are finished within 30."""

Say = Callable[[str], None]


class Watch:
    """Keeps the gateway told of both sides. One round asks both and never raises for what others do.

    Args:
        settings: the command line.
        home_url: the local worker's address.
        caller: asks them.
        control_socket: the gateway's.
        say: shows a line whenever the service begins or ceases to be used.

    """

    def __init__(self, settings: Settings, home_url: str, caller: Caller, control_socket: Path, say: Say):
        self._settings = settings
        self._home_url = home_url
        self._caller = caller
        self._socket = control_socket
        self._say = say
        self._home: ProfileAnswer | None = None
        self._problem: str | None = None
        """Why the service is not used, as it was said last; empty: it is used; None: nothing was said yet."""

    def round(self) -> None:
        """Read both profiles and tell the gateway."""
        with suppress(PeerError):  # busy, or dead, which is noticed elsewhere; its curve does not change within seconds
            self._home = self._caller.profile(self._home_url, HUB)
        away: ProfileAnswer | None = None
        try:
            away = self._caller.profile(self._settings.service_url, self._settings.service_cluster)
            problem = objection(self._settings, self._home, away)
        except PeerError as error:
            problem = str(error)
        try:
            tell(self._socket, update_of(self._settings, self._home, away, problem))
        except PeerError as error:
            self._say(f"the gateway was not told of the service: {error}")
            return
        if problem != self._problem:
            self._say(
                f"{self._settings.service_url} is not used: {problem}; prompts are prefilled here"
                if problem
                else f"{self._settings.service_url} is used for long prompts"
            )
        self._problem = problem

    def run(self, stop: threading.Event) -> None:
        """Do a round a second until `stop`."""
        while not stop.wait(INTERVAL_SECONDS):
            self.round()


class Serving:
    """One life of the command.

    Args:
        settings: the command line.
        ports: where the local processes listen.
        caller: asks them, and the service.
        say: shows progress; the address to use goes to standard output.

    """

    def __init__(self, settings: Settings, ports: Ports, caller: Caller, say: Say):
        self._settings = settings
        self._ports = ports
        self._caller = caller
        self._say = say
        self._directory = Path(tempfile.mkdtemp(prefix="prfaas-serve-"))
        self._url = gateway_url(settings, ports)

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop`. Raises PeerError when a process ends before; its log stays where the error says."""
        directory, home_url = self._directory, worker_url(self._settings, self._ports)
        control_socket = directory / "control.sock"
        (directory / "routes.json").write_bytes(msgspec.json.encode(routing_table(self._settings, self._ports)))
        watch = Watch(self._settings, home_url, self._caller, control_socket, self._say)
        self._say(f"starting a worker with {self._settings.model_source} and a gateway; their logs are in {directory}")
        with ExitStack() as running:
            gateway = gateway_command(self._settings, self._ports, directory / "routes.json", control_socket)
            # Ended in the opposite order: the gateway finishes its requests while the worker still serves.
            children = [
                self._start(running, "the worker", worker_command(self._settings, self._ports)),
                self._start(running, "the gateway", gateway),
            ]
            if self._until_ready(children, {home_url: HUB, self._url: ""}, stop):
                self._serve(children, watch, stop)
            self._say("ending: requests that run are finished first")
        shutil.rmtree(directory)

    def _serve(self, children: Sequence[Child], watch: Watch, stop: threading.Event) -> None:
        watch.round()
        watching = threading.Thread(target=watch.run, args=(stop,), daemon=True)
        watching.start()
        typer.echo(f"serving {self._settings.model_name} at {self._url}/v1  (Ctrl-C ends it)")
        while not stop.wait(LOOK_SECONDS):
            _check(children)
            if not watching.is_alive() and not stop.is_set():
                raise InternalError("nobody watches the service any more; start again, and report what is said above")

    def _start(self, running: ExitStack, name: str, command: Sequence[str]) -> Child:
        child = Child(name, command, self._directory / f"{name.removeprefix('the ')}.log")
        running.callback(child.stop, GRACE_SECONDS)
        return child

    def _until_ready(self, children: Sequence[Child], clusters: Mapping[str, str], stop: threading.Event) -> bool:
        """Wait until all say that they are, by address; False when somebody wants to stop before."""
        started = shown = time.monotonic()
        while not all(self._caller.is_ready(url, cluster) for url, cluster in clusters.items()):
            if stop.wait(LOOK_SECONDS):
                return False
            _check(children)
            if time.monotonic() - shown >= SHOW_SECONDS:
                shown = time.monotonic()
                self._say(f"still loading: {shown - started:.0f} s")
        return True


def _check(children: Sequence[Child]) -> None:
    for child in children:
        child.check_running()
