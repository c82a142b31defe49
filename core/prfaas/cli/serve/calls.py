"""The few HTTP calls of `prfaas serve`, by the standard library: core asks for no HTTP client.

Every call has an end: a wait for each piece, and a bound to the answer. Inside TLS the peer must show a certificate of
the cluster that was meant, before it is asked anything; host names prove nothing (docs/tls.md).
"""

import http.client
import socket
import ssl
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from prfaas import identity
from prfaas.credentials import CredentialFiles, Files, load, tls13, utc_now
from prfaas.errors import IdentityError, ProtocolError, UnreachableError
from prfaas.wire.control import ThresholdUpdate
from prfaas.wire.profile import PATH as PROFILE_PATH
from prfaas.wire.profile import ProfileAnswer, read_profile

WAIT_SECONDS: Final = 5.0
ANSWER_BYTES: Final = 64 * 1024


class Caller:
    """Asks the local processes and the service.

    Args:
        tls_dir: where our certificate is; None: everything is plain.

    Raises:
        ConfigError: the files of `tls_dir` cannot be used.

    """

    def __init__(self, tls_dir: Path | None):
        self._files = CredentialFiles(tls_dir, _context) if tls_dir else None
        self.cluster = self._files.now()[1] if self._files else ""
        """The cluster that our certificate names; empty without one."""

    def profile(self, url: str, cluster: str) -> ProfileAnswer:
        """Return the profile of an instance of this cluster.

        Raises:
            UnreachableError: it does not answer, or not with a profile.
            IdentityError: its certificate is of another cluster.
            ProtocolError: it answers something else.

        """
        status, body = self._get(url, PROFILE_PATH, cluster)
        if status != 200:
            raise UnreachableError(f"{url}{PROFILE_PATH} answers HTTP {status}: {body[:200].decode(errors='replace')}")
        return read_profile(body, url)

    def is_ready(self, url: str, cluster: str = "") -> bool:
        """Tell whether /readyz says yes."""
        try:
            return self._get(url, "/readyz", cluster)[0] == 200
        except UnreachableError:
            return False

    def _get(self, url: str, path: str, cluster: str) -> tuple[int, bytes]:
        host, port = urlsplit(url).hostname or "", urlsplit(url).port
        if url.startswith("https:") and self._files is not None:
            connection = _Proven(host, port, self._files.now()[0], cluster)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=WAIT_SECONDS)
        return _call(connection, "GET", path, url)


def tell(control_socket: Path, update: ThresholdUpdate) -> None:
    """Give the gateway what it is to route by.

    Raises:
        UnreachableError: it does not take it.

    """
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
    except (OSError, http.client.HTTPException, UnicodeError) as error:  # the last: a name that can be no host's
        raise UnreachableError(f"{where} does not answer: {error or type(error).__name__}") from error
    finally:
        connection.close()
    if len(content) > ANSWER_BYTES:
        raise ProtocolError(f"{where}{path} answers more than {ANSWER_BYTES} bytes; is that a prfaas worker?")
    return answer.status, content


class _Proven(http.client.HTTPSConnection):
    """A connection that stands only with an instance of the cluster that was meant."""

    def __init__(self, host: str, port: int | None, context: ssl.SSLContext, cluster: str):
        super().__init__(host, port, timeout=WAIT_SECONDS, context=context)
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
        super().__init__("gateway", timeout=WAIT_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _context(files: Files) -> tuple[ssl.SSLContext, str]:
    """Return what connections use, and the cluster that we are."""
    context = tls13(ssl.SSLContext, ssl.PROTOCOL_TLS_CLIENT)
    load(context, files)
    return context, files.cluster
