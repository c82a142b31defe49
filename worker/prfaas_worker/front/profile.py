"""GET /v1/profile: what prefills cost here and how large their caches are, for planners and schedulers.

`prfaas.wire.profile` has the form of the answer and what its figures mean.
"""

import msgspec
from aiohttp import web

from prfaas.capacity.profile import cache_bytes, kv_bits_per_second, prefill_seconds
from prfaas.errors import RequestError
from prfaas.wire.engine import StartFailed
from prfaas.wire.profile import CurvePoint, Fitted, Profile, ProfileAnswer
from prfaas_worker.front.metrics import PROFILE_TOKENS
from prfaas_worker.front.serving import SERVING


async def read(request: web.Request) -> web.Response:
    """Serve GET /v1/profile."""
    serving = request.app[SERVING]
    profile = serving.metrics.profile
    if profile is None or not serving.engine.ready.done():
        raise RequestError("this instance has no profile yet; try again in a moment", status=404, code="no_profile")
    ready = serving.engine.ready.result()
    answer = ProfileAnswer(
        model=serving.options.model_name,
        instance=serving.options.instance,
        fingerprint="" if isinstance(ready, StartFailed) else ready.fingerprint,
        state_bytes=profile.state_bytes,
        token_bytes=profile.token_bytes,
        prefill=msgspec.convert(profile, Fitted, from_attributes=True),
        curve=tuple(_point(profile, tokens) for tokens in PROFILE_TOKENS),
    )
    return web.json_response(body=msgspec.json.encode(answer))


def _point(profile: Profile, tokens: int) -> CurvePoint:
    return CurvePoint(
        tokens=tokens,
        prefill_seconds=prefill_seconds(profile, tokens),
        cache_bytes=cache_bytes(profile, tokens),
        kv_bits_per_second=kv_bits_per_second(profile, tokens),
    )
