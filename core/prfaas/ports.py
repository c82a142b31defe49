"""Chooses free ports for processes that need them on their command line, and writes hosts as URLs need them.

Any program may take a port between the choice and the listening. Usually that is an outgoing connection, whose port the
kernel takes from its ephemeral range (net.ipv4.ip_local_port_range, from 32768). The ports chosen here are below it,
and below the node ports of Kubernetes (30000). Processes that choose at the same time can have a part of them each.
"""

import errno
import os
import random
import socket
from contextlib import ExitStack
from typing import Final

LOOPBACK: Final = "127.0.0.1"
PORTS: Final = range(12_000, 30_000)
PART_VARIABLE: Final = "PRFAAS_PORTS_PART"
"""Limits a process and its children to one part of the ports: 2/6 is the third of six."""
_chosen: set[int] = set()
"""What this process chose before, of which some may not listen yet."""


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """Return different ports on which nothing listens now; raises OSError for a foreign address, or too few ports."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found: list[int] = []
    with ExitStack() as held:
        for port in _candidates():
            listener = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
            try:
                listener.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                found.append(port)
            if len(found) >= count:
                _chosen.update(found)
                return found
    raise OSError(errno.EADDRINUSE, f"fewer than {count} of the ports {PORTS.start} to {PORTS.stop - 1} are free")


def _candidates() -> list[int]:
    """Return this process's part of the ports in any order, those last that it chose before."""
    number, _, parts = os.environ.get(PART_VARIABLE, "0/1").partition("/")
    ports = PORTS[int(number) :: int(parts)]
    return sorted(random.sample(ports, len(ports)), key=_chosen.__contains__)


def url_host(host: str) -> str:
    """Return a host for a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
