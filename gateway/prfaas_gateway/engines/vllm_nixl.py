"""vLLM with NixlConnector: two legs, one after the other; the decode instance pulls the cache.

    1. to P: the request with one token, no stream, and kv_transfer_params that ask it to keep the cache for a remote
    2. P's answer has kv_transfer_params that say where the cache lies
    3. to D: the request with those params, unchanged

Both legs carry the same x-request-id. A decode leg that fails leaves the cache at P until its lease ends (30 s).
"""

import msgspec

from prfaas.routing.facts import Route
from prfaas_gateway.engines import LegFailedError
from prfaas_gateway.engines.bodies import for_prefill, read_fields, with_fields
from prfaas_gateway.engines.legs import Leg, call
from prfaas_gateway.openai import Intake
from prfaas_gateway.upstream import Answer, Upstream

ASKS_FOR_CACHE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class _Prefilled(msgspec.Struct):
    kv_transfer_params: dict[str, msgspec.Raw] | None = None


_prefilled = msgspec.json.Decoder(_Prefilled)


class VllmNixlEngine:
    """Serves routes on vLLM instances that are joined by NIXL."""

    def __init__(self, upstream: Upstream):
        self._upstream = upstream

    async def open(self, route: Route, intake: Intake) -> Answer:
        """Serve a request along a route; see `Engine.open`."""
        if route.prefill is None:
            return await call(self._upstream, intake, Leg("decode", route.decode, intake.body))
        fields = read_fields(intake.body)
        body = for_prefill(fields, {"kv_transfer_params": ASKS_FOR_CACHE})
        answer = await call(self._upstream, intake, Leg("prefill", route.prefill, body))
        if answer.status >= 400:
            return answer  # the request is at fault, and would be at the other instance
        answer.close()
        params = self._where(route.prefill.name, answer)
        body = with_fields(fields, {"kv_transfer_params": params})
        return await call(self._upstream, intake, Leg("decode", route.decode, body))

    def _where(self, name: str, answer: Answer) -> dict[str, msgspec.Raw]:
        """Return what P says of the cache's place.

        Raises:
            LegFailedError: nothing: D would prefill again, and nobody would know.

        """
        try:
            found = _prefilled.decode(answer.body or b"").kv_transfer_params
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found = None
        if not found:
            message = f"{name} gave no kv_transfer_params; does it run with NixlConnector?"
            raise LegFailedError(message, leg="prefill", eject=True)
        return found
