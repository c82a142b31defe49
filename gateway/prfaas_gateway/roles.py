"""Tell convertible instances the role in which the routing table has them: PUT /v1/role at each.

Routing does not wait for it, because any worker serves any leg: the role only says how an engine divides its steps.
So a call that fails costs smoothness for a moment and no request, and is made again. Every gateway tells all instances
of its table, and again after a while: a worker that began anew inside its pod has forgotten what it was told.
Sequences that run when a role changes go on to their end.
"""

import asyncio
import logging
from typing import Final, NamedTuple

import msgspec

from prfaas.errors import PrfaasError
from prfaas.wire.routes import Instance
from prfaas_gateway.state import GatewayState
from prfaas_gateway.upstream import Upstream

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.25
AGAIN_SECONDS: Final = 30.0
RETRY_SECONDS: Final = 1.0
WAIT_SECONDS: Final = 2.0
AT_ONCE: Final = 16


class _Told(NamedTuple):
    """What an instance knows, and until when that need not be said again."""

    role: str
    url: str
    until_seconds: float


class RoleTeller:
    """Keeps convertible instances told.

    Args:
        state: has the table.
        upstream: reaches the workers.

    """

    def __init__(self, state: GatewayState, upstream: Upstream):
        self._state = state
        self._upstream = upstream
        self._told: dict[str, _Told] = {}

    async def run(self) -> None:
        """Tell for ever."""
        while True:
            await self.tell_due()
            await asyncio.sleep(LOOK_SECONDS)

    async def tell_due(self) -> None:
        """Tell every instance that does not know its role, or was told it long ago."""
        table = self._state.table
        instances = [one for one in table.instances if one.convertible and one.state == "Ready"] if table else []
        self._told = {one.name: self._told[one.name] for one in instances if one.name in self._told}
        turn = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(*(self._tell(one, turn) for one in instances if self._is_due(one)))

    def _is_due(self, one: Instance) -> bool:
        told = self._told.get(one.name)
        return told is None or (told.role, told.url) != (one.role, one.url) or told.until_seconds <= self._state.clock()

    async def _tell(self, one: Instance, turn: asyncio.Semaphore) -> None:
        known, body = self._told.get(one.name), msgspec.json.encode({"role": one.role})
        async with turn:
            try:
                status = await self._upstream.put(one, "/v1/role", body, WAIT_SECONDS)
                failure = "" if status < 400 else f"HTTP {status}"
            except (PrfaasError, TimeoutError) as error:
                failure = str(error)
        if failure:
            log.warning("instance %s was not told its role %s: %s; again soon", one.name, one.role, failure)
        elif known is None or known.role != one.role:
            log.info("instance %s was told its role: %s", one.name, one.role)
        pause_seconds = RETRY_SECONDS if failure else AGAIN_SECONDS
        self._told[one.name] = _Told(one.role, one.url, self._state.clock() + pause_seconds)
