"""The gateway's fixed bounds: sizes, waits, attempts."""

from typing import NamedTuple


class Limits(NamedTuple):
    """The bounds of one gateway. They protect the process; users tune the policy instead."""

    request_bytes: int = 16 * 1024 * 1024
    """A larger request body is refused with 413. A prompt of 128 K tokens takes well under 1 MB."""
    buffered_answer_bytes: int = 4 * 1024 * 1024
    """An answer of known length up to this is read whole before it is relayed, so that a dying worker can be
    replaced."""
    connect_seconds: float = 1.0
    first_byte_seconds: float = 600.0
    """Until the worker's response headers: queueing, prefill, and without streaming the whole generation."""
    doubt_seconds: float = 5.0
    """Wait before a worker without an answer is probed, and between further probes."""
    alive_seconds: float = 2.0
    """Time for an answer to a probe; after two missed ones the worker is given up."""
    idle_seconds: float = 60.0
    """For the request body, and between two pieces of a stream, from the worker or to the client."""
    stall_seconds: float = 15.0
    """Between two pieces of a resumable stream; then another worker resumes it."""
    recover_seconds: float = 15.0
    """Longest search for a worker that resumes a broken stream."""
    hold_seconds: float = 2.0
    """Longest wait of a request while every decode instance has just failed, because one may recover."""
    look_again_seconds: float = 0.1
    """Pause between two tries in both cases."""
    attempts: int = 4
    """Legs that one request may start."""
    eject_seconds: float = 0.5
    """First ejection of an instance that failed; it doubles with every further failure in a row."""
    eject_max_seconds: float = 5.0
    linger_seconds: float = 1.0
    """Time after SIGTERM in which new connections are still accepted, until load balancers have noticed."""
