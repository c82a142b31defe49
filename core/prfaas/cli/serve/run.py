"""Runs `prfaas serve`: starts a worker and a gateway, keeps the gateway's routing up to date, and ends both.

They run as processes beside this one, which does what a scheduler does in an installation. The user may run a vLLM in
place of the worker. Once a second this process reads what a prefill costs here and at the service, and sends the
gateway what prfaas.cli.serve.plan decides. The service may come and go at any time. While it does not answer,
everything is prefilled here; so is a request that it fails halfway. When one of our processes ends, the others are
ended too, and the error shows the end of its log.

The processes have sessions of their own, so that Ctrl-C reaches only this one and requests can be finished. Where
util-linux is installed, the kernel ends them even when this process is killed.

The few HTTP calls use the standard library, because core depends on no HTTP client. Each call has a bound in time and
size. Inside TLS the peer must first show a certificate of the expected cluster; host names prove nothing
(docs/operate/tls.md).
"""

import http.client
import shutil
import signal
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, urlsplit

import typer
from msgspec.json import encode

from prfaas import identity
from prfaas.cli.serve.plan import (
    INTERVAL_SECONDS,
    Settings,
    commands,
    prices_of,
    require_listed_model,
    routing_table,
    update_of,
)
from prfaas.credentials import CredentialFiles, Files, load, tls13, utc_now
from prfaas.errors import IdentityError, PeerError, ProtocolError, UnreachableError
from prfaas.names import HUB
from prfaas.processes import ChildProcess
from prfaas.rights import home_of
from prfaas.wire.profile import PATH as PROFILE_PATH
from prfaas.wire.profile import ProfileAnswer, read_profile

POLL_SECONDS: Final = 0.25
SHOW_SECONDS: Final = 15.0
GRACE_SECONDS: Final = 35.0
"""For a process to end by itself; requests that run are finished within 30."""
CALL_SECONDS: Final = 5.0
ANSWER_BYTES: Final = 64 * 1024


class Caller:
    """Calls the local processes and the service, in plain HTTP without `tls_dir`; raises ConfigError for bad files."""

    home: str = HUB
    """What the certificate of the local processes names."""

    def __init__(self, tls_dir: Path | None):
        self._context = CredentialFiles(tls_dir, _context) if tls_dir else None
        if self._context is not None:
            self.home = home_of(self._context.now()[1].cluster)

    def profile(self, url: str, cluster: str) -> ProfileAnswer:
        """Return the profile of an instance of this cluster; raises PeerError as `call` does."""
        return read_profile(self.call("GET", url, PROFILE_PATH, cluster), url)

    def is_ready(self, url: str, cluster: str = "") -> bool:
        try:
            self.call("GET", url, "/health", cluster)  # vLLM's name for it, which ours know, too
        except UnreachableError:
            return False
        return True

    def call(self, method: str, url: str, path: str, cluster: str = "", body: bytes | None = None) -> bytes:
        """Return the body of the answer of a process of this cluster. `url` may be unix:PATH.

        Raises UnreachableError for no answer or an error, IdentityError for another cluster, else ProtocolError.
        """
        parts = urlsplit(url)
        try:
            with closing(http.client.HTTPConnection(parts.netloc or "localhost", timeout=CALL_SECONDS)) as connection:
                self._connect(connection, parts, cluster)
                connection.request(method, path, body=body)
                answer = connection.getresponse()
                content = answer.read(ANSWER_BYTES + 1)
        except (OSError, http.client.HTTPException, UnicodeError) as error:  # UnicodeError: an impossible host name
            raise UnreachableError(f"{url} does not answer: {error or type(error).__name__}") from error
        if len(content) > ANSWER_BYTES:
            raise ProtocolError(f"{url}{path} answers more than {ANSWER_BYTES} bytes; is that a prfaas worker?")
        if answer.status not in {200, 204}:
            raise UnreachableError(f"{url}{path} answers HTTP {answer.status}: {content[:99].decode(errors='replace')}")
        return content

    def _connect(self, connection: http.client.HTTPConnection, parts: SplitResult, cluster: str) -> None:
        if parts.scheme == "unix":
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.sock.settimeout(CALL_SECONDS)
            connection.sock.connect(parts.path)
            return
        connection.connect()
        if parts.scheme == "https" and self._context is not None:
            context, files = self._context.now()
            tls = context.wrap_socket(connection.sock, server_hostname=parts.hostname)
            connection.sock = tls
            found = identity.check_peer(tls.getpeercert(binary_form=True) or b"", None, utc_now(), files.peers).cluster
            if found != cluster:
                raise IdentityError(f"{parts.netloc} shows a certificate of cluster {found!r}, not of {cluster!r}")


