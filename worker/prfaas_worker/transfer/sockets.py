"""Blocking TCP as the data path uses it: whole buffers in and out, a timeout on every wait, errors in our own words."""

import logging
import socket
from collections import deque
from itertools import islice

from prfaas.errors import UnreachableError
from prfaas.wire.frames import Buffer
from prfaas_worker.transfer import tcp_info

log = logging.getLogger(__name__)

CUBIC, BBR = "cubic", "bbr"
NEAR_SECONDS = 0.002
"""A peer within this round trip is in the same site."""
# The kernel takes 1,024 at once.
_MAX_PIECES = 512


def use_congestion(sock: socket.socket, name: str) -> None:
    """Have a congestion control, if the kernel has it; connections that a listener accepts begin with the listener's.

    BBR paces what it sends, and the kernel goes on pacing when another takes over: a timer for each segment, half of
    what a near transfer costs. So a connection that may turn out to be near must not begin with it.
    """
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError as error:
        log.debug("congestion control stays as it is: no %s (%s)", name, error)


def connect(host: str, port: int, timeout_seconds: float) -> socket.socket:
    """Return a socket connected to the first address of a host that answers, and begun with what suits a near peer.

    Raises:
        OSError: none does.

    """
    failure: OSError = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            use_congestion(sock, CUBIC)
            sock.settimeout(timeout_seconds)
            sock.connect(address)
        except OSError as error:
            sock.close()
            failure = error
        else:
            return sock
    raise failure


def tune(sock: socket.socket) -> None:
    """Set what the data path needs whatever the host's defaults are; the socket is connected.

    Small frames are not held back. To a near peer CUBIC; to a far one BBR, which keeps a path with a loss in a thousand
    full where CUBIC reaches a third of it. Buffers are the kernel's, which grows them as the path needs.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    use_congestion(sock, CUBIC if (tcp_info.read(sock).rtt_seconds or 0.0) < NEAR_SECONDS else BBR)


def receive_into(sock: socket.socket, *buffers: Buffer) -> None:
    """Fill writable buffers, one after the other, in as few calls as the kernel allows.

    Raises:
        UnreachableError: the peer closed or broke the connection, or sent nothing for the socket's timeout.

    """
    left = deque(memoryview(buffer) for buffer in buffers if len(buffer))
    try:
        while left:
            received = sock.recvmsg_into(list(islice(left, _MAX_PIECES)))[0]
            if received == 0:
                raise UnreachableError("the peer closed the connection before everything was sent")
            while left and received >= len(left[0]):
                received -= len(left.popleft())
            if received:
                left[0] = left[0][received:]
    except TimeoutError as error:
        raise UnreachableError(f"the peer sent no byte for {sock.gettimeout()} s: given up") from error
    except OSError as error:
        raise UnreachableError(f"the connection broke while receiving: {error}") from error
