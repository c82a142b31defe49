"""The legs of engines of others: how one that failed is told, and two that run at once."""

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from prfaas.errors import UnreachableError
from prfaas.routing.facts import Leg as LegName
from prfaas.wire.routes import Instance
from prfaas_gateway.engines import LegFailedError
from prfaas_gateway.openai import Intake
from prfaas_gateway.upstream import Answer, Upstream

OURS = "x-prfaas-"


class Leg(NamedTuple):
    """One call to one instance."""

    name: LegName
    instance: Instance
    body: bytes
    headers: Mapping[str, str] = {}


def plain_headers(intake: Intake) -> dict[str, str]:
    """Return a request's headers as an engine of others is sent them: the request's id, and none of ours."""
    return {name: value for name, value in intake.headers.items() if not name.lower().startswith(OURS)}


async def call(upstream: Upstream, intake: Intake, leg: Leg) -> Answer:
    """Run one leg up to its answer, which may be a refusal of the request itself (4xx).

    Raises:
        LegFailedError: nobody is there, or the instance cannot serve (5xx).

    """
    try:
        answer = await upstream.post(leg.instance, intake.path, {**plain_headers(intake), **leg.headers}, leg.body)
    except UnreachableError as error:
        raise LegFailedError(str(error), leg=leg.name, eject=True) from error
    if answer.status >= 500 and (leg.name == "prefill" or answer.status == 503):
        is_full = answer.status == 503
        answer.close()
        message = f"{leg.instance.name} answered HTTP {answer.status} to its {leg.name} leg"
        raise LegFailedError(message, leg=leg.name, eject=not is_full, answer=answer)
    return answer


async def call_both(upstream: Upstream, intake: Intake, prefill: Leg, decode: Leg) -> Answer:
    """Run two legs at once and return the answer of the decode leg, or a prefill instance's refusal of the request.

    Raises:
        LegFailedError: either failed; the other is aborted.

    """
    filling = asyncio.create_task(_to_its_end(upstream, intake, prefill))
    decoding = asyncio.create_task(call(upstream, intake, decode))
    try:
        await asyncio.wait({filling, decoding}, return_when=asyncio.FIRST_COMPLETED)
        if filling.done() and (refusal := filling.result()) is not None:
            await _drop(decoding, filling)
            return refusal
        return _Tied(await decoding, filling)
    except BaseException:
        await _drop(decoding, filling)
        raise


async def _to_its_end(upstream: Upstream, intake: Intake, leg: Leg) -> Answer | None:
    """Run a prefill leg; None when it has done its work, or its refusal of the request."""
    answer = await call(upstream, intake, leg)
    try:
        if answer.body is None:
            while await answer.content.readany():
                pass  # nobody reads that token
        return answer if answer.status >= 400 else None
    finally:
        answer.close()


async def _drop(decoding: asyncio.Task[Answer], filling: asyncio.Task[Answer | None]) -> None:
    """Abort both legs, however far they are."""
    decoding.cancel()
    filling.cancel()
    (answer, _) = await asyncio.gather(decoding, filling, return_exceptions=True)
    if isinstance(answer, Answer):
        answer.close()


class _Tied(Answer):
    """The answer of a decode leg whose prefill leg may still run: when one is given up, so is the other."""

    def __init__(self, answer: Answer, filling: asyncio.Task[Answer | None]):
        self.status, self.headers, self.body = answer.status, answer.headers, answer.body
        self._answer = answer
        self._response = answer._response  # it takes the answer's place
        self._filling = filling
        filling.add_done_callback(self._prefill_ended)

    def close(self) -> None:
        """End both legs."""
        super().close()
        self._filling.cancel()

    def _prefill_ended(self, filling: asyncio.Task[Answer | None]) -> None:
        """Cut the answer off when its prefill failed: it would wait for a cache that never comes."""
        if not filling.cancelled() and (filling.exception() is not None or filling.result() is not None):
            self._answer.close()
