"""The Prefill-as-a-Service API: other instances have their prompts prefilled here and fetch the cache themselves."""

import msgspec
from aiohttp import web

from prfaas.errors import InternalError, RequestError
from prfaas.wire.engine import AskPrefill, CancelPrefill, Granted, PrefillAnswer, StartPrefill
from prfaas.wire.prefill import PrefillRequest
from prfaas_worker.front.bodies import read_body
from prfaas_worker.front.checks import require_model, require_room, require_tokens
from prfaas_worker.front.serving import SERVING


async def create(request: web.Request) -> web.Response:
    """POST /v1/prefills: queue a prompt and answer with its lease."""
    serving = request.app[SERVING]
    serving.require_open()
    asked = read_body(await request.read(), PrefillRequest)
    require_model(asked.model, serving.served)
    require_tokens(asked.token_ids, serving.served)
    require_room(asked.token_ids, serving.served)
    if not 0 <= asked.start_token < len(asked.token_ids):
        rule = f"must be 0 to {len(asked.token_ids) - 1}, the last prompt token's position"
        raise RequestError(f"start_token {rule}", param="start_token")
    with serving.engine.call() as call:
        message = StartPrefill(call.handle, asked.request_id, asked.token_ids, asked.start_token, asked.cache_salt)
        serving.engine.send(message)
        answer = await call.next()
        if not isinstance(answer, Granted):
            raise InternalError(f"the engine answered StartPrefill with {type(answer).__name__}")
        call.over()  # from here on the lease ends it
    return web.json_response(body=msgspec.json.encode(answer.grant), status=201)


async def read(request: web.Request) -> web.Response:
    """GET /v1/prefills/{id}: how far an undelivered prefill is."""
    serving, transfer_id = request.app[SERVING], request.match_info["id"]
    with serving.engine.call() as call:
        serving.engine.send(AskPrefill(call.handle, transfer_id))
        answer = await call.next()
        call.over()
    if not isinstance(answer, PrefillAnswer):
        raise InternalError(f"the engine answered AskPrefill with {type(answer).__name__}")
    if answer.status is None:
        text = f"there is no undelivered prefill {transfer_id!r}; it was delivered, cancelled or expired"
        raise RequestError(text, status=404, code="prefill_not_found")
    return web.json_response(body=msgspec.json.encode(answer.status))


async def delete(request: web.Request) -> web.Response:
    """DELETE /v1/prefills/{id}: forget an undelivered prefill; one that is gone already is fine."""
    request.app[SERVING].engine.send(CancelPrefill(request.match_info["id"]))
    return web.Response(status=204)
