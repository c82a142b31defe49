"""Proves the identity of a connection's two ends: inside TLS by certificates that name clusters, or not at all.

The peer of a handshake is a stranger, who may send a byte now and then for ever. So a handshake has one deadline, and
runs in the connection's own thread, never in the thread that accepts.
"""

import select
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from prfaas.errors import IdentityError, PrfaasError, ProtocolError
from prfaas.rights import Identity, counted_as, refusal
from prfaas.util import Deadline
from prfaas_transfer.credentials import Contexts, PeerCredentials, explain
from prfaas_transfer.net import DataStream, ProvenPeer, TlsChannel, TlsStream, plain, tune

# RFC 8446, 5.1 and 6: an alert record of 2 bytes, fatal, protocol_version.
_ALERT_PROTOCOL_VERSION: Final = bytes([21, 3, 3, 0, 2, 2, 70])
_DRAIN_BYTES: Final = 1 << 16
HANDSHAKE_SECONDS: Final = 2.0
CONNECT_SECONDS: Final = 1.5  # Long enough to lose and repeat one SYN.


def accept_tls(sock: socket.socket, credentials: PeerCredentials, seconds: float) -> TlsStream:
    """Serve the handshake of a client that must prove its cluster; close the socket on failure. Raises IdentityError
    without a valid certificate, ProtocolError for other protocols, UnreachableError after `seconds` or if it left."""
    contexts = credentials.now()
    channel = _handshake(sock, partial(TlsChannel, context=contexts.data, server_side=True), seconds)
    return TlsStream(channel, _prove(channel, credentials, contexts))


def connect_tls(sock: socket.socket, credentials: PeerCredentials, seconds: float, expected_cluster: str) -> TlsStream:
    """Do the client's handshake with `expected_cluster`, or any if that is empty. A refusal of our certificate shows
    only with the first bytes: see credentials.py. Raises IdentityError for a wrong certificate, else as
    `accept_tls`."""
    contexts = credentials.now()
    credentials.require_valid_for(expected_cluster)
    channel = _handshake(sock, partial(TlsChannel, context=contexts.client, server_side=False), seconds)
    return TlsStream(channel, _prove(channel, credentials, contexts, expected_cluster))


def _handshake(sock: socket.socket, wrap: Callable[[socket.socket], TlsChannel], seconds: float) -> TlsChannel:
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
            _tell_plain(sock)
        tls.close()
        raise reason from error
    return tls


def _tell_plain(sock: socket.socket) -> None:
    """Send a peer without TLS an alert, which OpenSSL does not; the peer's `is_tls` recognises it."""
    with suppress(OSError):
        sock.recv(_DRAIN_BYTES)  # closing with bytes unread would be a reset, which overtakes the alert
    with suppress(OSError):
        sock.send(_ALERT_PROTOCOL_VERSION)


def _step(tls: TlsChannel, deadline: Deadline) -> bool:
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
    channel: TlsChannel, credentials: PeerCredentials, contexts: Contexts, expected_cluster: str = ""
) -> ProvenPeer:
    try:
        certificate = channel.tls.getpeercert(binary_form=True) or b""
        files = contexts.files
        peer = ProvenPeer(credentials.check(certificate), certificate, files.authorities, files.generation)
        if expected_cluster not in ("", peer.cluster):
            raise IdentityError(
                f"the peer is of cluster {peer.cluster!r} and {expected_cluster!r} was expected; "
                "check the addresses in the routing table"
            )
    except PrfaasError:
        channel.close()
        raise
    return peer


class PeerAuth:
    """Without TLS: peers are not known."""

    def accept(self, sock: socket.socket) -> DataStream:
        """Make a stream of an accepted connection. With TLS, raises PeerError if the peer proves nothing in time."""
        return plain(sock)

    def connect(self, sock: socket.socket, _cluster: str, /) -> DataStream:
        """Make a stream of a connection to this cluster. With TLS, raises PeerError if it is another, or none."""
        return plain(sock)

    def check(self, stream: DataStream, endpoint: str) -> None:
        """Check a connection, old or new. Raises IdentityError if its peer's certificate is no longer valid, or its
        peer may not use this endpoint."""

    def counted_as(self, _stream: DataStream, /) -> str | None:
        """Return the name under which a connection counts, as `prfaas.rights.counted_as`; None: it proved nothing."""
        return None

    def is_reusable(self, _stream: DataStream, /) -> bool:
        """Return True if an older connection of ours may carry another transfer. After a change of our own credentials
        it may not: the peer may no longer trust the old ones."""
        return True


class TlsAuth(PeerAuth):
    """Inside TLS 1.3, with the current credentials."""

    def __init__(self, credentials: PeerCredentials):
        self._credentials = credentials

    def accept(self, sock: socket.socket) -> DataStream:
        return accept_tls(sock, self._credentials, HANDSHAKE_SECONDS)

    def connect(self, sock: socket.socket, cluster: str, /) -> DataStream:
        if not cluster:  # any certificate of the installation, a buyer's too, would pass for the source
            raise IdentityError("the leg names no cluster, so nothing proves who gives the cache; name it in `cluster`")
        return connect_tls(sock, self._credentials, HANDSHAKE_SECONDS, cluster)

    def check(self, stream: DataStream, endpoint: str) -> None:
        if stream.peer is not None and (
            reason := refusal(endpoint, self._prove(stream.peer), self._credentials.cluster)
        ):
            raise IdentityError(f"{endpoint}: {reason}")

    def counted_as(self, stream: DataStream, /) -> str | None:
        return None if stream.peer is None else counted_as(stream.peer.identity, self._credentials.cluster)

    def is_reusable(self, stream: DataStream, /) -> bool:
        if stream.peer is None or stream.peer.generation != self._credentials.now().files.generation:
            return False
        try:
            self._prove(stream.peer)
        except IdentityError:
            return False
        return True

    def _prove(self, peer: ProvenPeer) -> Identity:
        """Return what a peer proves now."""
        return self._credentials.check(peer.certificate, peer.authorities)
