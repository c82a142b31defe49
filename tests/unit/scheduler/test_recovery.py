"""The short loop on a plant with pools and a link: it follows a cut at the first look that shows it, and never swings.

The plant offers prompts of log-normal lengths to a threshold; what is longer sends its cache over a link with a queue.
It is measured as Prometheus would: rates over five seconds and over the latest two scrapes, one scrape an interval.
"""

import math
from collections import deque
from collections.abc import Callable
from statistics import NormalDist

import pytest

from prfaas.routing.balance import Offered
from prfaas.routing.controller import Config, ControllerFacts, Step, initial_state, step
from prfaas.routing.feedforward import PoolFacts
from prfaas.routing.lengths import BINS, LengthTally, demand_of
from prfaas.routing.links import LinkFacts, LinkSample
from prfaas.wire.profile import Profile
from prfaas.wire.routes import LinkWatermarks, Threshold

CONFIG = Config(
    threshold=Threshold(mode="Auto", tokens=2048, min_tokens=256, max_tokens=131_072),
    watermarks=LinkWatermarks(high_percent=80, low_percent=50),
    stale_after_seconds=10,
)
DECLARED_MBPS = 100.0
SUB_STEPS = 20
LENGTHS = [min(64_000, round(math.exp(7.6 + NormalDist().inv_cdf((i + 0.5) / 499)))) for i in range(499)]
MEAN_TOKENS = sum(LENGTHS) / len(LENGTHS)
OFFERED_MBPS = 90.0  # were everything offloaded
TOKEN_BYTES = 20
ARRIVALS = OFFERED_MBPS * 1e6 / 8 / MEAN_TOKENS / TOKEN_BYTES


def pool(cluster: str, speed: float, error: float) -> PoolFacts:
    """Two instances, whose caches are declared `error` times as large as they are."""
    profile = Profile(state_bytes=0, token_bytes=round(TOKEN_BYTES * error), token_seconds=1e-5 / speed, samples=9)
    return PoolFacts(cluster=cluster, ready_instances=2, profile=profile)


