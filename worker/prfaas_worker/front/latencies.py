"""How long requests take, as the front sees its engine answer: taken from the messages between the two.

This runs for every token of every stream, so a histogram is a list and a bisection, and becomes Prometheus text only
when it is asked for.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence

from prfaas.wire.engine import (
    ALL_CHOICES,
    Cancel,
    Failed,
    Generate,
    Granted,
    Started,
    StartPrefill,
    ToEngine,
    ToFront,
    Tokens,
)

# vLLM's buckets, so that its dashboards show ours; those of requests begin lower, for small models.
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0),
    *(480.0, 960.0, 1920.0, 7680.0),
)


class Histogram:
    """Counts of values by upper bound, the last one above them all."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class _Stream:
    """One call: when it was sent, and when each choice that still runs had its last token (None: none yet)."""

    __slots__ = ("choices", "prompt_tokens", "sent_at")

    def __init__(self, sent_at: float, prompt_tokens: int, choices: range):
        self.sent_at = sent_at
        self.prompt_tokens = prompt_tokens
        self.choices: dict[int, float | None] = dict.fromkeys(choices)


class Latencies:
    """Listens to front and engine. `clock` gives seconds and never goes back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.first_token = Histogram(FIRST_TOKEN_BUCKETS)
        self.between_tokens = Histogram(TOKEN_BUCKETS)
        self.request = Histogram(REQUEST_BUCKETS)
        self.queue = Histogram(REQUEST_BUCKETS)
        self.prefill = Histogram(REQUEST_BUCKETS)
        self.transfer = Histogram(REQUEST_BUCKETS)
        self.finished: Counter[str] = Counter()
        """Choices that ended, by reason: stop, length, abort (their client left) or error."""
        self.prompt_tokens = 0
        """Tokens of all prompts that were begun, cached or not, prefilled here or elsewhere."""
        self._clock = clock
        self._streams: dict[int, _Stream] = {}
        self._offered: dict[int, int] = {}

    def sent(self, message: ToEngine) -> None:
        """Take note of what goes to the engine."""
        match message:
            case Generate():
                choices = range(message.choice, message.choice + message.choices)
                self._streams[message.handle] = _Stream(self._clock(), len(message.token_ids), choices)
            case StartPrefill():
                self._offered[message.handle] = len(message.request.token_ids)
            case Cancel(handle, choice):
                # A single choice is ended where the front found a stop string in its text.
                self._end(handle, *((None, "abort") if choice == ALL_CHOICES else (choice, "stop")))

    def heard(self, message: ToFront) -> None:
        """Take note of what the engine says."""
        if isinstance(message, Tokens):
            self._tokens(message)
        elif isinstance(message, Started):
            self._started(message)
        elif isinstance(message, Failed):
            self._offered.pop(message.handle, None)
            self._end(message.handle, None, "error")
        elif isinstance(message, Granted):
            self.prompt_tokens += self._offered.pop(message.handle, 0)

    def _tokens(self, message: Tokens) -> None:
        stream = self._streams.get(message.handle)
        if stream is None or message.choice not in stream.choices:
            return  # what was still under way when the call ended
        now, last = self._clock(), stream.choices[message.choice]
        stream.choices[message.choice] = now
        if last is not None:
            self.between_tokens.observe(now - last)
        if message.finish_reason is not None:
            self._end(message.handle, message.choice, message.finish_reason)

    def _started(self, message: Started) -> None:
        stream = self._streams.get(message.handle)
        if stream is not None:
            self.prompt_tokens += stream.prompt_tokens
            self.queue.observe(message.queue_seconds)
            self.prefill.observe(message.prefill_seconds)
            self.transfer.observe(message.transfer_seconds)

    def _end(self, handle: int, choice: int | None, reason: str) -> None:
        """End one choice of a call, or all that still run."""
        stream = self._streams.get(handle)
        if stream is None:
            return
        ended = list(stream.choices) if choice is None else [choice] if choice in stream.choices else []
        self.finished[reason] += len(ended)
        for one in ended:
            del stream.choices[one]
        if not stream.choices:
            del self._streams[handle]
            if reason in ("stop", "length"):
                self.request.observe(self._clock() - stream.sent_at)
