"""Sends disaggregated requests to engines: one file an engine, and the choice between them."""

from collections.abc import Callable, Mapping
from typing import Final

from prfaas.wire.routes import EngineName
from prfaas_gateway.engines.dynamo import DynamoEngine
from prfaas_gateway.engines.prfaas import PrfaasEngine
from prfaas_gateway.engines.sglang import SglangEngine
from prfaas_gateway.engines.shared import Attempt, EngineProtocol, Leg, LegFailedError, call
from prfaas_gateway.engines.tensorrt_llm import TensorRtLlmEngine
from prfaas_gateway.engines.vllm import VllmMooncakeEngine, VllmNixlEngine, VllmPrfaasEngine
from prfaas_gateway.request import GatewayRequest
from prfaas_gateway.upstream import Answer, Upstream

PROTOCOLS: Final[Mapping[EngineName, Callable[[Upstream], EngineProtocol]]] = {
    "prfaas": PrfaasEngine,
    "emulated": PrfaasEngine,
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

    async def open(self, request: GatewayRequest, attempt: Attempt) -> Answer:
        prefill, decode = attempt.route.prefill, attempt.route.decode
        if prefill is not None and prefill.engine != decode.engine:
            message = (
                f"{prefill.name} runs {prefill.engine} and {decode.name} {decode.engine}: give both pools one engine"
            )
            raise LegFailedError(message, leg="prefill", eject=True)
        if attempt.broken is not None and decode.record.resumed_by != attempt.broken.resumed_by:
            message = f"{decode.name} runs {decode.engine}, which cannot resume another engine's answer"
            raise LegFailedError(message, leg="decode", eject=False, refuses=True)
        if not request.api.prefills:
            return await call(self._upstream, request, attempt, Leg("decode", decode, request.body))
        return await self._protocols[decode.engine].open(request, attempt)
