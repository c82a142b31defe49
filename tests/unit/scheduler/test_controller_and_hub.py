"""The controller weighs what waits in the hub against what waits for a link: neither side is starved for the other."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.routing.controller import Config, ControllerFacts, Offered, State, Step, step
from prfaas.routing.feedforward import PoolFacts
from prfaas.routing.lengths import BINS, LengthTally, demand_of
from prfaas.routing.links import LinkFacts, LinkSample
from prfaas.wire.profile import Profile
from prfaas.wire.routes import LinkWatermarks, Threshold

CONFIG = Config(
    threshold=Threshold(mode="Auto", tokens=4096, min_tokens=256, max_tokens=131_072),
    watermarks=LinkWatermarks(high_percent=80, low_percent=50),
    stale_after_seconds=10,
)
FULL_LINK = {"traffic_mbps": 100.0, "unsent_bytes": 50e6}
"""100 Mbit/s that are all used, and 4 s of data that wait: a pressure of 200 %."""


def lengths() -> LengthTally:
    tally = LengthTally()
    for tokens in range(100, 8000, 20):
        tally.add(tokens)
    return tally


DEMAND = demand_of(BINS, lengths().counts)
PROFILE = Profile(state_bytes=1000, token_bytes=1000, token_seconds=1e-4, samples=5)


def changed(**changes: float) -> Profile:
    return msgspec.structs.replace(PROFILE, **changes)


def after(
    waiting: float,
    *,
    tokens: float = 4000.0,
    state: State | None = None,
    at: float = 100.0,
    profile: Profile = PROFILE,
    arrivals: float = 1.0,
    **link: float,
) -> Step:
    """One step with so many prefills, of 0.4 s each, waiting at the hub's one instance; 2 s are saturation."""
    assert DEMAND is not None
    sample = LinkSample(**({"sampled_at_seconds": at, "age_seconds": 0.0, "traffic_mbps": 0.0} | link))
    pools = tuple(PoolFacts(cluster=name, ready_instances=1, profile=profile) for name in ("eu", "hub"))
    offered = Offered(demand=DEMAND, arrivals_per_second=arrivals, pools=pools, local_waiting_prefills=waiting)
    facts = ControllerFacts(
        now_seconds=at,
        links=(LinkFacts(cluster="eu", capacity_mbps=100, reachable=True, ready_instances=1, sample=sample),),
        hub_measured=True,
        recent_offloads=1,
        offered=offered,
    )
    return step(CONFIG, state or State(tokens=tokens, base_tokens=1000.0), facts)


def test_a_full_link_raises_the_threshold_while_the_hub_has_room():
    assert after(0, tokens=20_000.0, **FULL_LINK).state.tokens == 30_000.0


def test_a_full_link_raises_nothing_while_the_hub_waits_for_half_as_long():
    assert after(5, tokens=20_000.0, **FULL_LINK).state.tokens == 20_000.0


def test_a_hub_that_is_worse_off_than_a_full_link_gives_prompts_away():
    assert after(12, tokens=20_000.0, **FULL_LINK).state.tokens < 20_000.0


def test_a_hub_that_stays_saturated_takes_the_threshold_below_the_optimum():
    at_once = after(40, **FULL_LINK)
    optimum, state = at_once.state.base_tokens, at_once.state
    for second in range(101, 121):
        state = after(40, state=state, at=float(second), **FULL_LINK).state
    assert optimum is not None
    assert state.tokens < 0.5 * optimum


def test_equal_waits_are_equal_pressures_for_any_number_of_prompts():
    """Two seconds in the hub weigh as much as two seconds before the link: five prompts of 0.4 s, or one of 2 s."""
    full = {"traffic_mbps": 100.0, "unsent_bytes": 25e6}
    long = changed(token_seconds=5e-4)
    assert after(11, tokens=20_000.0, **full).state.tokens < 20_000.0
    assert after(2.2, tokens=20_000.0, profile=long, **full).state.tokens < 20_000.0
    assert after(2.2, tokens=20_000.0, **full).state.tokens >= 20_000.0


def test_a_pool_that_was_never_measured_counts_its_prompts():
    unknown = changed(samples=0)
    known, guessed = (after(12, tokens=20_000.0, profile=one, **FULL_LINK).state.tokens for one in (PROFILE, unknown))
    assert max(known, guessed) < 20_000.0


def test_keeps_a_link_busy_where_no_request_waits_longer_than_in_the_hub():
    """Otherwise sending nothing would drain a backlog of 1.8 s; while the hub waits for 2 s it is none."""
    full = {"traffic_mbps": 100.0, "unsent_bytes": 22.5e6}
    idle, waited = (after(waiting, tokens=20_000.0, **full).state.base_tokens for waiting in (0, 5))
    assert idle is not None
    assert waited is not None
    assert waited < idle


def busy_share(tokens: float, arrivals: float) -> float:
    """The share of its time that the hub's one instance needs for what stays below a threshold."""
    assert DEMAND is not None
    return arrivals * (DEMAND.above(0.0).seconds(PROFILE) - DEMAND.above(tokens).seconds(PROFILE))


def test_a_link_is_drained_only_as_far_as_the_hub_bears_what_comes():
    """Four prompts a second are more than the hub can do, one is not."""
    few, many = (after(0.5, arrivals=rate, **FULL_LINK).state.base_tokens for rate in (1.0, 4.0))
    assert few is not None
    assert many is not None
    assert busy_share(few, 4.0) > 1.5, "negative control: all that drains the link would be too much"
    assert busy_share(many, 4.0) == pytest.approx(1.0, abs=0.02)
    assert after(0.0, arrivals=4.0, **FULL_LINK).state.base_tokens == few, "while nothing waits there, it may be wrong"


def test_nothing_rises_above_what_the_hub_bears_while_anything_waits_there():
    state = State(tokens=7_000.0, base_tokens=1000.0)
    high = {"traffic_mbps": 100.0, "unsent_bytes": 12.5e6}  # a pressure of 100 %
    some, none = (after(waiting, arrivals=4.0, state=state, **high).state.tokens for waiting in (1.0, 0.0))
    assert busy_share(7_000.0, 4.0) > 1.0
    assert (some, none) == (7_000.0, 10_500.0)


@pytest.mark.parametrize("tokens", [5_000.0, 20_000.0])
@given(st.floats(0, 1000), st.floats(0, 1000), st.floats(0, 400))
def test_more_that_waits_in_the_hub_never_means_a_higher_threshold(tokens, one, other, traffic_mbps):
    less, more = sorted([one, other])
    fewer = after(less, tokens=tokens, traffic_mbps=traffic_mbps)
    assert after(more, tokens=tokens, traffic_mbps=traffic_mbps).state.tokens <= fewer.state.tokens


@given(st.floats(0, 1000), st.floats(0, 400), st.floats(0, 400))
def test_more_traffic_never_means_a_lower_threshold_for_any_backlog_of_the_hub(waiting, one_mbps, other_mbps):
    less, more = sorted([one_mbps, other_mbps])
    before = after(waiting, tokens=20_000.0, traffic_mbps=less)
    assert before.state.tokens <= after(waiting, tokens=20_000.0, traffic_mbps=more).state.tokens
