"""How the two ends of a connection prove who they are: inside TLS with certificates that name clusters, or not at all.

The peer of a handshake is a stranger, who may send a byte now and then for ever. So a handshake has one deadline, and
runs in the connection's own thread, never in the thread that accepts.
"""

import http.client
import select
import socket
import ssl
from contextlib import suppress
from typing import Final

from prfaas.errors import IdentityError, PrfaasError, ProtocolError
from prfaas_worker.credentials import Contexts, WorkerCredentials, explain
from prfaas_worker.transfer.net import DataStream, Deadline, ProvenPeer, TlsStream, plain, tune

# RFC 8446, 5.1 and 6: an alert record of 2 bytes, fatal, protocol_version.
_ALERT_PROTOCOL_VERSION: Final = bytes([21, 3, 3, 0, 2, 2, 70])
_DRAIN_BYTES: Final = 1 << 16
HANDSHAKE_SECONDS: Final = 2.0
CONNECT_SECONDS: Final = 1.5
"""Long enough for one SYN to be lost and repeated."""
ANSWER_SECONDS: Final = 2.0
"""The API answers from a process that computes nothing."""


def accept_tls(sock: socket.socket, credentials: WorkerCredentials, seconds: float) -> TlsStream:
    """Serve the handshake of a client that must prove its cluster. The socket is closed where that fails.

    Raises:
        IdentityError: it shows no certificate, or one that proves nothing.
        ProtocolError: it does not speak TLS 1.3.
        UnreachableError: it went away, or took longer than `seconds`.

    """
    contexts = credentials.now()
    return _prove(_shake(sock, contexts.data, seconds, server_side=True), credentials, contexts, "")


def connect_tls(
    sock: socket.socket, credentials: WorkerCredentials, seconds: float, expected_cluster: str
) -> TlsStream:
    """Be the client of a handshake with an instance of `expected_cluster`, or of any cluster if that is empty.

    That the server refuses our certificate is known only with the first bytes from it: see credentials.py.

    Raises:
        IdentityError: its certificate proves nothing, or another cluster; or ours has ended.
        ProtocolError, UnreachableError: as for `accept_tls`.

    """
    contexts = credentials.now()
    credentials.require_valid()
    tls = _shake(sock, contexts.client, seconds, server_side=False)
    return _prove(tls, credentials, contexts, expected_cluster)


def https_connection(
    address: tuple[str, int], sock: socket.socket, credentials: WorkerCredentials, seconds: float, expected_cluster: str
) -> http.client.HTTPConnection:
    """Return an HTTP connection over a connected socket, inside TLS; each later wait on it may take `seconds`.

    Raises:
        PeerError: as `connect_tls`.

    """
    stream = connect_tls(sock, credentials, seconds, expected_cluster)
    connection = http.client.HTTPConnection(*address)
    connection.sock = stream.blocking_socket(seconds)
    return connection


def _shake(sock: socket.socket, context: ssl.SSLContext, seconds: float, *, server_side: bool) -> ssl.SSLSocket:
    deadline = Deadline(seconds)
    try:
        tune(sock)
        sock.setblocking(False)
        tls = context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
    except OSError as error:
        sock.close()
        raise explain(error, "before the TLS handshake") from error
    try:
        while not _step(tls, deadline):
            pass
    except OSError as error:
        reason = explain(error, "during the TLS handshake")
        if isinstance(reason, ProtocolError):
            _tell_plain(tls)
        tls.close()
        raise reason from error
    return tls


def _tell_plain(sock: socket.socket) -> None:
    """Answer a peer that does not speak TLS by an alert, which OpenSSL does not: `is_tls` tells it what it met."""
    with suppress(OSError):
        socket.socket.recv(sock, _DRAIN_BYTES)  # closing with bytes unread would be a reset, which overtakes the alert
    with suppress(OSError):
        socket.socket.send(sock, _ALERT_PROTOCOL_VERSION)


