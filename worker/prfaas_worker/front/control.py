"""What an operator may change while the worker serves: forget the prefix cache, and take another role.

POST /v1/cache/reset        -> {"freed_pages": n}; POST /reset_prefix_cache is vLLM's name for it, without a body
GET  /v1/role               -> {"role": "prefill" | "decode" | "mixed"}
PUT  /v1/role {"role": ...} -> the same, once it is in force. No request is lost, no model loaded anew
"""

import msgspec
from aiohttp import web

from prfaas.errors import InternalError, RequestError
from prfaas.wire.engine import CacheReset, ResetCache, Role, RoleSet, SetRole
from prfaas_worker.front.serving import SERVING, Serving


class RoleBody(msgspec.Struct, frozen=True):
    """Body of PUT /v1/role, and its answer."""

    role: Role


async def reset_cache(request: web.Request) -> web.Response:
    """Serve POST /v1/cache/reset."""
    return web.json_response({"freed_pages": await _reset(request.app[SERVING])})


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Serve POST /reset_prefix_cache."""
    await _reset(request.app[SERVING])
    return web.Response()


async def read_role(request: web.Request) -> web.Response:
    """Serve GET /v1/role."""
    serving = request.app[SERVING]
    serving.require_loaded()
    return _role((await serving.engine.stats()).role)


async def set_role(request: web.Request) -> web.Response:
    """Serve PUT /v1/role."""
    serving = request.app[SERVING]
    serving.require_loaded()
    try:
        asked = msgspec.json.decode(await request.read(), type=RoleBody)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f'{error}; send {{"role": "prefill"}}, "decode" or "mixed"', param="role") from error
    with serving.engine.call() as call:
        serving.engine.send(SetRole(call.handle, asked.role))
        answer = await call.next()
        call.over()
    if not isinstance(answer, RoleSet):
        raise InternalError(f"the engine answered SetRole with {type(answer).__name__}")
    return _role(answer.role)


async def _reset(serving: Serving) -> int:
    serving.require_loaded()
    with serving.engine.call() as call:
        serving.engine.send(ResetCache(call.handle))
        answer = await call.next()
        call.over()
    if not isinstance(answer, CacheReset):
        raise InternalError(f"the engine answered ResetCache with {type(answer).__name__}")
    return answer.freed_pages


def _role(role: Role) -> web.Response:
    return web.json_response(body=msgspec.json.encode(RoleBody(role)))
