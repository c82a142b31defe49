"""What an operator may change while the worker serves: forget the prefix cache, and take another role.

POST /v1/cache/reset        -> {"freed_pages": n}; POST /reset_prefix_cache is vLLM's name for it, without a body
GET  /v1/role               -> {"role": "prefill" | "decode" | "mixed"}
PUT  /v1/role {"role": ...} -> the same, once it is in force. No request is lost, no model loaded anew
GET  /v1/egress             -> {"mbps": n}: what all data connections together may send, null for no cap
PUT  /v1/egress {"mbps": n} -> the same, once it is in force, for transfers under way too
"""

from typing import Annotated, TypeVar

import msgspec
from aiohttp import web

from prfaas.errors import RequestError
from prfaas.wire.engine import CacheReset, EgressSet, ResetCache, Role, RoleSet, SetEgress, SetRole
from prfaas_worker.front.serving import SERVING, Serving


class RoleBody(msgspec.Struct, frozen=True):
    """Body of PUT /v1/role, and its answer."""

    role: Role


class EgressBody(msgspec.Struct, frozen=True):
    """Body of PUT /v1/egress, and its answer."""

    mbps: Annotated[int, msgspec.Meta(ge=1, le=100_000_000)] | None


B = TypeVar("B", RoleBody, EgressBody)


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
    asked = await _body(request, RoleBody, 'send {"role": "prefill"}, "decode" or "mixed"', "role")
    answer = await serving.engine.ask(lambda handle: SetRole(handle, asked.role), RoleSet)
    return _role(answer.role)


async def read_egress(request: web.Request) -> web.Response:
    """Serve GET /v1/egress."""
    serving = request.app[SERVING]
    serving.require_loaded()
    return _egress((await serving.engine.stats()).egress_mbps)


async def set_egress(request: web.Request) -> web.Response:
    """Serve PUT /v1/egress."""
    serving = request.app[SERVING]
    serving.require_loaded()
    asked = await _body(request, EgressBody, 'send {"mbps": 800}, or null for no cap', "mbps")
    answer = await serving.engine.ask(lambda handle: SetEgress(handle, asked.mbps), EgressSet)
    return _egress(answer.mbps)


async def _body(request: web.Request, kind: type[B], want: str, param: str) -> B:
    """Return the body of a request. Raises RequestError, with what is wanted, for another one."""
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{error}; {want}", param=param) from error


async def _reset(serving: Serving) -> int:
    serving.require_loaded()
    return (await serving.engine.ask(ResetCache, CacheReset)).freed_pages


def _role(role: Role) -> web.Response:
    return web.json_response(body=msgspec.json.encode(RoleBody(role)))


def _egress(mbps: int | None) -> web.Response:
    return web.json_response(body=msgspec.json.encode(EgressBody(mbps)))
