"""Calls of another instance's API: it answers from a process that computes nothing, so a second is long."""

import http.client
import socket
from collections.abc import Callable
from contextlib import closing
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from prfaas.errors import UnreachableError
from prfaas.wire.trace import NO_TRACE, TraceContext
from prfaas_worker.transfer.door import CONNECT_SECONDS, Door

CREATED: Final = http.client.CREATED
NOT_FOUND: Final = http.client.NOT_FOUND
MAX_ANSWER_BYTES = 1 << 16


class Api(NamedTuple):
    """Another instance's API: its URL, the cluster that must answer there, empty for any, and how to get in."""

    url: str
    cluster: str
    door: Door
    trace: TraceContext = NO_TRACE

    def call(self, line: tuple[str, str], body: bytes, hold: Callable[[socket.socket], None]) -> tuple[int, bytes]:
        """Make one call, `line` being method and path; `hold` gets the connected socket. Returns status and body.

        Raises:
            PeerError: somebody else is there.
            UnreachableError: there is no answer, or `hold` gave the call up.

        """
        target = urlsplit(self.url)
        address = target.hostname or "", target.port or http.client.HTTP_PORT
        try:
            sock = socket.create_connection(address, CONNECT_SECONDS)
            hold(sock)
            with closing(self.door.http(sock, address, self.cluster)) as connection:
                headers = {"content-type": "application/json", "connection": "close", **self.trace.headers()}
                connection.request(*line, body, headers)
                response = connection.getresponse()
                return response.status, response.read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise UnreachableError(f"no answer to {' '.join(line)}: {error!r}") from error
