"""The protocol of SGLang with disaggregation: the same body to both instances at once, with a common room number.

The client gets the decode instance's answer. Each prompt of a batch, and each answer to a chat, has a room, as SGLang's
own router does it. For several answers to each prompt of a batch that router's rooms would meet twice. So there the
gateway gives one number, from which SGLang counts on. A decode instance cannot prefill, so a policy needs a local
prefill pool for prompts that are not offloaded.
"""

import re
import secrets

from prfaas.errors import CapacityError
from prfaas.names import BOOTSTRAP_PORT
from prfaas_gateway.engines.shared import Attempt, Leg, bootstrap_host, call_both, prompts, with_fields
from prfaas_gateway.request import Fields, GatewayRequest
from prfaas_gateway.upstream import Answer, Upstream

# SGLang keeps rooms as signed 64-bit integers, and its own router draws them from 0 to 2^63 - 1.
ROOM_BITS = 63
_FEW = re.compile(rb"[1-9]\d?")


class SglangEngine:
    def __init__(self, upstream: Upstream):
        self._upstream = upstream

    async def open(self, request: GatewayRequest, attempt: Attempt) -> Answer:
        route = attempt.route
        if route.prefill is None:  # a decode instance waits for a cache, and computes none itself
            raise CapacityError("no prefill instance of SGLang can serve; give the policy a local prefill pool")
        fields = request.every_field
        host, count = bootstrap_host(route.prefill), _rooms(fields)
        many = count or 1
        hosts, ports = [host] * many, [BOOTSTRAP_PORT] * many
        rooms = [secrets.randbits(ROOM_BITS) for _ in range(many)]
        meeting = {"bootstrap_host": hosts, "bootstrap_port": ports, "bootstrap_room": rooms}
        if count is None:
            meeting = {name: values[0] for name, values in meeting.items()}
        body = with_fields(fields, meeting)
        prefill, decode = Leg("prefill", route.prefill, body), Leg("decode", route.decode, body)
        return await call_both(self._upstream, request, attempt, prefill, decode)


def _rooms(fields: Fields) -> int | None:
    """Return the number of rooms that a request names; None: one number, and SGLang counts on from it."""
    answers = bytes(fields.get("n", b"1"))
    if answers in (b"1", b"null"):
        return prompts(fields)
    return int(answers) if "messages" in fields and _FEW.fullmatch(answers) else None
