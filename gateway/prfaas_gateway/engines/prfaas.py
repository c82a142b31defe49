"""The protocol of prfaas-worker: both legs at once (hand_off.py), with the headers that are ours.

A worker answers when the first token exists. So every earlier failure is an HTTP status; 503 means a full or draining
one. The source leg gets only what concerns the prompt. Every stream asks for its token ids, and a broken one continues
as the same request, with the ids that the client has (token_log.py).
"""

import asyncio
from functools import partial
from typing import Any

from prfaas.errors import BadInputError
from prfaas.wire import headers
from prfaas_gateway.engines.hand_off import call_legs
from prfaas_gateway.engines.shared import Attempt, Leg, LegFailedError, added_to, call, with_fields
from prfaas_gateway.engines.token_log import STREAMS, DrawnLog, value_of
from prfaas_gateway.request import GatewayRequest
from prfaas_gateway.upstream import Answer, Upstream


class PrfaasEngine:
    def __init__(self, upstream: Upstream):
        self._upstream = upstream

    async def open(self, request: GatewayRequest, attempt: Attempt) -> Answer:
        route, fields = attempt.route, request.every_field  # in any case: they are checked when they are read
        asks = _asks_for_stream(request, attempt)
        if route.prefill is None and route.prefix is None:
            body = with_fields(fields, asks) if asks else request.body
            return await call(self._upstream, request, attempt, _decode_leg(request, attempt, body))
        leg, fields = partial(_decode_leg, request, attempt), added_to(fields, asks)
        return await call_legs(self._upstream, request, attempt, fields, request.api.answer_limit, leg)


def _asks_for_stream(request: GatewayRequest, attempt: Attempt) -> dict[str, Any]:
    """Return the fields that ask for a stream with its token ids, or for the rest of a broken one; none for a whole
    answer. Raises LegFailedError if the broken one cannot be read."""
    log = attempt.broken
    if log is None and request.path in STREAMS and value_of(request.every_field, "stream") is True:
        log = attempt.log = DrawnLog(request.path, request.every_field)
    try:
        return log.asks if isinstance(log, DrawnLog) else {}
    except BadInputError as error:
        message = f"the answer cannot continue: {error}"
        raise LegFailedError(message, leg="decode", eject=False, refuses=True) from error


def _decode_leg(request: GatewayRequest, attempt: Attempt, body: bytes) -> Leg:
    """Return a leg that starts now."""
    sent = dict(request.headers)
    if request.deadline_seconds is not None:
        # MIN_DEADLINE_SECONDS of the worker: with 0 it would answer 400 to a request that is merely late.
        left_seconds = max(0.001, request.deadline_seconds - asyncio.get_running_loop().time())
        sent[headers.DEADLINE_SECONDS] = f"{left_seconds:.3f}"
    return Leg("decode", attempt.route.decode, body, sent, awaits_piece=False)
