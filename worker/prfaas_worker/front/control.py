"""Endpoints for the operator and the scheduler: the role, the egress cap, the prefix cache, and the measured profile.

GET  /v1/profile            -> what prefills cost here and how large their caches are: `prfaas.wire.profile`
POST /v1/cache/reset        -> {"freed_pages": n}
GET  /v1/role               -> {"role": "prefill" | "decode" | "mixed"}
PUT  /v1/role {"role": ...} -> the same, once it is in force. No request is lost, no model loaded anew
GET  /v1/egress             -> {"mbps": n}: what all data connections together may send, null for no cap
PUT  /v1/egress {"mbps": n} -> the same, once it is in force, for transfers under way too
"""

from typing import Annotated, TypeVar

import msgspec
from aiohttp import web

from prfaas.capacity.profile import cache_bytes, kv_bits_per_second, prefill_seconds
from prfaas.errors import UNREADABLE, RequestError
from prfaas.wire.engine import CacheReset, EgressSet, ResetCache, Role, RoleSet, SetEgress, SetRole, StartFailed
from prfaas.wire.profile import CurvePoint, Fitted, Profile, ProfileAnswer
from prfaas_worker.front.metrics import PROFILE_TOKENS
from prfaas_worker.front.serving import STATE


class RoleBody(msgspec.Struct, frozen=True):
    role: Role


class EgressBody(msgspec.Struct, frozen=True):
    mbps: Annotated[int, msgspec.Meta(ge=1, le=100_000_000)] | None


B = TypeVar("B", RoleBody, EgressBody)


async def reset_cache(request: web.Request) -> web.Response:
    state = request.app[STATE]
    state.require_loaded()
    return web.json_response({"freed_pages": (await state.engine.ask(ResetCache, CacheReset)).freed_pages})


async def read_role(request: web.Request) -> web.Response:
    state = request.app[STATE]
    state.require_loaded()
    return _answer(RoleBody((await state.engine.stats()).role))


async def set_role(request: web.Request) -> web.Response:
    state = request.app[STATE]
    state.require_loaded()
    wanted = await _body(request, RoleBody, 'send {"role": "prefill"}, "decode" or "mixed"', "role")
    answer = await state.engine.ask(lambda handle: SetRole(handle, wanted.role), RoleSet)
    return _answer(RoleBody(answer.role))


async def read_egress(request: web.Request) -> web.Response:
    state = request.app[STATE]
    state.require_loaded()
    return _answer(EgressBody((await state.engine.stats()).egress_mbps))


async def set_egress(request: web.Request) -> web.Response:
    state = request.app[STATE]
    state.require_loaded()
    wanted = await _body(request, EgressBody, 'send {"mbps": 800}, or null for no cap', "mbps")
    answer = await state.engine.ask(lambda handle: SetEgress(handle, wanted.mbps), EgressSet)
    return _answer(EgressBody(answer.mbps))


async def read_profile(request: web.Request) -> web.Response:
    state = request.app[STATE]
    profile = state.metrics.profile
    if profile is None or not state.engine.ready.done():
        raise RequestError("this instance has no profile yet; try again in a moment", status=404, code="no_profile")
    ready = state.engine.ready.result()
    answer = ProfileAnswer(
        model=state.options.model_name,
        instance=state.options.instance,
        fingerprint="" if isinstance(ready, StartFailed) else ready.fingerprint,
        state_bytes=profile.state_bytes,
        token_bytes=profile.token_bytes,
        prefill=msgspec.convert(profile, Fitted, from_attributes=True),
        curve=tuple(_point(profile, tokens) for tokens in PROFILE_TOKENS),
        emulated=state.options.emulate,
    )
    return _answer(answer)


async def _body(request: web.Request, kind: type[B], want: str, param: str) -> B:
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except UNREADABLE as error:
        raise RequestError(f"{error}; {want}", param=param) from error


def _answer(body: msgspec.Struct) -> web.Response:
    return web.json_response(body=msgspec.json.encode(body))


def _point(profile: Profile, tokens: int) -> CurvePoint:
    return CurvePoint(
        tokens=tokens,
        prefill_seconds=prefill_seconds(profile, tokens),
        cache_bytes=cache_bytes(profile, tokens),
        kv_bits_per_second=kv_bits_per_second(profile, tokens),
    )
