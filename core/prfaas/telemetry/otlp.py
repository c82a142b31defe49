"""Spans sent to an OpenTelemetry collector with OTLP over HTTP, from a thread of the SDK's and a queue with an end.

Endpoint, headers, certificates, sampler (OTEL_TRACES_SAMPLER) and the queue's sizes (OTEL_BSP_*) are the SDK's own
environment variables. While the collector is away spans are dropped, and the log says so once.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span as SdkSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from prfaas.telemetry.tracing import Attribute, Kind, Span, Tracing
from prfaas.wire.trace import TraceContext, read_trace

log = logging.getLogger(__name__)

CLOSE_SECONDS: Final = 2.0
KINDS: Final[Mapping[Kind, SpanKind]] = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER}
# They tell of every batch and every retry; `_Watched` tells what matters of it.
TALKATIVE: Final = ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal")

_PROPAGATOR: Final = TraceContextTextMapPropagator()


class OtlpTracing(Tracing):
    """Starts spans that a collector hears of; see `tracing_from_environment`."""

    is_on = True

    def __init__(self, service: str, attributes: Mapping[str, str], exporter: SpanExporter | None = None):
        for name in TALKATIVE:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        ours = Resource.create({"service.name": service, **attributes})
        self._provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_Watched(exporter or OTLPSpanExporter())))
        self._tracer = self._provider.get_tracer("prfaas")

    def start(self, name: str, parent: TraceContext, kind: Kind = "internal", at: float | None = None, /) -> Span:
        """See Tracing."""
        # An empty context of its own: nothing that another library has made current is our parent.
        above = _PROPAGATOR.extract(parent.headers(), Context())
        return _OtlpSpan(self._tracer.start_span(name, above, KINDS[kind], start_time=_nanoseconds(at)))

    def close(self) -> None:
        """See Tracing."""
        # The SDK would wait for half a minute where nobody answers.
        closing = threading.Thread(target=self._provider.shutdown, name="traces-close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


class _OtlpSpan(Span):
    def __init__(self, span: SdkSpan):
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
        super().__init__(read_trace(carrier))
        self._span = span
        self._failed = False

    def set(self, **attributes: Attribute) -> None:
        self._span.set_attributes(_named(attributes))

    def event(self, name: str, at: float | None = None, **attributes: Attribute) -> None:
        self._span.add_event(name, _named(attributes), _nanoseconds(at))

    def fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            self._span.set_status(Status(StatusCode.ERROR, reason))

    def end(self, at: float | None = None) -> None:
        if self._span.is_recording():
            self._span.end(_nanoseconds(at))


class _Watched(SpanExporter):
    """Passes batches on, and tells when the collector stops or begins to take them."""

    def __init__(self, exporter: SpanExporter):
        self._exporter = exporter
        self._works = True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        works = result is SpanExportResult.SUCCESS
        if works != self._works:
            self._works = works
            if works:
                log.info("the collector takes spans again")
            else:
                log.warning("the collector takes no spans: they are dropped until it does, requests are not held up")
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _named(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    return {f"prfaas.{name}": value for name, value in attributes.items()}


def _nanoseconds(at: float | None) -> int | None:
    return None if at is None else round(at * 1e9)
