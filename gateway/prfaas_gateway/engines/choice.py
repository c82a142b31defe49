"""Which protocol a route is served by: that of its decode instance's engine."""

from prfaas.routing.facts import Route
from prfaas.wire.routes import EngineName
from prfaas_gateway.engines import Engine, LegFailedError
from prfaas_gateway.engines.prfaas import PrfaasEngine
from prfaas_gateway.engines.sglang import SglangEngine
from prfaas_gateway.engines.vllm_mooncake import VllmMooncakeEngine
from prfaas_gateway.engines.vllm_nixl import VllmNixlEngine
from prfaas_gateway.openai import Intake
from prfaas_gateway.upstream import Answer, Upstream


class Engines:
    """Every protocol, behind the one interface."""

    def __init__(self, upstream: Upstream):
        self._engines: dict[EngineName, Engine] = {
            "prfaas": PrfaasEngine(upstream),
            "vllm-nixl": VllmNixlEngine(upstream),
            "vllm-mooncake": VllmMooncakeEngine(upstream),
            "sglang": SglangEngine(upstream),
        }

    async def open(self, route: Route, intake: Intake) -> Answer:
        """Serve a request along a route; see `Engine.open`."""
        prefill, decode = route.prefill, route.decode
        if prefill is not None and prefill.engine != decode.engine:
            message = (
                f"{prefill.name} runs {prefill.engine} and {decode.name} {decode.engine}: give both pools one engine"
            )
            raise LegFailedError(message, leg="prefill", eject=True)
        return await self._engines[decode.engine].open(route, intake)
