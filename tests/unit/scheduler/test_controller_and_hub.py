"""The controller weighs what waits in the hub against what waits for a link: neither side is starved for the other."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.routing.balance import MEAN_SECONDS, TRIM_FACTOR, Offered
from prfaas.routing.controller import Config, ControllerFacts, State, Step, step
from prfaas.routing.feedforward import HORIZON_SECONDS, PoolFacts
from prfaas.routing.lengths import BINS, Demand, LengthTally, demand_of
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
NARROW_LINK = {"traffic_mbps": 20.0, "delivery_mbps": 20.0, "backlogged_fraction": 1.0}
"""It carries 20 of 100 Mbit/s, and more waits."""
PROFILE = Profile(state_bytes=1000, token_bytes=1000, token_seconds=1e-4, samples=5)
UNKNOWN = msgspec.structs.replace(PROFILE, samples=0)


def demand(prompts: int = 395, most_tokens: int = 8000) -> Demand:
    """So many prompts, of 100 tokens to the most."""
    tally = LengthTally()
    for number in range(prompts):
        tally.add(100 + (most_tokens - 100) * number // prompts)
    found = demand_of(BINS, tally.counts)
    assert found is not None
    return found


DEMAND = demand()


def after(
    waiting: float,
    *,
    tokens: float = 4000.0,
    base_tokens: float | None = None,
    state: State | None = None,
    at: float = 100.0,
    profile: Profile = PROFILE,
    arrivals: float = 1.0,
    offered: Demand = DEMAND,
    capacity_mbps: float = 100.0,
    work: float = 1.0,
    **link: float,
) -> Step:
    """One step with so many prefills, of 0.4 s each, waiting at the hub's one instance; 2 s are saturation.

    The one before is so long ago that the mean of what waits is that of now.
    """
    sample = LinkSample(**({"sampled_at_seconds": at, "age_seconds": 0.0, "traffic_mbps": 0.0} | link))
    pools = tuple(PoolFacts(cluster=name, ready_instances=1, profile=profile, work=work) for name in ("eu", "hub"))
    before = State(tokens=tokens, base_tokens=base_tokens or tokens, weighed_at_seconds=at - MEAN_SECONDS)
    facts = ControllerFacts(
        now_seconds=at,
        links=(LinkFacts(cluster="eu", capacity_mbps=capacity_mbps, reachable=True, ready_instances=1, sample=sample),),
        hub_measured=True,
        recent_offloads=1,
        offered=Offered(demand=offered, arrivals_per_second=arrivals, pools=pools, local_waiting_prefills=waiting),
    )
    return step(CONFIG, state or before, facts)


def base_after(waiting: float, **changes: Any) -> float:
    found = after(waiting, **changes).state.base_tokens
    assert found is not None
    return found


def busy_share(tokens: float, arrivals: float) -> float:
    """The share of its time that the hub's one instance needs for what stays below a threshold."""
    return arrivals * (DEMAND.above(0.0).seconds(PROFILE) - DEMAND.above(tokens).seconds(PROFILE))


# --- the balance ------------------------------------------------------------------------------------------------------


def test_the_threshold_is_the_balance_in_one_step_wherever_it_was():
    """Negative control: without a profile a threshold far above takes many steps to come down."""
    found = {after(0.0, tokens=tokens).state.tokens for tokens in (1000.0, 20_000.0)}
    assert len(found) == 1
    assert after(0.0, tokens=20_000.0, profile=UNKNOWN).state.tokens > 2 * found.pop()


def test_where_more_waits_less_is_prefilled():
    idle = base_after(0.0)
    assert base_after(12.0) < base_after(5.0) < idle
    assert idle < base_after(0.0, waiting_prefills=8.0) < base_after(0.0, waiting_prefills=40.0)
    assert base_after(0.0, unsent_bytes=11e6) > idle, "less than a second waits for the link, but more than a cache"
    assert base_after(0.0, unsent_bytes=6e6) == idle, "negative control: one cache is always on its way"


def test_equal_waits_weigh_alike_for_any_number_of_prompts():
    """More than two seconds in the hub are eleven prompts of 0.2 s, or 2.2 of 1 s; the control are 2.2 of 0.2 s."""
    long = msgspec.structs.replace(PROFILE, token_seconds=5e-4)
    seconds = after(11.0).state.waiting.hub_seconds
    assert seconds > 2.0
    assert after(2.2, profile=long).state.waiting.hub_seconds == pytest.approx(seconds)
    assert after(2.2).state.waiting.hub_seconds == pytest.approx(seconds / 5.0)


def test_what_waits_is_valued_by_what_is_left_to_compute():
    assert after(5.0, work=1.5).state.waiting.hub_seconds == pytest.approx(1.5 * after(5.0).state.waiting.hub_seconds)


