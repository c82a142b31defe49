"""Reads what the pods' logs say about one request: how its cache crossed, and how its answer ended.

The headers of an answer leave before it is whole, and vLLM has none for the bytes of a cache. The destination logs
these for each transfer.
"""

import asyncio
import re

from prfaas.errors import PeerError
from prfaas.util import Deadline
from prfaas_sandbox.demo.install import ExampleInstallation
from prfaas_sandbox.demo.records import UNKNOWN, RequestRecord, SeenTransfer

_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')
WRITTEN_SECONDS, POLL_SECONDS = 10.0, 0.5


class PodLogs:
    """The logs of the hub's pods."""

    def __init__(self, installation: ExampleInstallation):
        self._installation = installation

    async def transfer(self, record: RequestRecord) -> SeenTransfer | None:
        """Return how the cache of an offloaded request crossed; None if no destination logs its transfer."""
        if record.decoded_by == UNKNOWN:
            return None
        deadline = Deadline(WRITTEN_SECONDS)
        while True:
            text = await self._read(record.decoded_by)
            if (found := read_transfer(text, record.id, self._installation.member_name)) or deadline.is_over:
                return found
            await asyncio.sleep(POLL_SECONDS)

    async def outcome(self, record: RequestRecord) -> str:
        """Return the outcome in the gateway's access log, which has the whole answer; empty if there is none."""
        deadline = Deadline(WRITTEN_SECONDS)
        while True:
            text = await self._read(f"deployment/{self._installation.file.policy}-gateway")
            if (found := read_outcome(text, record.id)) or deadline.is_over:
                return found
            await asyncio.sleep(POLL_SECONDS)

    async def _read(self, pod: str) -> str:
        """Return a log; empty where it cannot be read now."""
        try:
            return await self._installation.hub_log(pod)
        except PeerError:
            return ""


def read_transfer(text: str, request_id: str, peer: str) -> SeenTransfer | None:
    """Return the last transfer from a peer cluster that a destination logged for a request.

    An engine's own id of a request contains the gateway's.
    """
    found = None
    for line in text.splitlines():
        if "transfer received " in line and request_id in line:
            fields = _fields(line)
            if request_id in fields.get("request_id", "") and fields.get("peer") == peer:
                found = SeenTransfer(outcome=fields["outcome"], payload_bytes=int(fields["bytes"]))
    return found


def read_outcome(text: str, request_id: str) -> str:
    """Return the outcome of a request in a gateway's log; empty if it is not over."""
    for line in text.splitlines():
        if request_id in line and " decision=" in line:
            fields = _fields(line)
            if fields.get("request_id") == request_id:
                return fields["outcome"]
    return ""


def _fields(line: str) -> dict[str, str]:
    return dict(_FIELD.findall(line))
