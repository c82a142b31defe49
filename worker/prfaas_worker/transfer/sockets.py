"""Blocking TCP as the data path uses it: whole buffers in and out, a timeout on every wait, errors in our own words."""

import logging
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from prfaas.errors import UnreachableError
from prfaas.wire.transfer import Buffer

log = logging.getLogger(__name__)

# struct tcp_info of linux/tcp.h: u64 tcpi_bytes_acked and u32 tcpi_notsent_bytes.
_BYTES_ACKED = struct.Struct("=Q"), 120
_NOTSENT_BYTES = struct.Struct("=I"), 144
_TCP_INFO_BYTES = 160
# The kernel takes 1,024 at once.
_MAX_PIECES = 512


class Progress(NamedTuple):
    """What the kernel knows of a connection: bytes that wait to be sent, and bytes the peer acknowledged."""

    unsent_bytes: int
    delivered_bytes: int


def tune(sock: socket.socket) -> None:
    """Set what the data path needs whatever the host's defaults are: CUBIC, and no delay of small frames."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    except OSError as error:
        log.debug("congestion control stays the host's default: cubic is not available (%s)", error)


def progress(sock: socket.socket) -> Progress:
    """Ask the kernel how far a connection's bytes got."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    (delivered,) = _BYTES_ACKED[0].unpack_from(info, _BYTES_ACKED[1])
    (unsent,) = _NOTSENT_BYTES[0].unpack_from(info, _NOTSENT_BYTES[1])
    return Progress(unsent, delivered)


def send_all(sock: socket.socket, parts: Sequence[Buffer], on_sent: Callable[[int], None]) -> None:
    """Send all parts without joining them; `on_sent` hears of every accepted piece.

    Raises:
        UnreachableError: the peer is gone, or took nothing for the socket's timeout.

    """
    left = [memoryview(part) for part in parts if len(part)]
    try:
        while left:
            sent = sock.sendmsg(left)
            on_sent(sent)
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = left[0][sent:]
    except TimeoutError as error:
        raise UnreachableError(f"the peer took no byte for {sock.gettimeout()} s: given up") from error
    except OSError as error:
        raise UnreachableError(f"the connection broke while sending: {error}") from error


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