def test_one_prompt_that_comes_or_goes_is_no_queue():
    """W is a mean over two seconds: after one, half of a queue counts; the control counts all of it."""
    calm = after(0.0).state
    assert after(12.0, state=calm, at=101.0).state.waiting.hub_seconds == pytest.approx(
        after(12.0, tokens=calm.tokens).state.waiting.hub_seconds / 2.0
    )


def test_few_prompts_lower_the_threshold_no_further_than_the_policys_own_tokens():
    few, enough = (after(0.0, tokens=3000.0, offered=demand(count, 5000)) for count in (199, 200))
    assert (few.tokens, few.state.base_tokens) == (4096, 4096.0)
    assert "no lower than the policy's 4096 tokens with few prompts, at the balance" in few.reason
    assert enough.tokens < 4096, "negative control"
    assert "used: at the balance" in enough.reason


def test_few_prompts_are_kept_from_a_link_that_cannot_carry_them():
    narrow = {**NARROW_LINK, "unsent_bytes": 30e6}
    few = demand(100)
    assert base_after(0.0, offered=few, **narrow) > 1.3 * base_after(0.0, offered=few)
    none = after(0.0, tokens=3000.0, offered=demand(19), **narrow)
    assert (none.tokens, none.state.base_tokens) == (4500, None), "feedback knows no lengths"


@pytest.mark.parametrize("tokens", [5_000.0, 20_000.0])
@given(st.floats(0, 1000), st.floats(0, 1000), st.floats(0, 400))
def test_more_that_waits_in_the_hub_never_means_a_higher_threshold(tokens, one, other, traffic_mbps):
    less, more = sorted([one, other])
    fewer = after(less, tokens=tokens, base_tokens=5_000.0, traffic_mbps=traffic_mbps)
    assert after(more, tokens=tokens, base_tokens=5_000.0, traffic_mbps=traffic_mbps).tokens <= fewer.tokens


@given(st.floats(0, 1000), st.floats(0, 400), st.floats(0, 400))
def test_more_traffic_never_means_a_lower_threshold_for_any_backlog_of_the_hub(waiting, one_mbps, other_mbps):
    less, more = sorted([one_mbps, other_mbps])
    before = after(waiting, tokens=20_000.0, traffic_mbps=less)
    assert before.state.tokens <= after(waiting, tokens=20_000.0, traffic_mbps=more).state.tokens


@pytest.mark.parametrize("absurd", [1e300, float("nan"), float("inf"), -1.0])
def test_an_absurd_queue_is_forgotten_within_half_a_minute(absurd):
    state = after(absurd, waiting_prefills=1e300).state
    for second in range(101, 131):
        state = after(0.0, state=state, at=float(second)).state
    assert state.waiting == (0.0, 0.0)
    assert state.tokens == after(0.0, tokens=state.tokens).state.tokens


# --- the link ---------------------------------------------------------------------------------------------------------


def test_a_link_that_falls_is_followed_in_the_very_step_that_shows_it():
    """Negative control: the same traffic while nothing waits is that of an idle link."""
    bearable = base_after(0.0, capacity_mbps=20.0)
    assert bearable > 1.2 * base_after(0.0)
    assert base_after(0.0, **NARROW_LINK) == bearable
    assert base_after(0.0, traffic_mbps=20.0) == base_after(0.0)


def test_keeps_a_link_busy_where_no_request_waits_longer_than_in_the_hub():
    """Otherwise sending less would drain a backlog of 1.8 s; while the hub waits for 2 s it is none."""
    full = {"traffic_mbps": 100.0, "unsent_bytes": 22.5e6}
    assert base_after(5.0, **full) < base_after(0.0, **full)


def test_a_backlog_is_drained_within_an_interval_however_long():
    """Else a long interval in which nothing is offloaded would follow each in which a little too much was."""
    second, long = (
        base_after(0.0, state=State(tokens=4000.0, weighed_at_seconds=100.0 - seconds), **NARROW_LINK, unsent_bytes=6e6)
        for seconds in (1.0, 10.0)
    )
    assert DEMAND.above(second).share == 0.0, "negative control: within a second it needs all of the link"
    assert DEMAND.above(long).share > 0.03


def test_a_backlog_that_the_first_step_finds_is_drained():
    """A scheduler that starts anew has no interval to drain it in, but the time for which measurements hold."""
    little, much = (
        base_after(0.0, state=State(tokens=4000.0), **NARROW_LINK, unsent_bytes=size) for size in (1e6, 3e7)
    )
    assert DEMAND.above(much).share == 0.0
    assert DEMAND.above(little).share > 0.0, "negative control"


