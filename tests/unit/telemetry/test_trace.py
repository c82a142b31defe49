"""Proves that a trace context passes as it came where it keeps the format of W3C Trace Context, and not otherwise."""

import pytest

from prfaas.wire.trace import NO_TRACE, TraceContext, read_trace

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{PARENT}-01"


@pytest.mark.parametrize("parent", [GOOD, f"00-{TRACE}-{PARENT}-00", f"cc-{TRACE}-{PARENT}-01-what-the-future-brings"])
def test_forwards_a_context_as_it_came(parent: str):
    found = read_trace({"traceparent": parent, "tracestate": "a=1,b=2"})
    assert found.headers() == {"traceparent": parent, "tracestate": "a=1,b=2"}
    assert found.trace_id == TRACE


@pytest.mark.parametrize(
    "parent",
    [
        "",
        GOOD.upper(),
        GOOD + "-x",
        GOOD + "\n",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{PARENT}",
        f"cc-{TRACE}-{PARENT}-01-{'x' * 100}",
    ],
)
def test_drops_a_malformed_context_with_its_state(parent: str):
    assert read_trace({"traceparent": parent, "tracestate": "a=1"}) == NO_TRACE
    assert NO_TRACE.headers() == {}


@pytest.mark.parametrize("state", ["a=\n1", "ä=1", "a=" + "x" * 600])
def test_drops_only_a_bad_state(state: str):
    assert read_trace({"traceparent": GOOD, "tracestate": state}) == TraceContext(GOOD)
