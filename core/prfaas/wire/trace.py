"""W3C trace context: passes a request's place in a trace from process to process.

A process with tracing makes its own span and passes that one on. A process without tracing passes the received one
on, so a hop without tracing breaks no trace. Malformed contexts (https://www.w3.org/TR/trace-context/) are dropped.
"""

import re
from collections.abc import Mapping
from typing import Final

import msgspec

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
MAX_TRACESTATE: Final = 512

# Version, trace id, parent id and flags; a later version may have more behind them.
_PARENT: Final = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?")
_STATE: Final = re.compile(r"[ -~\t]*")
_MAX_PARENT: Final = 128


class TraceContext(msgspec.Struct, frozen=True, array_like=True):
    """The values of the two headers, empty without a trace."""

    traceparent: str = ""
    tracestate: str = ""

    @property
    def trace_id(self) -> str:
        """32 hex digits, empty without a trace."""
        return self.traceparent[3:35]

    def headers(self) -> dict[str, str]:
        found = {TRACEPARENT: self.traceparent, TRACESTATE: self.tracestate}
        return {name: value for name, value in found.items() if value}


NO_TRACE: Final = TraceContext()


def read_trace(headers: Mapping[str, str]) -> TraceContext:
    """Return the context that a request came with; `headers` finds names in lower case."""
    parent = headers.get(TRACEPARENT, "")
    found = _PARENT.fullmatch(parent) if len(parent) <= _MAX_PARENT else None
    # Version 00 ends behind the flags.
    if found is None or (found[1] == "00" and found[3]):
        return NO_TRACE
    state = headers.get(TRACESTATE, "")
    return TraceContext(parent, state if len(state) <= MAX_TRACESTATE and _STATE.fullmatch(state) else "")
