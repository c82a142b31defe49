"""vLLM with MooncakeConnector: two legs at once, which find each other by a transfer id that the gateway makes.

P's bootstrap server says which engine serves each of its data-parallel ranks. An engine's id changes when it restarts,
so it is asked for again after a failure, and once in a while.
"""

import asyncio
import random
import time
import uuid
from typing import NamedTuple

import msgspec

from prfaas.errors import UnreachableError
from prfaas.routing.facts import Route
from prfaas.wire.routes import Instance
from prfaas_gateway.engines import LegFailedError
from prfaas_gateway.engines.bodies import for_prefill, read_fields, with_fields
from prfaas_gateway.engines.bootstrap import bootstrap_url
from prfaas_gateway.engines.legs import Leg, call, call_both
from prfaas_gateway.openai import Intake
from prfaas_gateway.upstream import Answer, Upstream

KNOWN_SECONDS = 30.0
ANSWER_SECONDS = 5.0
ANSWER_BYTES = 64 * 1024
RANK_HEADER = "X-data-parallel-rank"


class _Rank(msgspec.Struct):
    engine_id: str


class _Known(NamedTuple):
    ranks: dict[str, _Rank]
    until_seconds: float


_ranks = msgspec.json.Decoder(dict[str, _Rank])


class VllmMooncakeEngine:
    """Serves routes on vLLM instances that are joined by Mooncake."""

    def __init__(self, upstream: Upstream):
        self._upstream = upstream
        self._known: dict[str, _Known] = {}

    async def open(self, route: Route, intake: Intake) -> Answer:
        """Serve a request along a route; see `Engine.open`."""
        if route.prefill is None:
            return await call(self._upstream, intake, Leg("decode", route.decode, intake.body))
        ranks = await self._ranks(route.prefill)
        rank, engine = random.choice(list(ranks.items()))  # noqa: S311 - spreads load, guards nothing
        transfer_id = f"xfer-{uuid.uuid4()}"
        asked = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        taken = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": bootstrap_url(route.prefill),
            "remote_engine_id": engine.engine_id,
            "transfer_id": transfer_id,
        }
        fields = read_fields(intake.body)
        filled, decoded = for_prefill(fields, _params(asked)), with_fields(fields, _params(taken))
        try:
            return await call_both(
                self._upstream,
                intake,
                Leg("prefill", route.prefill, filled, {RANK_HEADER: rank}),
                Leg("decode", route.decode, decoded),
            )
        except LegFailedError:
            self._known.pop(route.prefill.url, None)
            raise

    async def _ranks(self, instance: Instance) -> dict[str, _Rank]:
        """Return the engine of every rank of an instance; raises LegFailedError."""
        now = time.monotonic()
        known = self._known.get(instance.url)
        if known is None or known.until_seconds <= now:
            self._known = {url: one for url, one in self._known.items() if one.until_seconds > now}
            known = self._known[instance.url] = _Known(await self._asked(instance), now + KNOWN_SECONDS)
        return known.ranks

    async def _asked(self, instance: Instance) -> dict[str, _Rank]:
        bootstrap = msgspec.structs.replace(instance, url=bootstrap_url(instance))
        try:
            async with asyncio.timeout(ANSWER_SECONDS), self._upstream.reading(bootstrap, "/query") as response:
                ranks = _ranks.decode(await response.content.read(ANSWER_BYTES))
        except (UnreachableError, TimeoutError, msgspec.DecodeError, UnicodeDecodeError) as error:
            message = f"the bootstrap server of {instance.name} did not say who serves there: {error}"
            raise LegFailedError(message, leg="prefill", eject=True) from error
        if not ranks:
            raise LegFailedError(f"the bootstrap server of {instance.name} knows no engine", leg="prefill", eject=True)
        return ranks


def _params(params: dict[str, str | bool]) -> dict[str, dict[str, str | bool]]:
    return {"kv_transfer_params": params}