def _context(files: Files) -> tuple[ssl.SSLContext, Files]:
    context = tls13(ssl.SSLContext, ssl.PROTOCOL_TLS_CLIENT)
    load(context, files)
    return context, files


def follow_service(settings: Settings, caller: Caller, control_socket: Path) -> Iterator[None]:
    """Keep the gateway's update current: each round asks both sides. A peer that fails later raises nothing.

    A line on stderr says whenever the service is used again or no longer.
    """
    url, shown, used = settings.service_url, "", f"{settings.service_url} is used for long prompts"
    local = None if settings.decode_url else caller.profile(settings.worker_url, caller.home)
    while True:
        try:
            if local is None:
                require_listed_model(settings, caller.call("GET", url, "/v1/models", settings.service_cluster))
                update = update_of(settings, used)
            else:
                with suppress(PeerError):  # busy or dead: `run` notices; its curve stays the same for seconds
                    local = caller.profile(settings.worker_url, caller.home)
                prices = prices_of(settings, local, caller.profile(url, settings.service_cluster))
                update = update_of(settings, used, prices=prices)
        except PeerError as error:
            update = update_of(settings, f"{url} is not used: {error}; prompts are prefilled here", is_used=False)
        line = update.reason
        try:
            caller.call("PUT", f"unix:{control_socket}", "/threshold", body=encode(update))
        except PeerError as error:
            line = f"the gateway does not know whether to use the service: {error}"
        if line != shown:
            _say(line)
        shown = line
        yield


def run(settings: Settings, caller: Caller) -> None:
    """Run worker and gateway until Ctrl-C or SIGTERM; a second one does not wait for requests.

    Progress goes to stderr, the address to stdout. Raises PeerError when a process ends before.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    directory = Path(tempfile.mkdtemp(prefix="prfaas-serve-"))
    routes_file, control_socket = directory / "routes.json", directory / "control.sock"
    routes_file.write_bytes(encode(routing_table(settings)))
    ours = "a gateway" if settings.decode_url else f"a worker with {settings.model_source} and a gateway"
    _say(f"starting {ours}; logs are in {directory}")
    with ExitStack() as running:
        children: list[ChildProcess] = []
        with suppress(KeyboardInterrupt):
            # They end in the opposite order: the gateway finishes its requests while the worker still serves.
            for name, command in commands(settings, routes_file, control_socket, caller.home).items():
                children.append(ChildProcess(f"the {name}", command, directory / f"{name}.log", death_signal="TERM"))
                running.callback(children[-1].stop, GRACE_SECONDS)
            _wait_until_ready(settings, caller, children)
            typer.echo(f"serving {settings.model_name} at {settings.gateway_url}/v1  (Ctrl-C ends it)")
            for _ in follow_service(settings, caller, control_socket):
                for child in children:
                    child.check_running()
                time.sleep(INTERVAL_SECONDS)
        _say("ending: running requests are finished first")
    shutil.rmtree(directory)


def _wait_until_ready(settings: Settings, caller: Caller, children: Sequence[ChildProcess]) -> None:
    started = shown = time.monotonic()
    while not (caller.is_ready(settings.worker_url, caller.home) and caller.is_ready(settings.gateway_url)):
        for child in children:
            child.check_running()
        if time.monotonic() - shown >= SHOW_SECONDS:
            shown = time.monotonic()
            _say(f"still loading: {shown - started:.0f} s")
        time.sleep(POLL_SECONDS)


def _say(line: str) -> None:
    typer.echo(line, err=True)
