"""What follows a request from process to process: its place in a trace, and the parts of its time to the first token.

W3C trace context (https://www.w3.org/TR/trace-context/): a process with tracing makes its own span and passes that one
on. A process without tracing passes the received one on, so a hop without tracing breaks no trace. Malformed contexts
are dropped.

The time to the first token is divided into PARTS. What happens overlaps: a cache crosses while its prompt is computed.
So every moment belongs to the earliest of these that has not ended, and the parts add up. A part that nobody knows is
absent, never 0, and its time is UNKNOWN.

    gateway_queue   until the gateway sent the legs that were answered; its failed attempts are in it
    prefill_queue   until the prefill's end, without its computation
    prefill         computation of the prompt, here or at another instance
    decode_queue    from then on, until the destination asked for the cache; from its arrival to the step that uses it
    link_wait       until the first byte of the cache came
    transfer        until the last one was there
    first_step      until the gateway has the first token
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from prfaas.errors import BadInputError

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
MAX_TRACESTATE: Final = 512

# Version, trace id, parent id and flags; a later version may have more behind them.
_PARENT: Final = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?")
_STATE: Final = re.compile(r"[ -~\t]*")
_MAX_PARENT: Final = 128

PARTS: Final = ("gateway_queue", "prefill_queue", "prefill", "link_wait", "transfer", "decode_queue", "first_step")
UNKNOWN: Final = "unknown"
"""Beside the parts: the time of those that are absent."""
MAX_OFF: Final = 0.05
"""Parts that miss their sum by a larger share are not believed."""
Parts = Mapping[str, float]
"""Seconds by part, and UNKNOWN if a part is absent."""
Moment = tuple[str, float]
"""A part, or UNKNOWN, and when it ended."""

_SECONDS: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_MAX_PARTS_CHARACTERS: Final = 400


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


class Stamps(NamedTuple):
    """What an engine noted of a request until its first token, in seconds by one clock."""

    admitted: float
    prefill_seconds: float
    """Computation of the prompt, here or at the source."""
    computed: float
    """When all of the prompt was computed."""
    step_began: float
    """The beginning of the last step of that."""
    fetched: float | None = None
    """When the fetch of a cache ended, well or not."""
    first_byte: float | None = None
    """When the first byte of a cache came that was fetched well."""
    source_computed: float | None = None
    """When the source had computed it."""
    is_remote: bool = False
    """Whether that was the prompt's whole cache. A shorter one is fetched before the prefill."""


def first_token_moments(stamps: Stamps) -> tuple[Moment, ...]:
    """Return the ends of the parts at a destination, without that of its first step."""
    if stamps.is_remote:
        if stamps.source_computed is None or stamps.first_byte is None or stamps.fetched is None:
            return ((UNKNOWN, stamps.step_began),)
        return (
            ("prefill_queue", stamps.source_computed - stamps.prefill_seconds),
            ("prefill", stamps.source_computed),
            ("decode_queue", stamps.admitted),
            ("link_wait", stamps.first_byte),
            ("transfer", stamps.fetched),
            ("decode_queue", stamps.step_began),
        )
    moments: list[Moment] = []
    if stamps.fetched is not None:
        # Of a cache that did not come no byte counts: all of that was a wait.
        waited = stamps.fetched if stamps.first_byte is None else stamps.first_byte
        moments = [("prefill_queue", stamps.admitted), ("link_wait", waited), ("transfer", stamps.fetched)]
    began = stamps.computed - stamps.prefill_seconds
    return (*moments, ("prefill_queue", began), ("prefill", stamps.computed))


def split(began: float, ended: float, moments: Sequence[Moment]) -> dict[str, float]:
    """Return the parts of a time: each lasts from the end of those before it to its own, the first step to `ended`. A
    part that ended earlier than those before it took none of the time, nor did one without a moment."""
    known: Sequence[str] = ("gateway_queue", UNKNOWN) if UNKNOWN in dict(moments) else PARTS
    parts: dict[str, float] = dict.fromkeys(known, 0.0)
    at = began
    for part, moment in (*moments, ("first_step", ended)):
        until = min(max(at, moment), max(began, ended))
        parts[part] = parts.get(part, 0.0) + until - at
        at = until
    return parts


class LegTimes(NamedTuple):
    """What the gateway sees of the leg that answers: seconds to the answer, and to that of its source's leg."""

    seconds: float
    prefill_seconds: float | None = None
    is_stream: bool = True
    """Else the answer is whole, and came after its last token."""


def at_gateway(queue_seconds: float, leg: LegTimes, reported: Parts) -> dict[str, float]:
    """Return all parts: those that a worker reported, with what the gateway knows; {} if the first token's time is
    unknown.

    The way to the worker and back counts as first step. If an engine reports nothing, the leg of the source is its
    prefill with its queue. Parts that are longer than the leg are not believed.
    """
    queue = {"gateway_queue": max(0.0, queue_seconds)}
    rest = leg.seconds - sum(reported.values())
    if reported and rest >= -MAX_OFF * leg.seconds:
        found = {**reported, **queue}
        if leg.is_stream:
            last = "first_step" if "first_step" in found else UNKNOWN
            found[last] = found.get(last, 0.0) + max(0.0, rest)
        return found
    if not leg.is_stream:
        return {}
    prefill = {} if leg.prefill_seconds is None else {"prefill": min(max(0.0, leg.prefill_seconds), leg.seconds)}
    return queue | prefill | {UNKNOWN: leg.seconds - sum(prefill.values())}


def named_seconds(parts: Parts) -> dict[str, float]:
    """Return parts under the names that they have in logs and traces."""
    return {f"{part}_seconds": seconds for part, seconds in parts.items()}


def write_parts(parts: Parts) -> str:
    """Return a header's value: the parts in order, with six decimals."""
    return ", ".join(f"{part}={parts[part]:.6f}" for part in (*PARTS, UNKNOWN) if part in parts)


def read_parts(text: str) -> dict[str, float]:
    """Return the parts of a header's value. Raises BadInputError for anything that `write_parts` does not write."""
    if len(text) > _MAX_PARTS_CHARACTERS:
        raise BadInputError(f"the parts of a first token take {len(text)} characters, more than a header of ours")
    found: dict[str, float] = {}
    for item in text.split(", "):
        part, _, seconds = item.partition("=")
        if part not in (*PARTS, UNKNOWN) or part in found:
            raise BadInputError(f"{part!r} is no part of the time to the first token, or is named twice")
        found[part] = read_seconds(part, seconds)
    return found


def read_seconds(name: str, text: str) -> float:
    """Return a duration. Raises BadInputError for what is none."""
    if not _SECONDS.fullmatch(text):
        raise BadInputError(f"{name} is {text[:40]!r}, which is no number of seconds")
    return float(text)
