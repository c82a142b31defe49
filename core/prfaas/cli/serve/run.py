"""Runs `prfaas serve`: starts a worker and a gateway, keeps the gateway's routing up to date, and ends both.

They run as processes beside this one, which does what a scheduler does in an installation. Once a second it reads what
a prefill costs here and at the service, and tells the gateway what prfaas.cli.serve.plan decides. The service may come
and go at any time. While it does not answer, everything is prefilled here; so is a request that it fails halfway. When
one of our processes ends, the others are ended too, and the error shows the end of its log.

The processes have sessions of their own, so that Ctrl-C reaches only this one and requests can be finished. Where
util-linux is installed, the kernel ends them even when this process is killed. The kernel does so when the *thread*
that started them ends: start them from the main thread.

The few HTTP calls use the standard library, because core depends on no HTTP client. Each call has a bound in time and
size. Inside TLS the peer must first show a certificate of the expected cluster; host names prove nothing
(docs/operate/tls.md).
"""

import http.client
import shutil
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec
import typer

from prfaas import identity
from prfaas.cli.serve.plan import (
    INTERVAL_SECONDS,
    Ports,
    Settings,
    gateway_command,
    gateway_url,
    refusal,
    routing_table,
    update_of,
    worker_command,
    worker_url,
)
from prfaas.credentials import CredentialFiles, Files, load, tls13, utc_now
from prfaas.errors import IdentityError, InternalError, PeerError, ProtocolError, UnreachableError
from prfaas.names import HUB
from prfaas.processes import ChildProcess
from prfaas.wire.control import ThresholdUpdate
from prfaas.wire.profile import PATH as PROFILE_PATH
from prfaas.wire.profile import ProfileAnswer, read_profile

POLL_SECONDS: Final = 0.25
SHOW_SECONDS: Final = 15.0
GRACE_SECONDS: Final = 35.0
"""For a process to end by itself; requests that run are finished within 30."""
CALL_SECONDS: Final = 5.0
ANSWER_BYTES: Final = 64 * 1024

Say = Callable[[str], None]


class Caller:
    """Calls the local processes and the service, in plain HTTP without `tls_dir`; raises ConfigError for bad files."""

    def __init__(self, tls_dir: Path | None):
        self._files = CredentialFiles(tls_dir, _context) if tls_dir else None
        self.cluster = self._files.now()[1] if self._files else ""
        """The cluster that our certificate names; empty without one."""

    def profile(self, url: str, cluster: str) -> ProfileAnswer:
        """Return the profile of an instance of this cluster.

        Raises UnreachableError for no answer or an error, IdentityError for another cluster, else ProtocolError.
        """
        status, body = self._get(url, PROFILE_PATH, cluster)
        if status != 200:
            raise UnreachableError(f"{url}{PROFILE_PATH} answers HTTP {status}: {body[:200].decode(errors='replace')}")
        return read_profile(body, url)

    def is_ready(self, url: str, cluster: str = "") -> bool:
        try:
            return self._get(url, "/readyz", cluster)[0] == 200
        except UnreachableError:
            return False

    def _get(self, url: str, path: str, cluster: str) -> tuple[int, bytes]:
        host, port = urlsplit(url).hostname or "", urlsplit(url).port
        if url.startswith("https:") and self._files is not None:
            connection = _Proven(host, port, self._files.now()[0], cluster)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=CALL_SECONDS)
        return _call(connection, "GET", path, url)


def put_threshold(control_socket: Path, update: ThresholdUpdate) -> None:
    """Send an update to the gateway; raises UnreachableError where the gateway does not accept it."""
    where = str(control_socket)
    status, body = _call(_Local(where), "PUT", "/threshold", where, msgspec.json.encode(update))
    if status != 204:
        raise UnreachableError(
            f"PUT /threshold on {where} answers HTTP {status}: {body[:200].decode(errors='replace')}"
        )


def _call(
    connection: http.client.HTTPConnection, method: str, path: str, where: str, body: bytes | None = None
) -> tuple[int, bytes]:
    try:
        connection.request(method, path, body=body)
        answer = connection.getresponse()
        content = answer.read(ANSWER_BYTES + 1)
    except (OSError, http.client.HTTPException, UnicodeError) as error:  # UnicodeError: an impossible host name
        raise UnreachableError(f"{where} does not answer: {error or type(error).__name__}") from error
    finally:
        connection.close()
    if len(content) > ANSWER_BYTES:
        raise ProtocolError(f"{where}{path} answers more than {ANSWER_BYTES} bytes; is that a prfaas worker?")
    return answer.status, content


