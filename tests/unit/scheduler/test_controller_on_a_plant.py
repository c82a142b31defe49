"""The controller in a closed loop with a simulated link: it reacts in seconds, comes back, and settles inside its band.

The plant is a fluid queue behind a link, measured as Prometheus would: rates over the last five seconds, once a second.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from statistics import NormalDist

import pytest

from prfaas.routing.controller import Config, ControllerFacts, Step, initial_state, step
from prfaas.routing.links import LinkFacts, LinkSample
from prfaas.wire.routes import LinkWatermarks, Threshold

CONFIG = Config(
    threshold=Threshold(mode="Auto", tokens=1024, min_tokens=512, max_tokens=32768),
    watermarks=LinkWatermarks(high_percent=80, low_percent=50),
    stale_after_seconds=10,
)
DECLARED_MBPS = 100.0
SUB_STEPS = 20

Prompts = Callable[[float], Iterator[int]]


class Plant:
    """A link with a queue before it; `prompts(seconds)` yields the lengths that arrive within that time."""

    def __init__(self, prompts: Prompts, bytes_per_token: float):
        self.mbps = DECLARED_MBPS
        self._prompts = prompts
        self._bytes_per_token = bytes_per_token
        self.unsent_bytes = 0.0
        self._sent_bytes = self._busy_seconds = 0.0
        self._offloads = 0
        self._seconds = 0
        self._counters = deque([(0.0, 0.0, 0)], maxlen=CONFIG.window_seconds + 1)

    def run_a_second(self, threshold_tokens: int) -> None:
        portion_bytes = self.mbps * 1e6 / 8 / SUB_STEPS
        for _ in range(SUB_STEPS):
            for tokens in self._prompts(1 / SUB_STEPS):
                if tokens > threshold_tokens:
                    self.unsent_bytes += tokens * self._bytes_per_token
                    self._offloads += 1
            moved_bytes = min(self.unsent_bytes, portion_bytes)
            self.unsent_bytes -= moved_bytes
            self._sent_bytes += moved_bytes
            self._busy_seconds += moved_bytes / portion_bytes / SUB_STEPS
        self._seconds += 1
        self._counters.append((self._sent_bytes, self._busy_seconds, self._offloads))

    def facts(self) -> ControllerFacts:
        first, last = self._counters[0], self._counters[-1]
        window_seconds = max(1, len(self._counters) - 1)
        mbps = (last[0] - first[0]) * 8 / 1e6 / window_seconds
        fraction = (last[1] - first[1]) / window_seconds
        sample = LinkSample(
            sampled_at_seconds=float(self._seconds),
            age_seconds=0.5,
            traffic_mbps=mbps,
            delivery_mbps=mbps / fraction if fraction > 0 else None,
            backlogged_fraction=fraction,
            unsent_bytes=self.unsent_bytes,
        )
        link = LinkFacts(cluster="eu", capacity_mbps=DECLARED_MBPS, reachable=True, ready_instances=1, sample=sample)
        return ControllerFacts(
            now_seconds=float(self._seconds), links=(link,), hub_measured=True, recent_offloads=last[2] - first[2]
        )


def steady(tokens: int, per_second: float) -> Prompts:
    """Prompts of one length, evenly spaced."""
    due = 0.0

    def prompts(seconds: float) -> Iterator[int]:
        nonlocal due
        due += seconds * per_second
        while due >= 1:
            due -= 1
            yield tokens

    return prompts


def spread(offered_mbps: float, bytes_per_token: float) -> Prompts:
    """Many prompts of log-normal lengths that would use `offered_mbps` if all were offloaded."""
    lengths = [min(32_000, round(math.exp(7.6 + NormalDist().inv_cdf((i + 0.5) / 211)))) for i in range(211)]
    mean_bytes = sum(lengths) / len(lengths) * bytes_per_token
    order = 0
    due = 0.0

    def prompts(seconds: float) -> Iterator[int]:
        nonlocal due, order
        due += seconds * offered_mbps * 1e6 / 8 / mean_bytes
        while due >= 1:
            due -= 1
            order += 89  # coprime to 211: every length in turn, well mixed
            yield lengths[order % 211]

    return prompts


def drive(plant: Plant, seconds: int, mbps: Callable[[int], float] = lambda _: DECLARED_MBPS) -> list[Step]:
    state, steps = initial_state(CONFIG), []
    for second in range(seconds):
        plant.mbps = mbps(second)
        steps.append(step(CONFIG, state, plant.facts()))
        state = steps[-1].state
        plant.run_a_second(steps[-1].tokens)
    return steps


def cut_and_widened(narrow_mbps: float) -> Callable[[int], float]:
    return lambda second: narrow_mbps if 20 <= second < 50 else DECLARED_MBPS


@pytest.mark.parametrize("narrow_mbps", [10.0, 5.0])
@pytest.mark.parametrize("per_second", [0.5, 1.0])
def test_the_threshold_doubles_within_seconds_of_a_cut_and_is_back_soon_after(narrow_mbps, per_second):
    plant = Plant(steady(3000, per_second), bytes_per_token=1000)
    tokens = [one.tokens for one in drive(plant, 90, cut_and_widened(narrow_mbps))]
    assert set(tokens[10:20]) == {512}
    doubled = next(second for second, value in enumerate(tokens) if second >= 20 and value >= 1024)
    assert doubled - 20 <= 6
    assert max(tokens[20:50]) >= 3000, "prompts of 3,000 tokens stop crossing a link that cannot carry them"
    assert tokens[80] <= 2 * 512, "30 s: four windows of patience, and the way down"


@pytest.mark.parametrize("offered_mbps", [60.0, 150.0, 400.0])
def test_on_a_constant_load_it_settles_and_then_stands_still(offered_mbps):
    steps = drive(Plant(spread(offered_mbps, 20.0), bytes_per_token=20.0), 150)
    settled = steps[100:]
    assert len({one.tokens for one in settled}) == 1
    busy = [one.links[0].utilisation_percent for one in settled]
    assert all(45 <= percent <= 85 for percent in busy)
