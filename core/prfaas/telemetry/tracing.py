"""Spans as gateway and workers tell them, with or without a collector to tell them to.

Without an OTLP endpoint in the environment nothing of OpenTelemetry is imported: a span is then a name for the context
that came in and goes on. With one, otlp.py makes real spans of the same calls. Nothing here waits, or ever fails.
"""

import logging
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Final, Literal, Self

from prfaas.errors import install_extra
from prfaas.wire.trace import TraceContext

log = logging.getLogger(__name__)

Attribute = str | int | float | bool
Kind = Literal["internal", "server"]
ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class Span:
    """One piece of work. As a context it ends with the block, and with the error that ends the block.

    Attributes are named `prfaas.` and what they are called here.
    """

    def __init__(self, context: TraceContext):
        self.context = context
        """What those that work for this are given as their parent."""

    def set(self, **attributes: Attribute) -> None:
        """Add attributes."""

    def event(self, name: str, at: float | None = None, **attributes: Attribute) -> None:
        """Add what happened at this moment, or at `at` in unix seconds."""

    def fail(self, reason: str) -> None:
        """Mark as failed; the first reason stays."""

    def end(self, at: float | None = None) -> None:
        """End now, or at `at` in unix seconds. Only the first end counts."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(str(error) or type(error).__name__)
        self.end()


class Tracing:
    """Starts spans; this one tells nobody."""

    is_on = False

    def start(self, _name: str, parent: TraceContext, _kind: Kind = "internal", _at: float | None = None, /) -> Span:
        """Begin a span of this name, parent and kind, now or at a moment in unix seconds."""
        return Span(parent)

    def close(self) -> None:
        """Send what waits, for no longer than a moment."""


OFF: Final = Tracing()


def tracing_from_environment(service: str, attributes: Mapping[str, str]) -> Tracing:
    """Return tracing as OpenTelemetry's environment variables want it, off where they name no OTLP endpoint.

    Args:
        service: its `service.name`, unless the environment names another.
        attributes: more of its resource; empty ones are left out.

    """
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return OFF
    try:
        from prfaas.telemetry.otlp import OtlpTracing

        return OtlpTracing(service, {name: value for name, value in attributes.items() if value})
    except Exception as error:  # whatever is wrong with it, requests are served
        log.warning("no traces: %r; %s, or unset %s", error, install_extra("otel"), " and ".join(ENDPOINTS))
        return OFF
