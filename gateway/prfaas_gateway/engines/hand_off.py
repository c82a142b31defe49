"""The hand-off of the engines that have our mover: our worker, and vLLM with our connector.

The gateway names a transfer for each attempt anew: an id, an epoch and a token, and to the destination the place of the
source. Both legs leave at once. If the source dies, the destination computes the prompt itself, so its answer
continues. If the source refuses, only the gateway knows, and aborts the decode leg.

A prefix that another instance has cached is a transfer of its own, with a length: what the gateway's index says that
the source has. Its destination is the instance that prefills. The answer does not depend on the source's leg: without
its cache the destination computes.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from prfaas.telemetry.logs import line
from prfaas.wire import headers
from prfaas.wire.prefill import new_transfer
from prfaas.wire.routes import Instance
from prfaas_gateway.engines.shared import (
    Attempt,
    Leg,
    LegFailedError,
    call,
    call_both,
    call_to_its_end,
    for_prefill,
    with_fields,
)
from prfaas_gateway.request import Fields, GatewayRequest
from prfaas_gateway.upstream import Answer, Upstream

log = logging.getLogger(__name__)


class _Transfer(NamedTuple):
    """What the two sides of a transfer are told of it."""

    source: dict[str, Any]
    destination: dict[str, Any]


class _LegFields(NamedTuple):
    """The fields that each leg of an attempt adds to its body; None if it has no such leg."""

    prefix: dict[str, Any] | None
    prefill: dict[str, Any] | None
    decode: dict[str, Any]


async def call_legs(
    upstream: Upstream,
    request: GatewayRequest,
    attempt: Attempt,
    fields: Fields,
    answer_limit: str,
    decode_leg: Callable[[bytes], Leg],
) -> Answer:
    """Run all legs of a route at once, which have these fields; return as `call_both`. `decode_leg` makes one of a
    body."""
    route, named = attempt.route, _name_transfers(attempt)
    decode = decode_leg(with_fields(fields, named.decode))
    places = {name: value for name, value in decode.headers.items() if name == headers.PLACES}

    def source_leg(instance: Instance | None, added: dict[str, Any] | None) -> Leg | None:
        if instance is None or added is None:
            return None
        return Leg("prefill", instance, for_prefill(fields, added, answer_limit), places, decode.path)

    prefill = source_leg(route.prefill, named.prefill)
    async with _giving(upstream, request, attempt, source_leg(route.prefix, named.prefix)):
        if prefill is None:
            return await call(upstream, request, attempt, decode)
        return await call_both(upstream, request, attempt, prefill, decode, may_recompute=attempt.may_recompute)


def _name_transfers(attempt: Attempt) -> _LegFields:
    """Name the transfers of an attempt, and note there the one that brings the prompt's end."""
    route, prefix, incoming, prefill = attempt.route, None, None, None
    if route.prefix is not None:
        transfer = _name(route.prefix, route.prefill or route.decode, attempt, route.prefix_tokens)
        prefix, incoming = transfer.source, transfer.destination
    if route.prefill is not None:
        transfer = _name(route.prefill, route.decode, attempt)
        prefill = transfer.source if incoming is None else transfer.source | {"prefix": incoming}
        incoming = transfer.destination
    if incoming is not None:
        attempt.transfer_id = incoming["transfer_id"]
    decode = {} if incoming is None else {"kv_transfer_params": {"prfaas": incoming}}
    return _LegFields(_as_source(prefix), _as_source(prefill), decode)


def _as_source(leg: dict[str, Any] | None) -> dict[str, Any] | None:
    # Without `do_remote_decode` vLLM refuses a Messages request whose thinking budget exceeds its one token.
    return None if leg is None else {"kv_transfer_params": {"do_remote_decode": True, "prfaas": leg}}


def _name(source: Instance, destination: Instance, attempt: Attempt, tokens: int = 0) -> _Transfer:
    transfer = new_transfer()
    if tokens:
        transfer["tokens"] = tokens
    place = {
        "host": urlsplit(source.url).hostname,
        "port": source.data_port + attempt.ranks.get(source.name, 0) * source.rank_ports,
        "cluster": source.cluster,
    }
    if (known_by := attempt.place_of(source.cluster)) != source.cluster:
        place["place"] = known_by
    giving: dict[str, Any] = {"role": "source", **transfer}
    if source.rank_ports != destination.rank_ports:  # each learns how many tensor-parallel ranks the other has
        giving["ranks"], place["ranks"] = destination.rank_ports, source.rank_ports
    return _Transfer(giving, {"role": "destination", **transfer, **place})


@asynccontextmanager
async def _giving(
    upstream: Upstream, request: GatewayRequest, attempt: Attempt, leg: Leg | None
) -> AsyncIterator[None]:
    """Have an instance give a prefix while the block runs, in which the answer begins."""
    running = None if leg is None else asyncio.create_task(_give(upstream, request, attempt, leg))
    try:
        yield
    finally:
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def _give(upstream: Upstream, request: GatewayRequest, attempt: Attempt, leg: Leg) -> None:
    try:
        refusal = await call_to_its_end(upstream, request, attempt, leg)
        reason = "" if refusal is None else f"HTTP {refusal.status}"
    except (LegFailedError, TimeoutError) as error:
        reason = str(error)
    if reason:
        log.info(line(f"{leg.instance.name} gives no prefix: {reason}", request_id=request.request_id))
