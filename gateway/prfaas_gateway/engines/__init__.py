"""How engines are asked for a disaggregated request: one file a protocol.

An engine's `open` runs all legs of one route up to the answer that goes to the client. It reports which leg failed and
leaves what happens then to `prfaas.routing`.
"""

from typing import Protocol

from prfaas.errors import PeerError
from prfaas.routing.facts import Leg, Route
from prfaas_gateway.openai import Intake
from prfaas_gateway.upstream import Answer


class LegFailedError(PeerError):
    """A leg failed before any byte of the answer was relayed: the request may be sent again, elsewhere.

    Args:
        message: what failed and where.
        leg: the leg at fault.
        eject: whether the instance should be left alone for a while; not when it is merely full.
        answer: what the worker said, if it said anything, for the client in case nobody else can serve.

    """

    def __init__(self, message: str, *, leg: Leg, eject: bool, answer: Answer | None = None):
        super().__init__(message)
        self.leg: Leg = leg
        self.eject = eject
        self.answer = answer


class Engine(Protocol):
    """A protocol between gateway and workers."""

    async def open(self, route: Route, intake: Intake) -> Answer:
        """Serve a request along a route and return the answer, from its first token on.

        Raises:
            LegFailedError: a leg failed; nothing has reached the client.
            TimeoutError: nobody failed, but the first token did not come in time.

        """
        ...
