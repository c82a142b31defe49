"""Sends spans to an OpenTelemetry collector with OTLP over HTTP, from a thread of the SDK and a bounded queue.

Endpoint, headers, certificates, sampler (OTEL_TRACES_SAMPLER) and the queue's sizes (OTEL_BSP_*) are the SDK's own
environment variables. While the collector is away, spans are dropped and the log says so once.
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
from opentelemetry.trace import SpanKind, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from prfaas.util import LogOnce
from prfaas.wire.trace import TraceContext, read_trace

log = logging.getLogger(__name__)

CLOSE_SECONDS: Final = 2.0
# These loggers report every batch and every retry; `_LoggedExporter` logs what matters of it.
VERBOSE_LOGGERS: Final = ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal")

_PROPAGATOR: Final = TraceContextTextMapPropagator()


class OtlpTracer:
    """Starts the SDK's spans and exports them; see `tracing_from_environment`."""

    def __init__(self, service: str, attributes: Mapping[str, str], exporter: SpanExporter | None = None):
        for name in VERBOSE_LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        ours = Resource.create({"service.name": service, **attributes})
        self._provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_LoggedExporter(exporter or OTLPSpanExporter())))
        self._tracer = self._provider.get_tracer("prfaas")

    def start(self, name: str, parent: TraceContext, kind: str, at: int | None) -> tuple[SdkSpan, TraceContext]:
        """Begin a span, now or at a moment in unix nanoseconds; return it and the context of its children."""
        # Its own empty context: nothing that another library has made current is our parent.
        above = _PROPAGATOR.extract(parent.headers(), Context())
        span = self._tracer.start_span(name, above, SpanKind[kind.upper()], start_time=at)
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
        return span, read_trace(carrier)

    def close(self) -> None:
        """Send what waits, for at most CLOSE_SECONDS."""
        # The SDK would wait for half a minute where nobody answers.
        closing = threading.Thread(target=self._provider.shutdown, name="traces-close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


class _LoggedExporter(SpanExporter):
    """Passes batches on, and logs when the collector stops or begins to take them."""

    def __init__(self, exporter: SpanExporter):
        self._exporter = exporter
        self._once = LogOnce(log)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self._once.worked("spans", "the collector takes spans again")
        else:
            self._once.failed("spans", "the collector takes no spans: they are dropped, and requests not held up")
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
