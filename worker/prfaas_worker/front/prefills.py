"""The Prefill-as-a-Service API: other instances have their prompts prefilled here and fetch the cache themselves."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web

from prfaas.errors import InternalError, RequestError
from prfaas.wire.engine import AskPrefill, CancelPrefill, Granted, PrefillAnswer, StartPrefill, StartPrefix
from prfaas.wire.prefill import PrefillRequest, PrefixRequest
from prfaas.wire.trace import TraceContext, read_trace
from prfaas_worker.front.auth import CALLER_CLUSTER
from prfaas_worker.front.openai_bodies import read_body
from prfaas_worker.front.serving import (
    STATE,
    ServedModel,
    read_request,
    require,
    require_instance,
    require_model,
    require_room,
    require_tokens,
)
from prfaas_worker.tokenizer import Tokenizer

Asked = TypeVar("Asked", PrefillRequest, PrefixRequest)


async def create(request: web.Request) -> web.Response:
    """POST /v1/prefills: queue a prompt and answer with its lease."""
    return await _grant(request, PrefillRequest, StartPrefill)


async def create_prefix(request: web.Request) -> web.Response:
    """POST /v1/prefixes: lease a cached prefix; 404 if it is no longer than the caller's."""
    return await _grant(request, PrefixRequest, StartPrefix)


async def read(request: web.Request) -> web.Response:
    """GET /v1/prefills/{id}: the progress of an undelivered prefill."""
    state, transfer_id = request.app[STATE], request.match_info["id"]
    answer = await state.engine.ask(lambda handle: AskPrefill(handle, transfer_id), PrefillAnswer)
    if answer.status is None:
        text = f"there is no undelivered prefill {transfer_id!r}; it was delivered, cancelled or expired"
        raise RequestError(text, status=404, code="prefill_not_found")
    return web.json_response(body=msgspec.json.encode(answer.status))


async def delete(request: web.Request) -> web.Response:
    """DELETE /v1/prefills/{id}: end an undelivered prefill; succeeds if it is gone."""
    request.app[STATE].engine.send(CancelPrefill(request.match_info["id"]))
    return web.Response(status=204)


async def _grant(
    request: web.Request,
    kind: type[Asked],
    message: Callable[[int, Asked, str, TraceContext], StartPrefill | StartPrefix],
) -> web.Response:
    state = request.app[STATE]
    state.require_open()
    _, wanted = await read_request(request, partial(_checked, kind))
    state.require_open()
    with state.engine.call() as call:
        if isinstance(wanted, PrefillRequest):
            require_instance(wanted.prefix_url, state.options, "prefix_url")
        state.engine.send(message(call.handle, wanted, request[CALLER_CLUSTER], read_trace(request.headers)))
        answer = await call.next()
        if not isinstance(answer, Granted):
            raise InternalError(f"the engine answered a {kind.__name__} with {type(answer).__name__}")
        call.finish()  # from here on the lease ends it
    return web.json_response(body=msgspec.json.encode(answer.grant), status=201)


def _checked(kind: type[Asked], body: bytes, served: ServedModel, _tokenizer: Tokenizer) -> Asked:
    wanted = read_body(body, kind)
    require_model(wanted.model, served)
    require_tokens(wanted.token_ids, served)
    require_room(wanted.token_ids, served)
    last = len(wanted.token_ids) - 1
    require(0 <= wanted.start_token <= last, "start_token", f"must be 0 to {last}, the last prompt token's position")
    return wanted
