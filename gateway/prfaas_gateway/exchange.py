"""One request while it is served: what is known of it, and what clients and metrics are told of how it went."""

from dataclasses import dataclass, field

import msgspec

from prfaas.errors import CapacityError, RequestError
from prfaas.routing.admission import Overload
from prfaas.routing.facts import Facts, Refusal, Route
from prfaas.wire import headers
from prfaas_gateway.account import Account
from prfaas_gateway.engines import LegFailedError
from prfaas_gateway.kv.manager import NOTHING, Found
from prfaas_gateway.metrics import Outcome
from prfaas_gateway.openai import Intake, LateError, LimitError, error_message
from prfaas_gateway.relay import Stream
from prfaas_gateway.upstream import Answer


@dataclass(slots=True)
class Exchange:
    """One request while it is served. `began` is the route it was first given; what it counts as never changes."""

    intake: Intake
    account: Account
    total_tokens: int
    found: Found = NOTHING
    """What is believed cached of the prompt."""
    threshold_tokens: int = 0
    began: Route | None = None
    tried: set[str] = field(default_factory=set[str])
    last_answer: Answer | None = None
    fell_back: bool = False
    outcome: Outcome = "failed"
    stream: Stream | None = None
    """The answer, once its first byte has gone to the client."""
    refused: set[str] = field(default_factory=set[str])
    """Instances that will not go on with this stream, however often they are asked."""

    def leg(self) -> Intake:
        """Return what the next worker is asked: the request, or to go on with its answer.

        Raises:
            BadInputError: the stream cannot be resumed.

        """
        if self.stream is None or self.stream.journal is None:
            return self.intake
        document = self.stream.journal.document()
        told = {**self.intake.headers, headers.RESUME: str(len(document))}
        return msgspec.structs.replace(self.intake, body=document + self.intake.body, headers=told)


def said(failure: LegFailedError) -> str:
    """Return what failed, in the worker's own words where it has said any."""
    words = error_message(failure.answer.body or b"") if failure.answer else ""
    return f"{failure}: {words}" if words else str(failure)


def outcome_of_error(error: Exception) -> Outcome:
    """Return what a request counts as that ended in an error of ours."""
    if isinstance(error, RequestError) and not isinstance(error, LimitError):
        return "invalid"
    return "rejected" if isinstance(error, (CapacityError, LimitError)) else "failed"


def outcome_of_status(status: int, fell_back: bool) -> Outcome:
    """Return what a request counts as that a worker answered."""
    if status >= 500:
        return "failed"
    if status >= 400:
        return "invalid"
    return "fallback" if fell_back else "ok"


def added_headers(exchange: Exchange, route: Route, status: int) -> dict[str, str]:
    """Return what the gateway tells the client about its own decision; see prfaas.wire.headers."""
    prefilled_by = route.prefill or route.decode
    added = {
        headers.REQUEST_ID: exchange.intake.request_id,
        headers.DECISION: exchange.began.kind if exchange.began else route.kind,
        headers.PREFILL_CLUSTER: prefilled_by.cluster,
        headers.PREFILL_INSTANCE: prefilled_by.name,
        headers.DECODE_INSTANCE: route.decode.name,
        headers.THRESHOLD_TOKENS: str(exchange.threshold_tokens),
    }
    if status < 400:
        added[headers.OUTCOME] = "fallback" if exchange.fell_back else "ok"
    return added


def too_late(late: Overload) -> LateError:
    """Return the error for a request that cannot begin in time."""
    return LateError(
        f"{late.wait_seconds:.1f} s of prefills wait before this one, and the policy's slo.ttftMillis is "
        f"{1000 * late.slo_seconds:.0f}; try again in {late.retry_after_seconds:.1f} s",
        late.retry_after_seconds,
    )


def no_capacity(refusal: Refusal, facts: Facts) -> CapacityError:
    """Return the error for a refusal, in a sentence that tells the causes apart."""
    if refusal.reason == "OffloadRejected":
        return CapacityError("the offload pool failed, and the policy's onOffloadFailure is Reject; try again later")
    known = sum(one.role == "decode" for one in facts.table.instances)
    return CapacityError(
        f"none of the {known} decode instances of policy {facts.table.policy} can take the request now; try again later"
    )