class Plant:
    """Pools, whose profiles may be `known`, and a link; `interval_seconds` is also the time between scrapes."""

    def __init__(self, interval_seconds: int, *, known: bool = True, error: float = 1.0):
        self.mbps = DECLARED_MBPS
        self.unsent_bytes = 0.0
        self.arrived = self.offloaded = 0
        self.busy_share = 0.0
        self._known = known
        self._pools = (pool("eu", 2.0, error), pool("hub", 1.0, error))
        self._interval_seconds = interval_seconds
        self._due = 0.0
        self._sent_bytes = self._busy_seconds = 0.0
        self._seconds = 0
        self.tally = LengthTally()
        for tokens in LENGTHS:
            self.tally.add(tokens)
        first = (0.0, 0.0, 0)  # bytes sent, seconds busy, prompts offloaded
        self._scrapes = deque([first], maxlen=max(2, CONFIG.window_seconds // interval_seconds + 1))

    def run(self, threshold_tokens: int) -> None:
        """Let one interval pass."""
        steps = SUB_STEPS * self._interval_seconds
        portion_bytes = self.mbps * 1e6 / 8 / SUB_STEPS
        busy_before = self._busy_seconds
        for _ in range(steps):
            self._due += ARRIVALS / SUB_STEPS
            while self._due >= 1:
                self._due -= 1
                tokens = LENGTHS[self.arrived * 211 % 499]
                self.arrived += 1
                if tokens > threshold_tokens:
                    self.offloaded += 1
                    self.unsent_bytes += tokens * TOKEN_BYTES
            moved_bytes = min(self.unsent_bytes, portion_bytes)
            self.unsent_bytes -= moved_bytes
            self._sent_bytes += moved_bytes
            self._busy_seconds += moved_bytes / portion_bytes / SUB_STEPS
        self.busy_share = (self._busy_seconds - busy_before) / self._interval_seconds
        self._seconds += self._interval_seconds
        self._scrapes.append((self._sent_bytes, self._busy_seconds, self.offloaded))

    def _between(self, first: tuple, last: tuple, intervals: int) -> tuple[float, float]:
        seconds = max(1, intervals) * self._interval_seconds
        return (last[0] - first[0]) * 8 / 1e6 / seconds, (last[1] - first[1]) / seconds

    def facts(self) -> ControllerFacts:
        scrapes = list(self._scrapes)
        mbps, fraction = self._between(scrapes[0], scrapes[-1], len(scrapes) - 1)
        latest_mbps, latest = self._between(scrapes[-2], scrapes[-1], 1) if len(scrapes) > 1 else (0.0, 0.0)
        sample = LinkSample(
            sampled_at_seconds=float(self._seconds),
            age_seconds=0.0,
            traffic_mbps=mbps,
            delivery_mbps=mbps / fraction if fraction > 0 else None,
            backlogged_fraction=fraction,
            latest_delivery_mbps=latest_mbps / latest if latest > 0 else None,
            latest_backlogged_fraction=latest,
            unsent_bytes=self.unsent_bytes,
        )
        link = LinkFacts(cluster="eu", capacity_mbps=DECLARED_MBPS, reachable=True, ready_instances=2, sample=sample)
        demand = demand_of(BINS, self.tally.counts)
        assert demand is not None
        offered = Offered(demand=demand, arrivals_per_second=ARRIVALS, pools=self._pools)
        return ControllerFacts(
            now_seconds=float(self._seconds),
            links=(link,),
            hub_measured=True,
            recent_offloads=scrapes[-1][2] - scrapes[0][2],
            offered=offered if self._known else None,
        )


def drive(plant: Plant, intervals: int, mbps: Callable[[int], float]) -> tuple[list[Step], list[float]]:
    """Return the steps, and the busy share of the link in the interval after each."""
    state, steps, busy = initial_state(CONFIG), [], []
    for interval in range(intervals):
        plant.mbps = mbps(interval)
        steps.append(step(CONFIG, state, plant.facts()))
        state = steps[-1].state
        plant.run(steps[-1].tokens)
        busy.append(plant.busy_share)
    return steps, busy


def cut(interval: int) -> float:
    return 20.0 if 30 <= interval < 60 else DECLARED_MBPS


def offered_mbps(threshold_tokens: float) -> float:
    """Return what the prompts above a threshold bring over the link."""
    return ARRIVALS * TOKEN_BYTES * 8 / 1e6 * sum(one for one in LENGTHS if one > threshold_tokens) / len(LENGTHS)


@pytest.mark.parametrize("interval_seconds", [1, 5, 10])
def test_a_link_cut_to_a_fifth_is_asked_for_what_it_bears_from_the_first_look_on_and_is_used_again(interval_seconds):
    """The link is seen over a window, so one interval may ask for too much; no five in a row do."""
    plant = Plant(interval_seconds)
    steps, busy = drive(plant, 90, cut)
    asked_mbps = [offered_mbps(one.tokens) for one in steps]
    assert asked_mbps[30] > 2 * cut(30), "negative control: the threshold of before would fill it for ever"
    assert asked_mbps[31] == 0.0, "nothing until what waits has crossed"
    assert max(sum(asked_mbps[i : i + 5]) / 5 for i in range(31, 55)) <= cut(30)
    assert sum(busy[50:60]) / 10 > 0.4, "the narrow link is used, not abandoned"
    assert steps[75].tokens <= 1.5 * steps[29].tokens, "and forgotten once it is wide again"
    assert plant.unsent_bytes < 2 * DECLARED_MBPS * 1e6 / 8


@pytest.mark.parametrize("interval_seconds", [1, 5, 10])
def test_without_profiles_the_threshold_doubles_within_five_intervals_of_a_cut_and_comes_down_afterwards(
    interval_seconds,
):
    plant = Plant(interval_seconds, known=False)
    tokens = [one.tokens for one in drive(plant, 90, cut)[0]]
    assert max(tokens[30:36]) >= 2 * tokens[29]
    assert tokens[75] <= 3 * tokens[29]


def test_before_the_cut_it_stands_where_both_sides_are_equally_busy():
    steps, _ = drive(Plant(1), 30, cut)
    demand = demand_of(BINS, Plant(1).tally.counts)
    assert demand is not None
    everything, above = demand.above(0), demand.above(steps[-1].tokens)
    assert above.tokens / 2 == pytest.approx(everything.tokens - above.tokens, rel=0.02), (
        "twice as fast, twice the work"
    )


def swings(tokens: list[int]) -> bool:
    """Return whether a threshold goes up and down again, or by more than a quarter."""
    turns = sum((b - a) * (c - b) < 0 for a, b, c in zip(tokens, tokens[1:], tokens[2:], strict=False))
    return turns > 2 or max(tokens) > 1.25 * min(tokens)


def test_a_threshold_that_drains_the_link_every_other_interval_would_be_seen_to_swing():
    assert swings([46_613, 8_996] * 40)
    assert not swings([8_996] * 80)


@pytest.mark.parametrize("mbps", [12.0, 20.0, 45.0, 100.0])
@pytest.mark.parametrize(("known", "error"), [(False, 1.0), (True, 0.5), (True, 1.0), (True, 2.0)])
@pytest.mark.parametrize("interval_seconds", [1, 10])
def test_on_a_constant_plant_it_never_swings_without_a_profile_or_with_one_that_is_wrong_by_two(
    interval_seconds, known, error, mbps
):
    plant = Plant(interval_seconds, known=known, error=error)
    steps, busy = drive(plant, 160, lambda _: mbps)
    assert not swings([one.tokens for one in steps[80:]])
    assert 0.4 < sum(busy[80:]) / 80 < 0.85
