"""An OpenTelemetry collector's OTLP/HTTP port: takes spans as protobuf, and shows them to a test."""

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from ...waiting import eventually


class Span(NamedTuple):
    """A span as it came; `error` is None where it did not fail."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    began: float
    ended: float
    attributes: dict[str, object]
    events: list[str]
    error: str | None


class Collector:
    """Listens on loopback while the block runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                if self.path == "/v1/traces":
                    collector.take(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Collector":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="collector", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def take(self, request: ExportTraceServiceRequest) -> None:
        """Keep what came."""
        for resource in request.resource_spans:
            about = {one.key: _value(one.value) for one in resource.resource.attributes}
            for scope in resource.scope_spans:
                with self._lock:
                    self._spans += [_read_span(about, span) for span in scope.spans]

    def trace(self, trace_id: str, *names: str) -> list[Span]:
        """Wait until a trace has a span of each name, as often as it is named, and return all that it has then."""

        def found() -> list[Span]:
            with self._lock:
                return [span for span in self._spans if span.trace_id == trace_id]

        eventually(lambda: sorted(names) == sorted(span.name for span in found()), lambda: f"{names}, but {found()}")
        return found()


def _read_span(about: dict[str, object], span) -> Span:
    failed = span.status.code == span.status.STATUS_CODE_ERROR
    return Span(
        service=str(about["service.name"]),
        instance=str(about.get("prfaas.instance", "")),
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        began=span.start_time_unix_nano / 1e9,
        ended=span.end_time_unix_nano / 1e9,
        attributes={one.key.removeprefix("prfaas."): _value(one.value) for one in span.attributes},
        events=[event.name for event in span.events],
        error=span.status.message if failed else None,
    )


def _value(value) -> object:
    return getattr(value, value.WhichOneof("value"))
