"""What is told of a request when it is over: one log line and one span, of the same fields."""

import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field

from prfaas.routing.facts import Route
from prfaas.telemetry.logs import line, tell
from prfaas.telemetry.tracing import Span
from prfaas.wire import headers
from prfaas_gateway.metrics import Outcome
from prfaas_gateway.upstream import Answer

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Account:
    """Gathered while a request is served. `route` is the last that was taken, `reason` why it did not end well."""

    span: Span
    request_id: str = ""
    client: str = ""
    """Whose API key it came with; empty where none is asked for."""
    transfer_id: str = ""
    route: Route | None = None
    threshold_tokens: int = 0
    estimated_tokens: int = 0
    resumes: int = 0
    """Times that another worker went on with its stream."""
    status: int | None = None
    """None: the client left before there was one."""
    reason: str = ""
    prompt_tokens: int = 0
    """As a worker counted them; 0: none has."""
    cached_tokens: int = 0
    first_token_seconds: float | None = None
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """How long the request has been here."""
        return time.monotonic() - self.began

    def answered(self, answer: Answer) -> float:
        """Take in that the first token came, and what the worker counted; returns how long it took."""
        self.first_token_seconds = self.seconds
        with suppress(ValueError):  # an engine that reports no count
            self.prompt_tokens = int(answer.headers.get(headers.PROMPT_TOKENS, ""))
            self.cached_tokens = int(answer.headers.get(headers.CACHED_TOKENS, ""))
        return self.first_token_seconds

    def heard(self, answer: Answer | None) -> None:
        """Take in what a worker said of its transfer, also of one that failed."""
        if answer is not None:
            self.transfer_id = answer.headers.get(headers.TRANSFER_ID) or self.transfer_id

    def leg_failed(self, leg: str, instance: str, message: str) -> None:
        """Tell of a leg that failed at an instance."""
        log.warning(
            line(
                "leg failed",
                request_id=self.request_id,
                transfer_id=self.transfer_id,
                leg=leg,
                instance=instance,
                reason=message,
            )
        )
        self.span.event("leg failed", leg=leg, instance=instance, reason=message)

    def close(self, decision: str, outcome: Outcome) -> None:
        """Tell how it ended."""
        if outcome in ("failed", "rejected"):
            self.span.fail(self.reason or f"HTTP {self.status}")
        fields = self._fields(decision, outcome)
        if log.isEnabledFor(logging.INFO):
            trace_id, seconds = self.span.context.trace_id, self.seconds
            tell(log, line("request", **fields, trace_id=trace_id, seconds=seconds, reason=self.reason))
        self.span.set(**fields)
        self.span.end()

    def _fields(self, decision: str, outcome: Outcome) -> dict[str, str | int]:
        fields: dict[str, str | int] = {
            "request_id": self.request_id,
            "transfer_id": self.transfer_id,
            "decision": decision,
            "outcome": outcome,
            "estimated_tokens": self.estimated_tokens,
        }
        if self.client:
            fields["client"] = self.client
        if self.resumes:
            fields["resumes"] = self.resumes
        if self.status is not None:
            fields["status"] = self.status
        if self.route is not None:
            prefilled_by = self.route.prefill or self.route.decode
            fields |= {
                "pool": prefilled_by.pool,
                "cluster": prefilled_by.cluster,
                "prefill_instance": prefilled_by.name,
                "decode_instance": self.route.decode.name,
                "threshold_tokens": self.threshold_tokens,
                "why": self.route.reason,
            }
        return fields