class _Proven(http.client.HTTPSConnection):
    """A connection that opens only to an instance of the expected cluster."""

    def __init__(self, host: str, port: int | None, context: ssl.SSLContext, cluster: str):
        super().__init__(host, port, timeout=CALL_SECONDS, context=context)
        self._cluster = cluster

    def connect(self) -> None:
        super().connect()
        shown = self.sock.getpeercert(binary_form=True) if isinstance(self.sock, ssl.SSLSocket) else None
        found = identity.check_peer(shown or b"", None, utc_now())
        if found != self._cluster:
            raise IdentityError(
                f"{self.host}:{self.port} shows a certificate of cluster {found!r}, and {self._cluster!r} was expected"
            )


class _Local(http.client.HTTPConnection):
    """A connection to a unix socket."""

    def __init__(self, path: str):
        super().__init__("gateway", timeout=CALL_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _context(files: Files) -> tuple[ssl.SSLContext, str]:
    """Return the context of connections, and our own cluster."""
    context = tls13(ssl.SSLContext, ssl.PROTOCOL_TLS_CLIENT)
    load(context, files)
    return context, files.cluster


class Watch:
    """Keeps the gateway's update current. One round reads both profiles and never raises for a peer's failure.

    `say` shows a line whenever the service is used again or no longer.
    """

    def __init__(self, settings: Settings, local_url: str, caller: Caller, control_socket: Path, say: Say):
        self._settings = settings
        self._local_url = local_url
        self._caller = caller
        self._socket = control_socket
        self._say = say
        self._local: ProfileAnswer | None = None
        self._problem: str | None = None
        """Why the service is not used, as shown last. Empty: it is used. None: nothing was shown yet."""

    def round(self) -> None:
        with suppress(PeerError):  # busy or dead: `Serving` notices; its curve stays the same for seconds
            self._local = self._caller.profile(self._local_url, HUB)
        remote: ProfileAnswer | None = None
        try:
            remote = self._caller.profile(self._settings.service_url, self._settings.service_cluster)
            problem = refusal(self._settings, self._local, remote)
        except PeerError as error:
            problem = str(error)
        try:
            put_threshold(self._socket, update_of(self._settings, self._local, remote, problem))
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
        while not stop.wait(INTERVAL_SECONDS):
            self.round()


class Serving:
    """Runs worker and gateway until the command ends. `say` shows progress; the address goes to standard output."""

    def __init__(self, settings: Settings, ports: Ports, caller: Caller, say: Say):
        self._settings = settings
        self._ports = ports
        self._caller = caller
        self._say = say
        self._directory = Path(tempfile.mkdtemp(prefix="prfaas-serve-"))
        self._url = gateway_url(settings, ports)

    def run(self, stop: threading.Event) -> None:
        directory, local_url = self._directory, worker_url(self._settings, self._ports)
        control_socket = directory / "control.sock"
        (directory / "routes.json").write_bytes(msgspec.json.encode(routing_table(self._settings, self._ports)))
        watch = Watch(self._settings, local_url, self._caller, control_socket, self._say)
        self._say(f"starting a worker with {self._settings.model_source} and a gateway; their logs are in {directory}")
        with ExitStack() as running:
            gateway = gateway_command(self._settings, self._ports, directory / "routes.json", control_socket)
            # They end in the opposite order: the gateway finishes its requests while the worker still serves.
            children = [
                self._start(running, "the worker", worker_command(self._settings, self._ports)),
                self._start(running, "the gateway", gateway),
            ]
            if self._until_ready(children, {local_url: HUB, self._url: ""}, stop):
                self._serve(children, watch, stop)
            self._say("ending: running requests are finished first")
        shutil.rmtree(directory)

    def _serve(self, children: Sequence[ChildProcess], watch: Watch, stop: threading.Event) -> None:
        watch.round()
        watching = threading.Thread(target=watch.run, args=(stop,), daemon=True)
        watching.start()
        typer.echo(f"serving {self._settings.model_name} at {self._url}/v1  (Ctrl-C ends it)")
        while not stop.wait(POLL_SECONDS):
            for child in children:
                child.check_running()
            if not watching.is_alive() and not stop.is_set():
                raise InternalError(
                    "the thread that watches the service ended; start again, and report the output above"
                )

    def _start(self, running: ExitStack, name: str, command: Sequence[str]) -> ChildProcess:
        log = self._directory / f"{name.removeprefix('the ')}.log"
        child = ChildProcess(name, command, log, death_signal="TERM")
        running.callback(child.stop, GRACE_SECONDS)
        return child

    def _until_ready(
        self, children: Sequence[ChildProcess], clusters: Mapping[str, str], stop: threading.Event
    ) -> bool:
        """Wait until all are ready; return False when `stop` is set earlier."""
        started = shown = time.monotonic()
        while not all(self._caller.is_ready(url, cluster) for url, cluster in clusters.items()):
            if stop.wait(POLL_SECONDS):
                return False
            for child in children:
                child.check_running()
            if time.monotonic() - shown >= SHOW_SECONDS:
                shown = time.monotonic()
                self._say(f"still loading: {shown - started:.0f} s")
        return True
