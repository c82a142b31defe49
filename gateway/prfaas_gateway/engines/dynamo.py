"""The protocol of a Dynamo frontend: one call, unchanged. Dynamo itself splits requests between its workers."""

from prfaas.routing.facts import Route
from prfaas_gateway.engines.shared import Leg, call
from prfaas_gateway.request import GatewayRequest
from prfaas_gateway.upstream import Answer, Upstream


class DynamoEngine:
    def __init__(self, upstream: Upstream):
        self._upstream = upstream

    async def open(self, route: Route, request: GatewayRequest) -> Answer:
        return await call(self._upstream, request, Leg("decode", route.decode, request.body))
