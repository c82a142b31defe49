"""The protocol of a Dynamo frontend: one call, unchanged. Dynamo itself splits requests between its workers.

The gateway serves only the table's model. So a frontend that answers 404 has no workers yet, and another one may have.
"""

from prfaas_gateway.engines.shared import Attempt, Leg, LegFailedError, call
from prfaas_gateway.request import GatewayRequest
from prfaas_gateway.upstream import Answer, Upstream


class DynamoEngine:
    def __init__(self, upstream: Upstream):
        self._upstream = upstream

    async def open(self, request: GatewayRequest, attempt: Attempt) -> Answer:
        decode = attempt.route.decode
        answer = await call(self._upstream, request, attempt, Leg("decode", decode, request.body))
        if answer.status == 404:
            answer.close()
            message = f"{decode.name} does not know the model {request.model}: it has no workers"
            raise LegFailedError(message, leg="decode", eject=True, answer=answer)
        return answer