@pytest.mark.parametrize("busy", [{"unsent_bytes": 50e6}, {"waiting_prefills": 40.0}])
def test_of_members_that_are_scraped_in_turn_the_longest_wait_counts_in_every_step(busy):
    idle = {"traffic_mbps": 0.0, "age_seconds": 0.0}

    def away_seconds(state: State, now: float, eu: LinkSample, us: LinkSample) -> tuple[float, State]:
        links = tuple(
            LinkFacts(cluster=name, capacity_mbps=100.0, reachable=True, ready_instances=1, sample=sample)
            for name, sample in (("eu", eu), ("us", us))
        )
        pools = tuple(PoolFacts(cluster=name, ready_instances=1, profile=PROFILE) for name in ("eu", "us", "hub"))
        offered = Offered(demand=DEMAND, arrivals_per_second=1.0, pools=pools)
        facts = ControllerFacts(now_seconds=now, links=links, hub_measured=True, recent_offloads=1, offered=offered)
        after = step(CONFIG, state, facts).state
        return after.waiting.away_seconds, after

    eu, us = (LinkSample(sampled_at_seconds=100.0, **idle | more) for more in (busy, {}))
    first, state = away_seconds(State(tokens=4000.0), 100.0, eu, us)
    assert first > 2.0
    between, state = away_seconds(state, 100.0 + MEAN_SECONDS, eu, LinkSample(sampled_at_seconds=102.0, **idle))
    assert between > 2.0, "what the busy one said last still holds"
    sampled, _ = away_seconds(state, 100.0 + 2 * MEAN_SECONDS, LinkSample(sampled_at_seconds=104.0, **idle), us)
    assert sampled == 0.0, "negative control"


def test_a_link_is_drained_only_as_far_as_the_hub_keeps_up():
    """The hub can do neither all of 3.5 prompts a second, nor what waits besides; all of one a second it can."""
    few, many = base_after(0.5, **FULL_LINK), base_after(0.5, arrivals=3.5, **FULL_LINK)
    queue = after(0.5, arrivals=3.5, **FULL_LINK).state.waiting.hub_seconds / HORIZON_SECONDS
    assert busy_share(few, 3.5) > 1.3, "negative control: all that drains the link would be too much"
    assert busy_share(many, 3.5) == pytest.approx(1.0 / (1.0 + queue), abs=0.01)
    assert base_after(0.0, arrivals=3.5, **FULL_LINK) == few, "while nothing waits there, it may be wrong"


def test_while_the_hub_waits_a_link_carries_more_until_the_hub_keeps_up():
    """The link is planned to carry 65 % while nothing waits in the hub, and all it can from 2 s on."""
    calm = base_after(0.0, capacity_mbps=20.0)
    some, between, most = (base_after(5.0, capacity_mbps=20.0, arrivals=rate) for rate in (0.1, 2.57, 8.0))
    queue = after(5.0).state.waiting.hub_seconds / HORIZON_SECONDS
    assert busy_share(between, 2.57) == pytest.approx(1.0 / (1.0 + queue), abs=0.01), "never below what it sustains"
    assert most < between < some <= calm, "negative controls: it cannot sustain that, or all that comes"
    assert base_after(12.0, capacity_mbps=20.0, arrivals=8.0) < most


# --- the trim ---------------------------------------------------------------------------------------------------------


def test_a_link_busier_than_planned_trims_the_threshold_by_a_twentieth_an_interval_and_it_comes_back():
    base, state, seen = base_after(0.0), after(0.0).state, []
    for second, mbps in enumerate([90.0, 90.0, 65.0, 40.0, 40.0, 40.0], 101):
        state = after(0.0, state=state, at=float(second), traffic_mbps=mbps).state
        seen.append(state.tokens / base)
    assert seen == pytest.approx([TRIM_FACTOR, TRIM_FACTOR**2, TRIM_FACTOR**2, TRIM_FACTOR, 1.0, 1.0])


def test_nothing_is_trimmed_while_the_hub_waits_longer_or_would_not_keep_up():
    busy = {"traffic_mbps": 90.0, "unsent_bytes": 12e6}
    trimmed, base = after(0.5, **busy).state, base_after(0.5, **busy)
    assert trimmed.waiting.away_seconds > trimmed.waiting.hub_seconds > 0.0
    assert trimmed.tokens == pytest.approx(TRIM_FACTOR * base), "negative control"
    assert after(5.0, **busy).state.tokens == base_after(5.0, **busy)
    assert after(0.5, arrivals=8.0, **busy).state.tokens == base_after(0.5, arrivals=8.0, **busy)


# --- feedback, where a pool was never measured ------------------------------------------------------------------------


def test_a_full_link_raises_the_threshold_while_the_hub_has_room():
    assert after(0.0, tokens=20_000.0, profile=UNKNOWN, **FULL_LINK).state.tokens == 30_000.0


def test_a_full_link_raises_nothing_while_the_hub_waits_for_half_as_long():
    assert after(5.0, tokens=20_000.0, profile=UNKNOWN, **FULL_LINK).state.tokens == 20_000.0


def test_a_hub_that_is_worse_off_than_a_full_link_gives_prompts_away():
    assert after(12.0, tokens=20_000.0, profile=UNKNOWN, **FULL_LINK).state.tokens < 20_000.0
