"""What the engine is busy with, and what it has done: replaced whole, so that any thread may read it at any time."""

from collections.abc import Mapping
from typing import NamedTuple

from prfaas.wire.engine import Role


class Gauges(NamedTuple):
    """Requests after the last step, and counts since the start."""

    requests_running: int = 0
    requests_waiting: int = 0
    prefills_running: int = 0
    prefills_waiting: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    role: Role = "mixed"
    prefixes: tuple[tuple[str, int], ...] = ()
    prefix_tokens: int = 0

    def plus(self, **more: float) -> "Gauges":
        """Add to some counts."""
        return self._replace(**{name: getattr(self, name) + value for name, value in more.items()})

    def now(self, requests: Mapping[tuple[bool, bool], int]) -> "Gauges":
        """Take the number of requests by (a prefill for another instance, it waits)."""
        return self._replace(
            requests_running=requests[False, False],
            requests_waiting=requests[False, True],
            prefills_running=requests[True, False],
            prefills_waiting=requests[True, True],
        )
