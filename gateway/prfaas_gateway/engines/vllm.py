"""The protocols of vLLM instances with our connector, NixlConnector or MooncakeConnector.

Our connector gets both legs at once (hand_off.py).

NixlConnector runs two legs one after the other; the decode instance pulls the cache.

    1. to the prefill instance: the request with one token, no stream, and kv_transfer_params that ask to keep the cache
    2. its answer has kv_transfer_params with the cache's place
    3. to the decode instance: the request with those params, unchanged

Both legs carry one x-request-id. After a failed decode leg the prefill instance keeps the cache for its 30 s lease.

MooncakeConnector runs two legs at once with a common transfer id from the gateway. The prefill instance's bootstrap
server maps its data-parallel ranks to engine ids. An engine's id changes at a restart, so the gateway asks again after
a failure and at intervals.
"""

import asyncio
import random
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from prfaas.errors import UNREADABLE, UnreachableError
from prfaas.wire import headers
from prfaas.wire.routes import Instance
from prfaas_gateway.engines.hand_off import call_legs
from prfaas_gateway.engines.shared import (
    Attempt,
    Leg,
    LegFailedError,
    bootstrap_url,
    call,
    call_both,
    check_begun,
    for_prefill,
    with_fields,
)
from prfaas_gateway.engines.vllm_legs import VllmCall, prepare
from prfaas_gateway.request import GatewayRequest
from prfaas_gateway.upstream import Answer, Upstream

KNOWN_SECONDS: Final = 30.0
ANSWER_SECONDS: Final = 5.0
ANSWER_BYTES: Final = 64 * 1024
ASKS_FOR_CACHE: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class VllmPrfaasEngine:
    def __init__(self, upstream: Upstream):
        self._upstream = upstream

    async def open(self, request: GatewayRequest, attempt: Attempt) -> Answer:
        route, vllm_call = attempt.route, await prepare(self._upstream, request, attempt)
        leg = partial(Leg, "decode", route.decode, path=vllm_call.path)
        if route.prefill is None and route.prefix is None:
            answer = await call(self._upstream, request, attempt, leg(vllm_call.body))
        else:
            limit = vllm_call.answer_limit
            answer = await call_legs(self._upstream, request, attempt, vllm_call.fields, limit, leg)
        return check_begun(answer, with_prefill=route.prefill is not None)


class _VllmEngine(ABC):
    def __init__(self, upstream: Upstream):
        self._upstream = upstream

    async def open(self, request: GatewayRequest, attempt: Attempt) -> Answer:
        vllm_call = await prepare(self._upstream, request, attempt)
        if attempt.route.prefill is not None:
            return await self._offloaded(attempt.route.prefill, request, attempt, vllm_call)
        leg = Leg("decode", attempt.route.decode, vllm_call.body, path=vllm_call.path)
        return check_begun(await call(self._upstream, request, attempt, leg), with_prefill=False)

    @abstractmethod
    async def _offloaded(
        self, prefill: Instance, request: GatewayRequest, attempt: Attempt, vllm_call: VllmCall
    ) -> Answer: ...


class _Prefilled(msgspec.Struct):
    kv_transfer_params: dict[str, msgspec.Raw] | None = None


_prefilled = msgspec.json.Decoder(_Prefilled)


class VllmNixlEngine(_VllmEngine):
    async def _offloaded(
        self, prefill: Instance, request: GatewayRequest, attempt: Attempt, vllm_call: VllmCall
    ) -> Answer:
        body = for_prefill(vllm_call.fields, {"kv_transfer_params": ASKS_FOR_CACHE}, vllm_call.answer_limit)
        answer = await call(self._upstream, request, attempt, Leg("prefill", prefill, body, path=vllm_call.path))
        if answer.status >= 400:
            return answer  # the request is at fault, and would fail at the other instance too
        answer.close()
        params = self._where(prefill.name, answer)
        body = with_fields(vllm_call.fields, {"kv_transfer_params": params})
        leg = Leg("decode", attempt.route.decode, body, path=vllm_call.path)
        return check_begun(await call(self._upstream, request, attempt, leg), with_prefill=True)

    def _where(self, name: str, answer: Answer) -> dict[str, msgspec.Raw]:
        """Return the prefill instance's kv_transfer_params.

        Raises LegFailedError if there are none: the decode instance would silently prefill again.
        """
        try:
            found = _prefilled.decode(answer.body or b"").kv_transfer_params
        except UNREADABLE:
            found = None
        if not found:
            message = f"{name} gave no kv_transfer_params; does it run with NixlConnector?"
            raise LegFailedError(message, leg="prefill", eject=True)
        return found


class _Rank(msgspec.Struct):
    engine_id: str


class _Known(NamedTuple):
    ranks: dict[str, _Rank]
    until_seconds: float


_ranks = msgspec.json.Decoder(dict[str, _Rank])


class VllmMooncakeEngine(_VllmEngine):
    def __init__(self, upstream: Upstream):
        super().__init__(upstream)
        self._known: dict[str, _Known] = {}

    async def _offloaded(
        self, prefill: Instance, request: GatewayRequest, attempt: Attempt, vllm_call: VllmCall
    ) -> Answer:
        ranks = await self._ranks(prefill)
        chosen = str(attempt.ranks.get(prefill.name, ""))
        rank = chosen if chosen in ranks else random.choice(list(ranks))  # noqa: S311 - spreads load, guards nothing
        transfer_id = f"xfer-{uuid.uuid4()}"
        source = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        destination = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": bootstrap_url(prefill),
            "remote_engine_id": ranks[rank].engine_id,
            "transfer_id": transfer_id,
        }
        filled = for_prefill(vllm_call.fields, _params(source), vllm_call.answer_limit)
        decoded = with_fields(vllm_call.fields, _params(destination))
        try:
            answer = await call_both(
                self._upstream,
                request,
                attempt,
                Leg("prefill", prefill, filled, {headers.DATA_RANK: rank}, path=vllm_call.path),
                Leg("decode", attempt.route.decode, decoded, path=vllm_call.path),
            )
            return check_begun(answer, with_prefill=True)
        except LegFailedError:
            self._known.pop(prefill.url, None)
            raise

    async def _ranks(self, instance: Instance) -> dict[str, _Rank]:
        """Return the engine id of every rank of an instance."""
        now = time.monotonic()
        known = self._known.get(instance.url)
        if known is None or known.until_seconds <= now:
            self._known = {url: one for url, one in self._known.items() if one.until_seconds > now}
            known = self._known[instance.url] = _Known(await self._read_ranks(instance), now + KNOWN_SECONDS)
        return known.ranks

    async def _read_ranks(self, instance: Instance) -> dict[str, _Rank]:
        bootstrap = msgspec.structs.replace(instance, url=bootstrap_url(instance))
        try:
            async with asyncio.timeout(ANSWER_SECONDS), self._upstream.reading(bootstrap, "/query") as response:
                ranks = _ranks.decode(await response.content.read(ANSWER_BYTES))
        except (UnreachableError, TimeoutError, *UNREADABLE) as error:
            message = f"the bootstrap server of {instance.name} did not name its engines: {error}"
            raise LegFailedError(message, leg="prefill", eject=True) from error
        if not ranks:
            raise LegFailedError(f"the bootstrap server of {instance.name} knows no engine", leg="prefill", eject=True)
        return ranks


def _params(params: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {"kv_transfer_params": params}
