"""Proves the identity of a connection's two ends: inside TLS by certificates that name clusters, or not at all.

The peer of a handshake is a stranger, who may send a byte now and then for ever. So a handshake has one deadline, and
runs in the connection's own thread, never in the thread that accepts.
"""

import http.client
import select
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from prfaas.errors import IdentityError, PrfaasError, ProtocolError
from prfaas.util import Deadline
from prfaas_transfer.credentials import Contexts, PeerCredentials, explain
from prfaas_transfer.net import DataStream, ProvenPeer, TlsChannel, TlsStream, plain, tune

TlsSocket = TypeVar("TlsSocket", ssl.SSLSocket, TlsChannel)

# RFC 8446, 5.1 and 6: an alert record of 2 bytes, fatal, protocol_version.
_ALERT_PROTOCOL_VERSION: Final = bytes([21, 3, 3, 0, 2, 2, 70])
_DRAIN_BYTES: Final = 1 << 16
HANDSHAKE_SECONDS: Final = 2.0
CONNECT_SECONDS: Final = 1.5  # Long enough to lose and repeat one SYN.
ANSWER_SECONDS: Final = 2.0  # The API answers from a process that computes nothing.


def accept_tls(sock: socket.socket, credentials: PeerCredentials, seconds: float) -> TlsStream:
    """Serve the handshake of a client that must prove its cluster; close the socket on failure. Raises IdentityError
    without a valid certificate, ProtocolError for other protocols, UnreachableError after `seconds` or if it left."""
    contexts = credentials.now()
    channel = _handshake(sock, partial(TlsChannel, context=contexts.data, server_side=True), seconds)
    return TlsStream(channel, _prove(channel, channel.tls, credentials, contexts))


def connect_tls(sock: socket.socket, credentials: PeerCredentials, seconds: float, expected_cluster: str) -> TlsStream:
    """Do the client's handshake with `expected_cluster`, or any if that is empty. A refusal of our certificate shows
    only with the first bytes: see credentials.py. Raises IdentityError for a wrong certificate, else as
    `accept_tls`."""
    contexts = credentials.now()
    credentials.require_valid()
    channel = _handshake(sock, partial(TlsChannel, context=contexts.client, server_side=False), seconds)
    return TlsStream(channel, _prove(channel, channel.tls, credentials, contexts, expected_cluster))


def connect_api(sock: socket.socket, credentials: PeerCredentials, seconds: float, cluster: str) -> ssl.SSLSocket:
    """Do the client's handshake for a library that needs a socket. Raises as `connect_tls`."""
    contexts = credentials.now()
    credentials.require_valid()
    tls = _handshake(sock, partial(contexts.client.wrap_socket, do_handshake_on_connect=False), seconds)
    _prove(tls, tls, credentials, contexts, cluster)
    return tls


def _handshake(sock: socket.socket, wrap: Callable[[socket.socket], TlsSocket], seconds: float) -> TlsSocket:
    deadline = Deadline(seconds)
    try:
        tune(sock)
        sock.setblocking(False)
        tls = wrap(sock)
    except OSError as error:
        sock.close()
        raise explain(error, "before the TLS handshake") from error
    try:
        while not _step(tls, deadline):
            pass
    except OSError as error:
        reason = explain(error, "during the TLS handshake")
        if isinstance(reason, ProtocolError):
            _tell_plain(sock if isinstance(tls, TlsChannel) else tls)
        tls.close()
        raise reason from error
    return tls


def _tell_plain(sock: socket.socket) -> None:
    """Send a peer without TLS an alert, which OpenSSL does not; the peer's `is_tls` recognises it."""
    with suppress(OSError):
        # An SSLSocket's own `recv` and `send` would go through TLS, which has failed.
        socket.socket.recv(sock, _DRAIN_BYTES)  # closing with bytes unread would be a reset, which overtakes the alert
    with suppress(OSError):
        socket.socket.send(sock, _ALERT_PROTOCOL_VERSION)


def _step(tls: ssl.SSLSocket | TlsChannel, deadline: Deadline) -> bool:
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


def _prove(
    connection: ssl.SSLSocket | TlsChannel,
    tls: ssl.SSLSocket | ssl.SSLObject,
    credentials: PeerCredentials,
    contexts: Contexts,
    expected_cluster: str = "",
) -> ProvenPeer:
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
        connection.close()
        raise
    return peer


class PeerAuth:
    """Without TLS: peers are not known."""

    def accept(self, sock: socket.socket) -> DataStream:
        """Make a stream of an accepted connection. With TLS, raises PeerError if the peer proves nothing in time."""
        return plain(sock)

    def connect(self, sock: socket.socket, _cluster: str, /) -> DataStream:
        """Make a stream of a connection to this cluster (empty: any). With TLS, raises PeerError if it is another."""
        return plain(sock)

    def check(self, stream: DataStream) -> None:
        """Check an old connection again. Raises IdentityError if its certificate is no longer valid."""

    def is_reusable(self, _stream: DataStream, /) -> bool:
        """Return True if an older connection of ours may carry another transfer. After a change of our own credentials
        it may not: the peer may no longer trust the old ones."""
        return True

    def http(self, sock: socket.socket, address: tuple[str, int], cluster: str) -> http.client.HTTPConnection:
        """Return an HTTP connection over a connected socket; raises as `connect`."""
        connection = http.client.HTTPConnection(*address)
        connection.sock = self._api_socket(sock, cluster)
        connection.sock.settimeout(ANSWER_SECONDS)
        return connection

    def _api_socket(self, sock: socket.socket, _cluster: str, /) -> socket.socket:
        tune(sock)
        return sock


class TlsAuth(PeerAuth):
    """Inside TLS 1.3, with the current credentials."""

    def __init__(self, credentials: PeerCredentials):
        self._credentials = credentials

    def accept(self, sock: socket.socket) -> DataStream:
        return accept_tls(sock, self._credentials, HANDSHAKE_SECONDS)

    def connect(self, sock: socket.socket, cluster: str, /) -> DataStream:
        return connect_tls(sock, self._credentials, HANDSHAKE_SECONDS, cluster)

    def _api_socket(self, sock: socket.socket, cluster: str, /) -> socket.socket:
        return connect_api(sock, self._credentials, HANDSHAKE_SECONDS, cluster)

    def check(self, stream: DataStream) -> None:
        if stream.peer is not None:
            self._credentials.check(stream.peer.certificate, stream.peer.authorities)

    def is_reusable(self, stream: DataStream, /) -> bool:
        if stream.peer is None or stream.peer.generation != self._credentials.now().files.generation:
            return False
        try:
            self.check(stream)
        except IdentityError:
            return False
        return True
