"""Spans of gateway, workers and operator, with or without a collector that receives them.

Without an OTLP endpoint in the environment nothing of OpenTelemetry is imported. A span then only carries the context
that came in and goes on. With an endpoint, otlp.py makes a real span of the same calls. Nothing here waits or fails.
"""

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal, Self

from prfaas.errors import install_extra
from prfaas.wire.trace import TraceContext

if TYPE_CHECKING:
    from opentelemetry.trace import Span as SdkSpan

    from prfaas.telemetry.otlp import OtlpTracer

log = logging.getLogger(__name__)

Attribute = str | int | float | bool
SpanKind = Literal["internal", "server"]
ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class Span:
    """One piece of work. As a context manager it ends with the block, and records the error that ends the block.

    An attribute `name` is exported as `prfaas.name`.
    """

    def __init__(self, context: TraceContext, sdk: "SdkSpan | None" = None):
        self.context = context
        """The parent of work that is done for this span."""
        self._sdk = sdk
        self._failed = False

    def set(self, **attributes: Attribute) -> None:
        if self._sdk is not None:
            self._sdk.set_attributes(_prefixed(attributes))

    def rename(self, name: str) -> None:
        if self._sdk is not None:
            self._sdk.update_name(name)

    def event(self, name: str, at: float | None = None, **attributes: Attribute) -> None:
        """Add an event, now or at `at` in unix seconds."""
        if self._sdk is not None:
            self._sdk.add_event(name, _prefixed(attributes), _nanoseconds(at))

    def fail(self, reason: str) -> None:
        """Mark the span as failed; the first reason stays."""
        if self._sdk is not None and not self._failed:
            from opentelemetry.trace import Status, StatusCode

            self._failed = True
            self._sdk.set_status(Status(StatusCode.ERROR, reason))

    def end(self, at: float | None = None) -> None:
        """End the span now, or at `at` in unix seconds. Only the first end counts."""
        if self._sdk is not None and self._sdk.is_recording():
            self._sdk.end(_nanoseconds(at))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.fail(str(error) or type(error).__name__)
        self.end()


class Tracing:
    """Starts spans; without a tracer they are exported nowhere."""

    def __init__(self, tracer: "OtlpTracer | None" = None):
        self._tracer = tracer
        self.is_on = tracer is not None

    def start(self, name: str, parent: TraceContext, kind: SpanKind = "internal", at: float | None = None, /) -> Span:
        """Begin a span of this name, parent and kind, now or at a moment in unix seconds."""
        if self._tracer is None:
            return Span(parent)
        span, context = self._tracer.start(name, parent, kind, _nanoseconds(at))
        return Span(context, span)

    def close(self) -> None:
        """Send what waits, but only for a moment."""
        if self._tracer is not None:
            self._tracer.close()


OFF: Final = Tracing()


def tracing_from_environment(service: str, attributes: Mapping[str, str]) -> Tracing:
    """Return tracing as OpenTelemetry's environment variables ask for it, OFF where they name no OTLP endpoint.

    The environment may name another `service.name`. Empty attributes are left out.
    """
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return OFF
    try:
        from prfaas.telemetry.otlp import OtlpTracer

        return Tracing(OtlpTracer(service, {name: value for name, value in attributes.items() if value}))
    except Exception as error:  # whatever is wrong with it, requests are served
        log.warning("no traces: %r; %s, or unset %s", error, install_extra("otel"), " and ".join(ENDPOINTS))
        return OFF


def _prefixed(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    return {f"prfaas.{name}": value for name, value in attributes.items()}


def _nanoseconds(at: float | None) -> int | None:
    return None if at is None else round(at * 1e9)
