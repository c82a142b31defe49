"""Proves that tracing costs nothing where it is off, and delays nothing where it is on: not with a collector that is
slow, away or wrong, and not with more spans than it takes.
"""

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from tests.waiting import eventually

from prfaas.telemetry.otlp import OtlpTracer
from prfaas.telemetry.tracing import OFF, Tracing, tracing_from_environment
from prfaas.wire.trace import NO_TRACE, TraceContext

CALLER = TraceContext("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "vendor=1")
UNTRACED = """
import sys
import prfaas_gateway.server, prfaas_worker.front.server
from prfaas.telemetry.tracing import OFF, Tracing, tracing_from_environment
assert tracing_from_environment("x", {}) is OFF
found = [name for name in sys.modules if name.partition(".")[0] in ("opentelemetry", "google", "requests")]
assert not found, found
"""


class Exporter(SpanExporter):
    """A collector that a test configures."""

    def __init__(self, takes: Callable[[], bool] = lambda: True):
        self.takes = takes
        self.spans: list[ReadableSpan] = []
        self.batches = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        takes = self.takes()
        self.batches += 1
        self.spans += spans
        return SpanExportResult.SUCCESS if takes else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        pass


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Export at once, and by nothing that the machine's environment says."""
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_SAMPLER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")


@pytest.mark.system
def test_without_an_endpoint_gateway_and_front_import_nothing_of_it():
    ran = subprocess.run([sys.executable, "-c", UNTRACED], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_without_tracing_the_callers_context_is_forwarded():
    with OFF.start("request", CALLER, "server") as span:
        span.set(a=1)
        span.event("b", c=2)
        span.fail("d")
        assert span.context == CALLER


def test_a_missing_or_broken_library_is_a_warning_and_no_more(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "prfaas.telemetry.otlp", None)
    assert tracing_from_environment("x", {}) is OFF
    assert "pip install '.[otel]'" in caplog.text


def test_a_span_continues_the_callers_trace_and_the_next_ones_continue_it():
    exporter = Exporter()
    tracing = Tracing(OtlpTracer("s", {"prfaas.instance": "i"}, exporter))
    with tracing.start("outer", CALLER) as outer:
        tracing.start("inner", outer.context, "server", 1000.0).end(1001.5)
    tracing.close()
    inner, above = exporter.spans
    assert (inner.start_time, inner.end_time) == (1000_000_000_000, 1001_500_000_000)
    assert inner.parent.span_id == above.context.span_id
    assert f"{above.parent.span_id:016x}" == CALLER.traceparent[36:52]
    assert outer.context.trace_id == CALLER.trace_id
    assert outer.context.tracestate == CALLER.tracestate
    assert above.resource.attributes["service.name"] == "s"


def test_the_error_that_ends_a_block_is_the_spans_and_the_first_reason_stays():
    exporter = Exporter()
    tracing = Tracing(OtlpTracer("s", {}, exporter))
    span = tracing.start("x", NO_TRACE)
    span.fail("first")
    with pytest.raises(ValueError, match="second"), span:
        raise ValueError("second")
    span.end()  # again
    tracing.close()
    (found,) = exporter.spans
    assert (found.status.is_ok, found.status.description) == (False, "first")


def test_the_sampler_is_the_environments_and_what_is_not_sampled_passes_on(monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    exporter = Exporter()
    tracing = Tracing(OtlpTracer("s", {}, exporter))
    with tracing.start("x", CALLER) as span:
        assert span.context.trace_id == CALLER.trace_id
        assert span.context.traceparent.endswith("-00"), "later spans do not sample it either"
    tracing.close()
    assert exporter.spans == []


def test_a_collector_that_hangs_delays_no_request_and_the_queue_has_an_end(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "50")
    answers = threading.Event()
    exporter = Exporter(lambda: answers.wait(30))
    tracing = Tracing(OtlpTracer("s", {}, exporter))
    for _ in range(5000):  # none of these waits, or the test would
        tracing.start("x", NO_TRACE).end()
    answers.set()
    tracing.close()
    assert 100 <= len(exporter.spans) <= 150, "what the queue had room for, and the batch that hung"


@pytest.mark.system
def test_a_collector_that_is_away_costs_one_line_until_it_is_back(caplog):
    caplog.set_level(logging.INFO)
    exporter = Exporter(takes=lambda: False)
    tracing = Tracing(OtlpTracer("s", {}, exporter))

    def export() -> None:
        before = exporter.batches
        tracing.start("x", NO_TRACE).end()
        eventually(lambda: exporter.batches > before, "another batch is exported")

    for _ in range(3):
        export()
    exporter.takes = lambda: True
    for _ in range(2):
        export()
    tracing.close()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "takes no spans" in caplog.records[0].message


@pytest.mark.system
def test_an_endpoint_that_does_not_listen_is_one_line_too(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    tracing = tracing_from_environment("s", {"prfaas.instance": ""})
    tracing.start("x", NO_TRACE).end()
    eventually(lambda: "takes no spans" in caplog.text, "the collector's silence is logged")
    tracing.start("x", NO_TRACE).end()
    tracing.close()
    assert [record.name for record in caplog.records] == ["prfaas.telemetry.otlp"]
