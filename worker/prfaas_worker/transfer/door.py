"""How an instance and its peers come together: in plain, or inside TLS with certificates that name their clusters."""

import http.client
import socket
from typing import Final

from prfaas.errors import IdentityError
from prfaas_worker.credentials import Credentials
from prfaas_worker.transfer.handshake import accept_tls, connect_tls, https_connection
from prfaas_worker.transfer.streams import Stream, plain

HANDSHAKE_SECONDS: Final = 2.0
CONNECT_SECONDS: Final = 1.5
"""Long enough for one SYN to be lost and repeated."""
ANSWER_SECONDS: Final = 2.0
"""The API answers from a process that computes nothing."""


class Door:
    """In plain: nobody knows who is there."""

    cluster = ""
    """Our own, as peers know it."""

    def accept(self, sock: socket.socket) -> Stream:
        """Make a stream of a connection to our port.

        Raises:
            PeerError: with TLS, whoever is there proves nothing, or takes too long.

        """
        return plain(sock)

    def connect(self, sock: socket.socket, _cluster: str, /) -> Stream:
        """Make a stream of a connection to a peer of this cluster, of any if that is empty.

        Raises:
            PeerError: with TLS, it is another, or proves nothing, or takes too long.

        """
        return plain(sock)

    def check(self, stream: Stream) -> None:
        """Judge a connection anew that was made a while ago.

        Raises:
            IdentityError: its certificate is not good any more.

        """

    def is_reusable(self, _stream: Stream, /) -> bool:
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


class TlsDoor(Door):
    """Inside TLS 1.3, with the credentials of that moment."""

    def __init__(self, credentials: Credentials):
        self._credentials = credentials
        self.cluster = credentials.cluster

    def accept(self, sock: socket.socket) -> Stream:
        """See Door."""
        return accept_tls(sock, self._credentials, HANDSHAKE_SECONDS)

    def connect(self, sock: socket.socket, cluster: str, /) -> Stream:
        """See Door."""
        return connect_tls(sock, self._credentials, HANDSHAKE_SECONDS, cluster)

    def check(self, stream: Stream) -> None:
        """See Door."""
        if stream.peer is not None:
            self._credentials.check(stream.peer.certificate, stream.peer.authorities)

    def is_reusable(self, stream: Stream, /) -> bool:
        """See Door."""
        if stream.peer is None or stream.peer.generation != self._credentials.now().files.generation:
            return False
        try:
            self.check(stream)
        except IdentityError:
            return False
        return True

    def http(self, sock: socket.socket, address: tuple[str, int], cluster: str, /) -> http.client.HTTPConnection:
        """See Door."""
        return https_connection(address, sock, self._credentials, ANSWER_SECONDS, cluster)
