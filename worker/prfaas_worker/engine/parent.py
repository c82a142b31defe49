"""Ties the engine to its front by the kernel: while a model loads, nobody reads the socket that would tell its end."""

import ctypes
import os
import signal
import socket
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def end_with_front(front: socket.socket) -> None:
    """Have this process killed as soon as the front ends, however that happens; not on systems other than Linux."""
    if sys.platform != "linux":
        return  # there it ends with its socket, once it is loaded
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl")
    if _closed(front):  # it died before it could be watched
        os._exit(0)


def _closed(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
