"""Measures the costs of steps and prefills on this machine: before serving, and prefills then with every real one.

The first measurement has to be short, since nothing is served meanwhile, and has to reach far, since prompts do. So
lengths double until the next one would not fit the time. Each is repeated, and its quickest time counts. A single slow
one, at the longest length, would be taken for a square. Prompts beyond it would look many times as slow.
"""

import time
from collections.abc import Callable
from typing import Final

from prfaas.capacity.profile import Curve, Sample
from prfaas.errors import CapacityError
from prfaas.schedule import STEP_SIZES
from prfaas.wire.profile import Profile

LENGTHS: Final = tuple(64 << doublings for doublings in range(7))  # in tokens, to 4,096
REPEATS: Final = 3
REPORT_SECONDS: Final = 1.0
_LEAST_GAIN: Final = 1.05  # A step twice as long is worth measuring the next one if it is so much quicker by the token.
_GROWTH: Final = 2.5  # A length that is twice as long is expected to take this many times as long.


def measure_steps(
    step: Callable[[int], float], budget_seconds: float, max_tokens: int, clock: Callable[[], float] = time.monotonic
) -> dict[int, float]:
    """Measure steps of one chunk, each twice as long as the one before, for about `budget_seconds`. Return seconds by
    tokens, until larger ones are no quicker by the token or find no memory. `step(n)` computes n tokens of no request
    and returns the seconds."""
    deadline, seconds = clock() + budget_seconds, dict[int, float]()
    expected = rate = 0.0
    for tokens in STEP_SIZES if budget_seconds > 0 else ():
        if tokens > max_tokens or clock() + REPEATS * _GROWTH * expected > deadline:
            break
        try:
            taken = [step(tokens)]
            while len(taken) < REPEATS and clock() + taken[-1] <= deadline:
                taken.append(step(tokens))
        except CapacityError:
            break
        seconds[tokens] = expected = min(taken)
        before, rate = rate, tokens / expected
        if rate < _LEAST_GAIN * before:
            break
    return seconds


class Profiler:
    """Owns the instance's profile. Calls `report` after changes, at most once in REPORT_SECONDS."""

    def __init__(
        self,
        state_bytes: int,
        token_bytes: int,
        report: Callable[[Profile], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._sizes = state_bytes, token_bytes
        self._report = report
        self._clock = clock
        self._curve = Curve()
        self._reported_at = clock()
        report(self.profile)

    @property
    def profile(self) -> Profile:
        return self._curve.profile(*self._sizes)

    def measure(self, prefill: Callable[[int], float], budget_seconds: float, max_tokens: int) -> None:
        """Measure for about `budget_seconds`; `prefill(n)` prefills n tokens of no request and returns the seconds. The
        first one is not measured, and the clock starts after it: to get ready may take longer than all the rest."""
        lengths = [length for length in LENGTHS if length <= max_tokens]
        if budget_seconds <= 0 or not lengths:
            return
        prefill(lengths[0])
        deadline = self._clock() + budget_seconds
        seconds = [prefill(lengths[0])]
        expected = seconds[0] / _GROWTH
        samples: list[Sample] = []
        for tokens in lengths:
            if self._clock() + REPEATS * _GROWTH * expected > deadline:
                break
            seconds += [prefill(tokens) for _ in range(REPEATS - len(seconds))]
            expected = min(seconds)
            samples.append(Sample(tokens, expected))
            seconds = []
        self._curve = Curve.fitted(samples)
        self._report_now()

    def observe(self, tokens: int, seconds: float, start_tokens: int = 0) -> None:
        """Learn from a real prefill of `tokens` after `start_tokens` cached ones, without other work in its steps."""
        self._curve.add(Sample(tokens, seconds, start_tokens))
        if self._clock() - self._reported_at >= REPORT_SECONDS:
            self._report_now()

    def _report_now(self) -> None:
        self._reported_at = self._clock()
        self._report(self.profile)
