"""The gateway's own bounds in one place: sizes, waits, attempts."""

from typing import NamedTuple


class Limits(NamedTuple):
    """Bounds of one gateway. They guard the process; what users tune is in the policy."""

    request_bytes: int = 16 * 1024 * 1024
    """A larger request body is refused with 413. A prompt of 128 K tokens takes well under 1 MB."""
    buffered_answer_bytes: int = 4 * 1024 * 1024
    """An answer of known length up to this is read whole before it is relayed, so that a dying worker costs nothing."""
    connect_seconds: float = 1.0
    first_byte_seconds: float = 600.0
    """Until the worker's response headers: queueing, prefill, and without streaming the whole generation."""
    doubt_seconds: float = 5.0
    """After which a worker that has not answered is asked whether it lives, and then again and again."""
    alive_seconds: float = 2.0
    """In which it answers that, or is given up at the second time."""
    idle_seconds: float = 60.0
    """For the request body, and between two pieces of a stream, from the worker or to the client."""
    stall_seconds: float = 15.0
    """Between two pieces of a stream that another worker can go on with: then one does."""
    recover_seconds: float = 15.0
    """How long a broken stream looks for a worker that goes on with it."""
    hold_seconds: float = 2.0
    """How long a request waits where every decode instance failed just now: one may be on its way back."""
    look_again_seconds: float = 0.1
    """After which either looks again."""
    attempts: int = 4
    """Legs that one request may start."""
    eject_seconds: float = 0.5
    """First ejection of an instance that failed; it doubles with every further failure in a row."""
    eject_max_seconds: float = 5.0
    linger_seconds: float = 1.0
    """After SIGTERM, how long new connections are still taken while load balancers learn that we leave."""
