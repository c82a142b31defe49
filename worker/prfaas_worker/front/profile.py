"""GET /v1/profile: what prefills cost here and how large their caches are, for planners and schedulers.

    {"model", "instance", "fingerprint", "state_bytes", "token_bytes",
     "prefill": {"fixed_seconds", "token_seconds", "squared_seconds", "samples", "max_tokens",
                 "relative_error"},
     "curve": [{"tokens", "prefill_seconds", "cache_bytes", "kv_bits_per_second"}]}

A prefill of n tokens behind s cached ones takes fixed + token * n + squared * ((s + n)^2 - s^2) seconds. Behind that
stand `samples` prefills of up to `max_tokens` tokens, which it misses by `relative_error` of their time in the mean;
beyond twice that length it is a guess. 0 samples mean that nothing was measured yet. `curve` shows the same at a few
lengths.
"""

import msgspec
from aiohttp import web

from prfaas.capacity.profile import cache_bytes, kv_bits_per_second, prefill_seconds
from prfaas.errors import RequestError
from prfaas.wire.engine import StartFailed
from prfaas.wire.profile import Profile
from prfaas_worker.front.metrics import PROFILE_TOKENS
from prfaas_worker.front.serving import SERVING


async def read(request: web.Request) -> web.Response:
    """Serve GET /v1/profile."""
    serving = request.app[SERVING]
    profile = serving.metrics.profile
    if profile is None or not serving.engine.ready.done():
        raise RequestError("this instance has no profile yet; try again in a moment", status=404, code="no_profile")
    ready = serving.engine.ready.result()
    names = {
        "model": serving.options.model_name,
        "instance": serving.options.instance,
        "fingerprint": "" if isinstance(ready, StartFailed) else ready.fingerprint,
    }
    return web.json_response(body=msgspec.json.encode(names | _figures(profile)))


def _figures(profile: Profile) -> dict[str, object]:
    fitted = ("fixed_seconds", "token_seconds", "squared_seconds", "samples", "max_tokens", "relative_error")
    return {
        "state_bytes": profile.state_bytes,
        "token_bytes": profile.token_bytes,
        "prefill": {field: getattr(profile, field) for field in fitted},
        "curve": [
            {
                "tokens": tokens,
                "prefill_seconds": prefill_seconds(profile, tokens),
                "cache_bytes": cache_bytes(profile, tokens),
                "kv_bits_per_second": kv_bits_per_second(profile, tokens),
            }
            for tokens in PROFILE_TOKENS
        ],
    }