def _step(tls: ssl.SSLSocket, deadline: Deadline) -> bool:
    """Go on with a handshake as far as it gets without waiting, then wait; returns whether it is done."""
    poller = select.poll()
    try:
        tls.do_handshake()
    except ssl.SSLWantReadError:
        poller.register(tls, select.POLLIN)
    except ssl.SSLWantWriteError:
        poller.register(tls, select.POLLOUT)
    else:
        return True
    left_seconds = deadline.left_seconds
    if left_seconds <= 0 or not poller.poll(left_seconds * 1000):
        raise TimeoutError
    return False


def _prove(tls: ssl.SSLSocket, credentials: WorkerCredentials, contexts: Contexts, expected_cluster: str) -> TlsStream:
    try:
        certificate = tls.getpeercert(binary_form=True) or b""
        files = contexts.files
        peer = ProvenPeer(credentials.check(certificate), certificate, files.authorities, files.generation)
        if expected_cluster not in ("", peer.cluster):
            raise IdentityError(
                f"the peer is of cluster {peer.cluster!r} and {expected_cluster!r} was expected; "
                "check the addresses in the routing table"
            )
    except PrfaasError:
        tls.close()
        raise
    return TlsStream(tls, peer)


class PeerAuth:
    """In plain: nobody knows who is there."""

    cluster = ""
    """Our own, as peers know it."""

    def accept(self, sock: socket.socket) -> DataStream:
        """Make a stream of a connection to our port.

        Raises:
            PeerError: with TLS, whoever is there proves nothing, or takes too long.

        """
        return plain(sock)

    def connect(self, sock: socket.socket, _cluster: str, /) -> DataStream:
        """Make a stream of a connection to a peer of this cluster, of any if that is empty.

        Raises:
            PeerError: with TLS, it is another, or proves nothing, or takes too long.

        """
        return plain(sock)

    def check(self, stream: DataStream) -> None:
        """Judge a connection anew that was made a while ago.

        Raises:
            IdentityError: its certificate is not good any more.

        """

    def is_reusable(self, _stream: DataStream, /) -> bool:
        """Tell whether a connection that we made a while ago may carry another transfer, or a new one must be made.

        With other credentials of our own it must: the peer may not trust any more what the old handshake has shown.
        """
        return True

    def http(self, sock: socket.socket, address: tuple[str, int], _cluster: str, /) -> http.client.HTTPConnection:
        """Return an HTTP connection over a connected socket; raises as `connect`."""
        connection = http.client.HTTPConnection(*address)
        sock.settimeout(ANSWER_SECONDS)
        connection.sock = sock
        return connection


class TlsAuth(PeerAuth):
    """Inside TLS 1.3, with the credentials of that moment."""

    def __init__(self, credentials: WorkerCredentials):
        self._credentials = credentials
        self.cluster = credentials.cluster

    def accept(self, sock: socket.socket) -> DataStream:
        """See PeerAuth."""
        return accept_tls(sock, self._credentials, HANDSHAKE_SECONDS)

    def connect(self, sock: socket.socket, cluster: str, /) -> DataStream:
        """See PeerAuth."""
        return connect_tls(sock, self._credentials, HANDSHAKE_SECONDS, cluster)

    def check(self, stream: DataStream) -> None:
        """See PeerAuth."""
        if stream.peer is not None:
            self._credentials.check(stream.peer.certificate, stream.peer.authorities)

    def is_reusable(self, stream: DataStream, /) -> bool:
        """See PeerAuth."""
        if stream.peer is None or stream.peer.generation != self._credentials.now().files.generation:
            return False
        try:
            self.check(stream)
        except IdentityError:
            return False
        return True

    def http(self, sock: socket.socket, address: tuple[str, int], cluster: str, /) -> http.client.HTTPConnection:
        """See PeerAuth."""
        return https_connection(address, sock, self._credentials, ANSWER_SECONDS, cluster)
