"""The Prefill-as-a-Service API: a source's leg for callers that have token ids and no gateway."""

import logging

import msgspec
from aiohttp import web

from prfaas.wire.engine import Announced, GiveCache, Started
from prfaas.wire.prefill import PrefillOffer, PrefillRequest, is_whole_prefill
from prfaas.wire.trace import read_trace
from prfaas_worker.front.auth import COUNTED_AS
from prfaas_worker.front.engine_client import EngineError
from prfaas_worker.front.openai_bodies import read_body
from prfaas_worker.front.serving import (
    STATE,
    ServedModel,
    read_places,
    read_request,
    require,
    require_model,
    require_room,
    require_tokens,
)
from prfaas_worker.tokenizer import Tokenizer

log = logging.getLogger(__name__)


async def create(request: web.Request) -> web.StreamResponse:
    """POST /v1/prefills: offer a prompt's cache, and compute it. The answer says at once where the cache is, and ends
    when it is computed. A caller that closes the connection before cancels the prefill."""
    state = request.app[STATE]
    state.require_open()
    _, wanted = await read_request(request, _checked)
    state.require_open()
    with state.engine.call() as call:
        message = GiveCache(
            handle=call.handle,
            request_id=wanted.request_id,
            token_ids=wanted.token_ids,
            leg=wanted.leg,
            cache_salt=wanted.cache_salt,
            trace=read_trace(request.headers),
            places=read_places(request),
            caller=request.get(COUNTED_AS, ""),
        )
        state.engine.send(message)
        offered = await call.expect(Announced)
        response = web.StreamResponse(status=201)
        response.content_type = "application/json"
        await response.prepare(request)
        offer = PrefillOffer(data_port=state.options.data_port, end_token=offered.end_token)
        await response.write(msgspec.json.encode(offer))
        try:
            await call.expect(Started)
        except EngineError as error:
            log.warning("prefill of %s failed: %s", wanted.request_id, error)
            if request.transport is not None:  # the status is sent, so only a cut answer says it here
                request.transport.abort()
            return response
        call.finish()  # from here on its lease ends it
    await response.write_eof()
    return response


def _checked(data: bytes, served: ServedModel, _tokenizer: Tokenizer) -> PrefillRequest:
    wanted = read_body(data, PrefillRequest)
    require_model(wanted.model, served)
    require_tokens(wanted.token_ids, served)
    require_room(wanted.token_ids, served)
    rule = "must have two tokens at least: the last one is computed at the destination, and its cache does not cross"
    require(len(wanted.token_ids) > 1, "token_ids", rule)
    require(wanted.leg.role == "source", "leg.role", "must be source: a destination's leg is a completion")
    rule = "must have neither tokens nor prefix: the whole prompt is computed here"
    require(is_whole_prefill(wanted.leg), "leg", rule)
    return wanted
