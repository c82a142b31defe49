"""One step of the threshold controller: its bounds, its direction, what it makes of absurd metrics, and dead links."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from prfaas.routing.controller import Config, ControllerFacts, State, Step, initial_state, step
from prfaas.routing.links import LinkFacts, LinkSample, effective_capacity_mbps
from prfaas.wire.routes import LinkWatermarks, Threshold

CONFIG = Config(
    threshold=Threshold(mode="Auto", tokens=1024, min_tokens=512, max_tokens=32768),
    watermarks=LinkWatermarks(high_percent=80, low_percent=50),
    stale_after_seconds=10,
)
LONG_AGO = -1000.0

figures = st.one_of(st.floats(0, 1e7), st.floats(allow_nan=True, allow_infinity=True))
samples = st.builds(
    LinkSample,
    sampled_at_seconds=figures,
    age_seconds=figures,
    traffic_mbps=st.none() | figures,
    delivery_mbps=st.none() | figures,
    backlogged_fraction=figures,
    unsent_bytes=figures,
    waiting_prefills=figures,
)
links = st.builds(
    LinkFacts,
    cluster=st.sampled_from(["eu", "us"]),
    capacity_mbps=figures,
    reachable=st.booleans(),
    ready_instances=st.integers(-1, 4),
    sample=st.none() | samples,
)
worlds = st.builds(
    ControllerFacts,
    now_seconds=st.floats(0, 1e6),
    links=st.lists(links, max_size=2, unique_by=lambda link: link.cluster).map(tuple),
    hub_measured=st.booleans(),
    recent_offloads=st.none() | st.integers(0, 100),
)


@st.composite
def configs(draw):
    low, tokens, high = sorted(draw(st.tuples(*[st.integers(0, 16_777_216)] * 3)))
    low_percent = draw(st.integers(1, 99))
    return Config(
        threshold=Threshold(
            mode=draw(st.sampled_from(["Auto", "Fixed", "Disabled"])), tokens=tokens, min_tokens=low, max_tokens=high
        ),
        watermarks=LinkWatermarks(low_percent=low_percent, high_percent=draw(st.integers(low_percent + 1, 100))),
        stale_after_seconds=draw(st.integers(1, 3600)),
    )


def sample(at: float = 1.0, **changes) -> LinkSample:
    return LinkSample(**{"sampled_at_seconds": at, "age_seconds": 0.5, "traffic_mbps": 0.0} | changes)


def world(link: LinkSample | None, *, now: float = 100.0, offloads: int | None = 1, **changes) -> ControllerFacts:
    facts = {"cluster": "eu", "capacity_mbps": 100.0, "reachable": True, "ready_instances": 1, "sample": link} | changes
    hub = facts.pop("hub_measured", True)
    return ControllerFacts(now_seconds=now, links=(LinkFacts(**facts),), hub_measured=hub, recent_offloads=offloads)


def at(tokens: float, **changes) -> State:
    return State(tokens=tokens, **changes)


def one(link: LinkSample | None, tokens: float = 2000.0, **changes) -> Step:
    return step(CONFIG, at(tokens), world(link, **changes))


# --- bounds and direction ---------------------------------------------------------------------------------------------


@given(configs(), st.lists(worlds, min_size=1, max_size=8))
def test_every_step_stays_within_bounds_for_any_measurements(config, seen):
    state = initial_state(config)
    for facts in seen:
        result = step(config, state, facts)
        threshold = config.threshold
        assert threshold.min_tokens <= result.state.tokens <= threshold.max_tokens
        assert threshold.min_tokens <= result.tokens <= threshold.max_tokens
        if threshold.mode != "Auto":
            assert result.tokens == threshold.tokens
        assert threshold.mode != "Disabled" or result.offload_clusters == ()
        for link, facts_of_link in zip(result.links, facts.links, strict=True):
            declared = facts_of_link.capacity_mbps
            assert math.isfinite(link.effective_mbps)
            assert 0 < link.effective_mbps <= max(1.0, declared if math.isfinite(declared) else 1.0)
            assert link.utilisation_percent is None or 0 <= link.utilisation_percent <= 1000
            offloadable = facts_of_link.reachable and facts_of_link.ready_instances > 0
            assert offloadable or link.cluster not in result.offload_clusters
        state = result.state


@given(configs(), st.floats(0, 2e7), st.floats(0, 1e4), st.floats(0, 1e4), st.booleans(), st.none() | st.integers(0, 3))
def test_more_traffic_never_means_a_lower_threshold(config, tokens, one_mbps, other_mbps, rose, offloads):
    state = State(tokens=tokens, risen_at_seconds=99.0 if rose else LONG_AGO)
    less, more = sorted([one_mbps, other_mbps])
    after_less = step(config, state, world(sample(traffic_mbps=less), offloads=offloads))
    after_more = step(config, state, world(sample(traffic_mbps=more), offloads=offloads))
    assert after_less.state.tokens <= after_more.state.tokens


@given(st.floats(0, 1000), st.floats(0, 1000))
def test_a_longer_prefill_queue_never_means_a_lower_threshold(one_depth, other_depth):
    shorter, longer = sorted([one_depth, other_depth])
    assert one(sample(waiting_prefills=shorter)).tokens <= one(sample(waiting_prefills=longer)).tokens


def test_a_saturated_link_raises_by_half():
    result = one(sample(traffic_mbps=100.0))
    assert (result.tokens, result.bandwidth) == (3000, "Scarce")


@pytest.mark.parametrize(("prompts", "tokens"), [(0, 1024), (199, 1024), (200, 752), (None, 752)])
def test_before_lengths_are_known_an_idle_link_lowers_no_further_than_the_policy_says(prompts, tokens):
    """An idle link says nothing of what the offload pools can do. It falls from 200 prompts on, or if nobody counts."""
    facts = replace(world(sample(traffic_mbps=0.0)), recent_prompts=prompts)
    assert step(CONFIG, at(1074.0), facts).tokens == tokens


def test_a_threshold_below_the_policys_is_not_raised_by_few_prompts():
    facts = replace(world(sample(traffic_mbps=0.0)), recent_prompts=0)
    assert step(CONFIG, at(700.0), facts).tokens == 700


@pytest.mark.parametrize(
    ("prompts", "tokens", "word"),
    [
        (199, 1024.0, "held, fewer than 200 prompts are known"),
        (199, 1074.0, "lowered to the policy's 1024 tokens, fewer than 200 prompts are known"),
        (200, 1024.0, "lowered"),
    ],
)
def test_a_threshold_that_few_prompts_hold_is_not_said_to_be_at_an_optimum(prompts, tokens, word):
    facts = replace(world(sample(traffic_mbps=0.0)), recent_prompts=prompts)
    assert step(CONFIG, at(tokens), facts).reason.endswith(f"used: {word}")


def test_an_idle_link_lowers_by_three_tenths():
    result = one(sample(traffic_mbps=0.0))
    assert (result.tokens, result.bandwidth) == (1400, "Abundant")


@pytest.mark.parametrize("mbps", [50.0, 65.0, 80.0])
def test_between_the_watermarks_nothing_moves(mbps):
    for bandwidth in ("Scarce", "Abundant"):
        result = step(CONFIG, at(2000.0, bandwidth=bandwidth), world(sample(traffic_mbps=mbps)))
        assert (result.tokens, result.bandwidth) == (2000, bandwidth)


def test_halfway_into_saturation_it_rises_by_a_quarter():
    assert one(sample(traffic_mbps=90.0)).tokens == 2500


def test_four_waiting_prefills_an_instance_are_saturation_and_keep_the_bandwidth():
    result = one(sample(waiting_prefills=8.0), ready_instances=2)
    assert (result.tokens, result.bandwidth) == (3000, "Abundant")


def test_bytes_that_take_two_seconds_to_drain_are_saturation_before_any_rate_shows_it():
    unsent = 2 * 100e6 / 8
    result = one(sample(unsent_bytes=unsent))
    assert (result.tokens, result.bandwidth) == (3000, "Scarce")


def test_the_busiest_live_link_decides():
    quiet = LinkFacts(cluster="us", capacity_mbps=100.0, reachable=True, ready_instances=1, sample=sample())
    busy = LinkFacts(
        cluster="eu", capacity_mbps=100.0, reachable=True, ready_instances=1, sample=sample(traffic_mbps=100.0)
    )
    facts = ControllerFacts(now_seconds=100.0, links=(quiet, busy), hub_measured=True, recent_offloads=1)
    result = step(CONFIG, at(2000.0), facts)
    assert result.tokens == 3000
    assert result.offload_clusters == ("eu", "us")


def test_a_threshold_of_zero_can_rise():
    config = Config(
        threshold=Threshold(mode="Auto", tokens=0, min_tokens=0, max_tokens=1000),
        watermarks=CONFIG.watermarks,
        stale_after_seconds=10,
    )
    assert step(config, initial_state(config), world(sample(traffic_mbps=100.0))).tokens == 96


def test_small_thresholds_keep_their_fraction_and_fall_to_the_minimum():
    config = Config(
        threshold=Threshold(mode="Auto", tokens=3, min_tokens=1, max_tokens=9),
        watermarks=CONFIG.watermarks,
        stale_after_seconds=10,
    )
    state, seen = initial_state(config), []
    for second in range(6):
        result = step(config, state, world(sample(float(second), traffic_mbps=45.0), now=100.0 + second))
        state = result.state
        seen.append(result.tokens)
    # 0.97 an interval: rounding the state itself would stay at 3 for ever
    assert seen == [3, 3, 3, 3, 3, 2]


# --- no more than the evidence allows ---------------------------------------------------------------------------------


def test_one_sample_moves_the_threshold_once():
    facts = world(sample(traffic_mbps=100.0))
    first = step(CONFIG, at(2000.0), facts)
    again = step(CONFIG, first.state, facts)
    assert (first.tokens, again.tokens, again.metrics) == (3000, 3000, "Held")


def test_nothing_rises_while_nothing_is_offloaded():
    assert one(sample(traffic_mbps=100.0), offloads=0).tokens == 2000
    assert one(sample(traffic_mbps=100.0), offloads=None).tokens == 3000  # unknown is no reason to hold


def test_a_fall_waits_until_the_window_has_left_the_last_rise_behind():
    assert CONFIG.window_seconds == 5
    state = at(2000.0, risen_at_seconds=96.0)
    assert step(CONFIG, state, world(sample(), now=100.0)).tokens == 2000
    assert step(CONFIG, state, world(sample(), now=101.0)).tokens == 1400


@pytest.mark.parametrize("absurd", [math.nan, math.inf, -math.inf, -1.0])
def test_an_absurd_figure_counts_as_not_measured(absurd):
    blind = one(sample(traffic_mbps=absurd))
    assert (blind.tokens, blind.metrics) == (2000, "Held")
    for name in ("delivery_mbps", "backlogged_fraction", "unsent_bytes", "waiting_prefills"):
        assert one(sample(**{name: absurd})).tokens == one(sample()).tokens
    for name in ("sampled_at_seconds", "age_seconds"):
        assert one(sample(**{name: absurd}), hub_measured=False).tokens in {2000, 1400}


def test_more_traffic_than_the_link_can_carry_is_capped_and_raises():
    result = one(sample(traffic_mbps=1e9))
    assert result.links[0].utilisation_percent == 1000
    assert result.tokens == 3000


# --- effective capacity -----------------------------------------------------------------------------------------------


def narrowed(**changes) -> LinkSample:
    """A link of 100 Mbit/s that now carries 5, all the time, with more waiting."""
    return sample(traffic_mbps=5.0, delivery_mbps=5.0, backlogged_fraction=1.0, **changes)


def test_a_narrowed_link_under_load_is_saturated():
    result = one(narrowed())
    assert result.links[0].effective_mbps == 5.0
    assert result.links[0].utilisation_percent == 100.0
    assert (result.tokens, result.bandwidth) == (3000, "Scarce")


def test_negative_control_by_declared_capacity_the_same_link_looks_idle():
    idle = sample(traffic_mbps=5.0)
    result = one(idle)
    assert result.links[0].utilisation_percent == 5.0
    assert (result.tokens, result.bandwidth) == (1460, "Abundant")


def test_a_newly_declared_capacity_is_believed_until_data_waits_again():
    state = one(narrowed()).state
    held = step(CONFIG, state, world(sample(2.0, traffic_mbps=None)))
    assert held.links[0].effective_mbps == 5.0
    declared = step(CONFIG, state, world(sample(2.0, traffic_mbps=None), capacity_mbps=200.0))
    assert declared.links[0].effective_mbps == 200.0


def test_capacity_is_never_more_than_declared():
    assert (
        effective_capacity_mbps(sample(traffic_mbps=120.0, delivery_mbps=300.0, backlogged_fraction=1), 100, 50) == 100
    )


def test_the_estimate_is_held_while_data_waits_unseen_and_probed_by_a_tenth_when_none_waits():
    assert effective_capacity_mbps(sample(unsent_bytes=1e6), 100, 5) == 5
    assert effective_capacity_mbps(sample(), 100, 5) == pytest.approx(5.5)
    assert effective_capacity_mbps(sample(), 100, 95) == 100
    assert effective_capacity_mbps(sample(traffic_mbps=40.0), 100, 5) == 40  # it carried that much, and nothing waited


def test_too_short_a_wait_says_nothing_about_the_capacity():
    assert effective_capacity_mbps(sample(delivery_mbps=1.0, backlogged_fraction=0.01), 100, 100) == 100


def test_traffic_of_others_on_the_link_counts_as_capacity_and_as_traffic():
    shared = sample(traffic_mbps=81.0, delivery_mbps=20.0, backlogged_fraction=0.05)
    assert effective_capacity_mbps(shared, 100, 100) == 100
    assert one(shared).links[0].utilisation_percent == pytest.approx(81.0)


def test_a_link_that_delivers_nothing_while_data_waits_is_saturated():
    result = one(sample(traffic_mbps=0.0, delivery_mbps=0.0, backlogged_fraction=1.0))
    assert result.links[0].utilisation_percent == 100.0
    assert result.tokens == 3000


# --- stale metrics and dead links -------------------------------------------------------------------------------------


def test_blind_metrics_hold_the_threshold_then_fall_back_to_the_policys_own():
    state = step(CONFIG, at(8000.0), world(sample(traffic_mbps=60.0))).state
    for seconds, tokens, metrics in [(1, 8000, "Held"), (10, 8000, "Held"), (10.5, 1024, "Stale"), (60, 1024, "Stale")]:
        result = step(CONFIG, state, world(None, now=100.0 + seconds, hub_measured=False))
        assert (result.tokens, result.metrics) == (tokens, metrics)
        assert result.offload_clusters == ("eu",), "blind is not dead"
        state = result.state
    assert result.bandwidth == "Scarce"
    assert "1024" in result.reason
    recovered = step(CONFIG, state, world(sample(2.0, traffic_mbps=60.0), now=161.0))
    assert (recovered.metrics, recovered.tokens) == ("Fresh", 1024)


def test_a_sample_that_never_renews_is_as_blind_as_none():
    state = step(CONFIG, at(8000.0), world(sample(traffic_mbps=60.0))).state
    stuck = step(CONFIG, state, world(sample(traffic_mbps=60.0), now=111.0))
    assert (stuck.metrics, stuck.tokens) == ("Stale", 1024)


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({"reachable": False}, "Unreachable"),
        ({"ready_instances": 0}, "NoReadyInstance"),
        ({"link": None}, "Silent"),
        ({"link": sample(age_seconds=10.5)}, "Silent"),
        ({"link": sample(age_seconds=math.nan)}, "Silent"),
    ],
)
def test_a_dead_link_turns_offload_off_in_that_very_step(facts, state):
    alive = one(sample())
    assert alive.offload_clusters == ("eu",)
    dead = step(CONFIG, alive.state, world(facts.pop("link", sample(2.0)), now=102.0, **facts))
    assert dead.links[0].state == state
    assert dead.offload_clusters == ()
    assert dead.tokens == alive.tokens, "the threshold itself waits for the link to come back"


def test_one_lost_scrape_is_no_dead_link_and_a_second_one_is():
    state, seen = one(sample()).state, []
    for second, link in [(1, None), (2, sample(2.0)), (3, None), (4, None), (5, sample(3.0))]:
        result = step(CONFIG, state, world(link, now=100.0 + second))
        state = result.state
        seen.append((result.links[0].state, result.metrics))
    assert seen == [("Alive", "Held"), ("Alive", "Fresh"), ("Alive", "Held"), ("Silent", "Fresh"), ("Alive", "Fresh")]


def test_a_link_that_was_never_heard_of_is_silent_at_once():
    assert one(None).offload_clusters == ()


def test_a_dead_link_does_not_stop_the_others():
    dead = LinkFacts(cluster="eu", capacity_mbps=100.0, reachable=False, ready_instances=1, sample=None)
    live = LinkFacts(
        cluster="us", capacity_mbps=100.0, reachable=True, ready_instances=1, sample=sample(traffic_mbps=100.0)
    )
    facts = ControllerFacts(now_seconds=100.0, links=(dead, live), hub_measured=True, recent_offloads=1)
    result = step(CONFIG, at(2000.0), facts)
    assert (result.offload_clusters, result.tokens, result.metrics) == (("us",), 3000, "Fresh")


def test_a_link_that_comes_back_after_long_is_not_called_stale():
    state = step(CONFIG, at(8000.0), world(sample(), ready_instances=0)).state
    state = step(CONFIG, state, world(None, now=400.0, ready_instances=0)).state
    back = step(CONFIG, state, world(sample(9.0, traffic_mbps=None), now=401.0))  # a rate needs two samples
    assert (back.offload_clusters, back.metrics, back.tokens) == (("eu",), "Held", 8000)


def test_a_policy_without_links_holds():
    facts = ControllerFacts(now_seconds=1.0, links=(), hub_measured=True, recent_offloads=0)
    result = step(CONFIG, at(2000.0), facts)
    assert (result.tokens, result.offload_clusters, result.metrics) == (2000, (), "Fresh")


@pytest.mark.parametrize(("mode", "offload"), [("Fixed", ("eu",)), ("Disabled", ())])
def test_other_modes_keep_their_tokens_and_still_report_the_link(mode, offload):
    config = Config(
        threshold=Threshold(mode=mode, tokens=1024, min_tokens=512, max_tokens=32768),
        watermarks=CONFIG.watermarks,
        stale_after_seconds=10,
    )
    result = step(config, at(1024.0), world(sample(traffic_mbps=100.0)))
    assert (result.tokens, result.offload_clusters, result.bandwidth) == (1024, offload, "Scarce")
    assert result.links[0].utilisation_percent == 100.0
    assert mode in result.reason


def test_forgets_a_link_that_is_removed():
    state = step(CONFIG, at(2000.0), world(narrowed(), cluster="removed")).state
    assert [kept.cluster for kept in state.links] == ["removed"]
    after = step(CONFIG, state, world(sample(2.0))).state
    assert [kept.cluster for kept in after.links] == ["eu"]
