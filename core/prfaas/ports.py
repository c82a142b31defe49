"""Chooses free ports for processes that need them on their command line, and writes hosts as URLs need them.

Any program may take a port between the choice and the listening. Usually that is an outgoing connection, whose port the
kernel takes from its ephemeral range (net.ipv4.ip_local_port_range, from 32768). The ports chosen here are below it,
and below the node ports of Kubernetes (30000).
"""

import errno
import random
import socket
from contextlib import ExitStack
from typing import Final

LOOPBACK: Final = "127.0.0.1"
PORTS: Final = range(12_000, 30_000)


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """Return different ports on which nothing listens now; raises OSError for a foreign address, or too few ports."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found: list[int] = []
    with ExitStack() as held:
        for port in random.sample(PORTS, len(PORTS)):
            listener = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
            try:
                listener.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                found.append(port)
            if len(found) >= count:
                return found
    raise OSError(errno.EADDRINUSE, f"fewer than {count} of the ports {PORTS.start} to {PORTS.stop - 1} are free")


def url_host(host: str) -> str:
    """Return a host for a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
