"""Sends disaggregated requests to engines: one file an engine, and the choice between them."""

from collections.abc import Callable, Mapping
from typing import Final

from prfaas.routing.facts import Route
from prfaas.wire.routes import EngineName
from prfaas_gateway.engines.dynamo import DynamoEngine
from prfaas_gateway.engines.prfaas import PrfaasEngine
from prfaas_gateway.engines.sglang import SglangEngine
from prfaas_gateway.engines.shared import EngineProtocol, Leg, LegFailedError, call
from prfaas_gateway.engines.tensorrt_llm import TensorRtLlmEngine
from prfaas_gateway.engines.vllm import VllmMooncakeEngine, VllmNixlEngine, VllmPrfaasEngine
from prfaas_gateway.request import GatewayRequest
from prfaas_gateway.upstream import Answer, Upstream

PROTOCOLS: Final[Mapping[EngineName, Callable[[Upstream], EngineProtocol]]] = {
    "prfaas": PrfaasEngine,
    "vllm-prfaas": VllmPrfaasEngine,
    "vllm-nixl": VllmNixlEngine,
    "vllm-mooncake": VllmMooncakeEngine,
    "sglang": SglangEngine,
    "tensorrt-llm": TensorRtLlmEngine,
    "dynamo": DynamoEngine,
}
"""How requests are sent, by the engine of the decode instance."""


class Engines:
    """Serves a route by the protocol of its decode instance's engine."""

    def __init__(self, upstream: Upstream):
        self._upstream = upstream
        self._protocols = {name: protocol(upstream) for name, protocol in PROTOCOLS.items()}

    async def open(self, route: Route, request: GatewayRequest) -> Answer:
        prefill, decode = route.prefill, route.decode
        if request.stream is None:
            # The log of an attempt that failed before its first byte, perhaps at another engine.
            request.resumable = None
        if prefill is not None and prefill.engine != decode.engine:
            message = (
                f"{prefill.name} runs {prefill.engine} and {decode.name} {decode.engine}: give both pools one engine"
            )
            raise LegFailedError(message, leg="prefill", eject=True)
        if request.stream is not None and (log := request.stream.log) and decode.record.resumed_by != log.resumed_by:
            request.refused.add(decode.name)
            message = f"{decode.name} runs {decode.engine}, which cannot resume another engine's answer"
            raise LegFailedError(message, leg="decode", eject=False)
        if not request.api.prefills:
            return await call(self._upstream, request, Leg("decode", decode, request.body))
        return await self._protocols[decode.engine].open(route, request)
