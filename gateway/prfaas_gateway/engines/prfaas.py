"""The protocol of prfaas-worker: one call to the decode worker, which fetches the prefill itself.

A header names the prefill instance. The decode worker answers when the first token exists. So every earlier failure is
an HTTP status. 502 with code prefill_failed blames the prefill leg; 503 means a full or draining decode worker.
"""

import asyncio

from prfaas.errors import UnreachableError
from prfaas.wire import headers
from prfaas_gateway.engines.shared import Attempt, LegFailedError
from prfaas_gateway.openai import read_error
from prfaas_gateway.request import GatewayRequest
from prfaas_gateway.stream import StreamLog
from prfaas_gateway.upstream import Answer, Upstream


class PrfaasEngine:
    def __init__(self, upstream: Upstream):
        self._upstream = upstream

    async def open(self, request: GatewayRequest, attempt: Attempt) -> Answer:
        route, (sent, body) = attempt.route, _leg(request, attempt)
        if route.prefill is not None:
            sent |= {headers.PREFILL_URL: route.prefill.url, headers.PREFILL_CLUSTER: route.prefill.cluster}
        if route.prefix is not None:
            sent |= {headers.PREFIX_URL: route.prefix.url, headers.PREFIX_CLUSTER: route.prefix.cluster}
        try:
            answer = await self._upstream.post(route.decode, request.path, sent, body)
        except UnreachableError as error:
            raise LegFailedError(str(error), leg="decode", eject=True) from error
        if answer.status == 502 and route.prefill and _is_prefill_failed(answer):
            message = f"{route.decode.name} got no prefill from {route.prefill.name} in {route.prefill.cluster}"
            raise LegFailedError(message, leg="prefill", eject=True, answer=answer)
        if answer.status == 503:
            raise LegFailedError(f"{route.decode.name} is full or draining", leg="decode", eject=False, answer=answer)
        return answer


def _leg(request: GatewayRequest, attempt: Attempt) -> tuple[dict[str, str], bytes]:
    """Return headers and body of a leg that starts now: the request, or its resumption.

    Raises BadInputError if the stream cannot be resumed.
    """
    sent, body = dict(request.headers), request.body
    if isinstance(attempt.broken, StreamLog):
        document = attempt.broken.document()
        sent[headers.RESUME], body = str(len(document)), document + body
    if request.deadline_seconds is not None:
        # MIN_DEADLINE_SECONDS of the worker: with 0 it would answer 400 to a request that is merely late.
        left_seconds = max(0.001, request.deadline_seconds - asyncio.get_running_loop().time())
        sent[headers.DEADLINE_SECONDS] = f"{left_seconds:.3f}"
    return sent, body


def _is_prefill_failed(answer: Answer) -> bool:
    return read_error(answer.body or b"").get("code") == headers.CODE_PREFILL_FAILED
