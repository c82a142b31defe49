"""The long loop's one decision: it moves towards the plan, stays within bounds, and comes to rest on constant facts."""

import math
from itertools import pairwise

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.unit.capacity.systems import paper, profiles, workloads

from prfaas.capacity import optimum
from prfaas.capacity.installation import Installation, MeasuredLoad, Pool, forecast, ttft_p90_seconds
from prfaas.capacity.longloop import ROOM_SHARE, InstallationState, LongLoopDecision, Rules, decide, find_best_split
from prfaas.capacity.system import LinkCapacity
from prfaas.capacity.workload import Workload
from prfaas.wire.routes import Threshold

AUTO = Threshold(mode="Auto", tokens=2048, min_tokens=0, max_tokens=1 << 24)
PAPER = paper()
MAX_CHANGES = 100


def rules(**changes) -> Rules:
    values = {
        "converts": True,
        "min_prefill": 1,
        "min_decode": 1,
        "conversion_cooldown_seconds": 300.0,
        "scales": False,
        "target_load": 0.7,
        "scaling_cooldown_seconds": 300.0,
    }
    return Rules(**(values | changes))


def installed(prefill: int = 1, decode: int = 7, arrivals: float = 2.0, **changes) -> Installation:
    """The paper's hub and offload pool, with its eight instances divided into these."""
    (offload,), (hub,) = PAPER.system.offload, PAPER.system.hub
    pools = (
        Pool(name="offload", role="prefill", replicas=offload.instances, link=offload.link, profile=offload.profile),
        Pool(name="swing", role="prefill", replicas=prefill, shares=True),
        Pool(name="decode", role="decode", replicas=decode, profile=hub.profile),
    )
    load = MeasuredLoad(
        workload=changes.pop("workload", PAPER.workload),
        arrivals_per_second=arrivals,
        output_tokens=PAPER.system.output_tokens,
        max_batch=hub.max_batch,
        step_seconds=hub.step_seconds,
    )
    values = {"pools": pools, "links": PAPER.system.links, "threshold": AUTO, "load": load}
    return Installation(**(values | changes))


def altered(installation: Installation, **pools: dict) -> Installation:
    """Return the installation with other figures of some pools."""
    replaced = (msgspec.structs.replace(one, **pools.get(one.name, {})) for one in installation.pools)
    return msgspec.structs.replace(installation, pools=tuple(replaced))


def after(installation: Installation, decision: LongLoopDecision) -> Installation:
    return altered(installation, **{name: {"replicas": count} for name, count in decision.changes.items()})


def calm(installation: Installation, **changes) -> InstallationState:
    arrivals = installation.load.arrivals_per_second if installation.load else None
    return InstallationState(arrivals_per_second=arrivals, **changes)


def run(of: Rules, installation: Installation) -> list[Installation]:
    """Apply decisions on facts that stay as they are until nothing is changed; every state on the way."""
    states = [installation]
    for _ in range(MAX_CHANGES):
        decision = decide(of, states[-1], calm(states[-1]))
        if not decision.changes:
            return states
        states.append(after(states[-1], decision))
    raise AssertionError([state.counts for state in states])


def test_the_papers_hub_is_converted_step_by_step_to_within_a_tenth_of_its_plan():
    states = run(rules(), installed(6, 2))
    assert [(state.counts["swing"], state.counts["decode"]) for state in states] == [(6, 2), (5, 3), (4, 4)]
    plan = optimum.best(PAPER.system, PAPER.workload)
    assert 1.0 < plan.lambda_max / forecast(states[-1], states[-1].counts).lambda_max < 1.1


def test_a_decision_tells_what_changes_and_why():
    decision = decide(rules(), installed(), calm(installed()))
    assert (decision.status, decision.reason, decision.changes) == ("False", "Converting", {"swing": 2, "decode": 6})
    assert decision.message == (
        "converts swing 1 to 2, decode 7 to 6, since 18% more would be served with N_p 3: 2.76 to 3.02 requests/s, "
        "2 arrive"
    )


def test_a_gain_below_a_tenth_changes_nothing():
    near = decide(rules(), installed(3, 5), calm(installed(3, 5)))
    assert (near.status, near.reason, near.changes) == ("True", "Balanced", {})
    # With a fourth kind of instance the best is 4 of 9, by less than a tenth.
    off = installed(4, 5)
    best = find_best_split(rules(), off, forecast(off, off.counts))
    assert 1.0 <= best.lambda_max / forecast(off, off.counts).lambda_max < 1.1
    assert not decide(rules(), off, calm(off)).changes


@pytest.mark.parametrize(
    ("moment", "status", "reason"),
    [
        ({"stale": "no news for 60 s"}, "Unknown", "MetricsStale"),
        ({"unknown": "pool offload shows no profile"}, "Unknown", "NotMeasured"),
        ({"under_way": "PrefillPool swing is not settled"}, "False", "PoolsNotSettled"),
        ({"under_way": "PrefillPool swing is not settled", "ours": True}, "False", "Converting"),
        ({"since_change_seconds": 299.0}, "False", "Cooldown"),
    ],
)
def test_nothing_is_changed_while_facts_are_bad_or_something_is_under_way(moment, status, reason):
    decision = decide(rules(), installed(), calm(installed(), **moment))
    assert (decision.status, decision.reason, decision.changes) == (status, reason, {})
    assert decide(rules(), installed(), calm(installed(), since_change_seconds=300.0)).changes, "otherwise it would"


@pytest.mark.parametrize("pool", ["swing", "decode"])
def test_keeps_a_pool_with_another_scaler_and_names_it(pool):
    theirs = altered(installed(), **{pool: {"refusal": f"replicas of {pool} are an autoscaler's"}})
    decision = decide(rules(), theirs, calm(theirs))
    assert (decision.reason, decision.changes) == ("ReplicasNotOwned", {})
    assert f"replicas of {pool} are an autoscaler's" in decision.message


def test_converts_nothing_without_permission():
    assert decide(rules(converts=False), installed(), calm(installed())).changes == {}


def test_a_dead_link_makes_home_prefill_more():
    linked, cut = installed(3, 5), installed(3, 5, links=())
    assert not decide(rules(), linked, calm(linked)).changes
    assert decide(rules(), cut, calm(cut)).changes == {"swing": 4, "decode": 4}


def test_waits_that_break_the_promise_are_shortened_even_where_that_costs_capacity():
    slow = installed(2, 6, arrivals=2.6)
    assert run(rules(), slow) == [slow], "without a promise a gain of 8 % changes nothing"
    states = run(rules(ttft_seconds=7.0), slow)
    assert [state.counts["swing"] for state in states] == [2, 3, 4]
    three, four = (forecast(state, state.counts) for state in states[1:])
    assert four.lambda_max < three.lambda_max
    assert ttft_p90_seconds(states[1], three) > 7.0 >= ttft_p90_seconds(states[2], four)


def test_capacity_is_not_bought_with_a_broken_promise():
    many = installed(6, 2, arrivals=1.5)
    promised = rules(ttft_seconds=4.1)
    assert [state.counts["swing"] for state in run(rules(), many)] == [6, 5, 4]
    # 4.82 s with one, 4.43 with two: more capacity and less wait go together here, and both count.
    assert [state.counts["swing"] for state in run(promised, installed(1, 7, arrivals=1.5))] == [1, 2]
    tight = installed(4, 4, arrivals=1.5)
    assert run(promised, tight) == [tight]


def test_pools_grow_to_their_target_and_shrink_one_by_one():
    of = rules(converts=False, scales=True)
    bounds = {"most": 40}
    busy = altered(installed(3, 5, arrivals=6.0), offload=bounds, swing=bounds, decode=bounds)
    grown = run(of, busy)
    settled = forecast(grown[-1], grown[-1].counts)
    assert settled.busiest <= 0.7
    assert all(sum(a.counts.values()) < sum(b.counts.values()) for a, b in pairwise(grown))
    quiet = msgspec.structs.replace(grown[-1], load=installed(arrivals=1.0).load)
    shrunk = run(of, quiet)
    steps = [sum(a.counts.values()) - sum(b.counts.values()) for a, b in pairwise(shrunk)]
    assert set(steps) == {1}
    rest = forecast(shrunk[-1], shrunk[-1].counts)
    assert rest.busiest <= ROOM_SHARE * 0.7


def test_reports_bounds_that_keep_a_busy_pool_small():
    busy = installed(3, 5, arrivals=6.0)
    decision = decide(rules(converts=False, scales=True), busy, calm(busy))
    assert (decision.status, decision.reason) == ("False", "AtBounds")
    assert "decode: has no maxReplicas" in decision.message


def test_requests_that_come_wake_a_pool_from_zero_without_a_cooldown_and_unmeasured():
    empty = altered(installed(0, 5, load=None), offload={"replicas": 0, "most": 3}, swing={"most": 0})
    of = rules(scales=True)
    moment = InstallationState(waiting_prefills=2, unknown="nothing is measured", since_change_seconds=0.0)
    assert decide(of, empty, moment).changes == {"offload": 1}
    assert not decide(of, empty, InstallationState(unknown="nothing is measured")).changes, "no request waits"
    assert not decide(rules(), empty, moment).changes, "the policy does not scale"


def test_an_idle_pool_goes_to_zero_only_where_its_bound_says_so_and_the_decode_pool_never():
    idle = altered(
        installed(0, 1, load=None),
        offload={"replicas": 1, "most": 3},
        decode={"most": 3, "least": 0},
        swing={"most": 0},
    )
    of = rules(scales=True)
    quiet = InstallationState(arrivals_per_second=0.0, unknown="no prompts")
    assert not decide(of, idle, quiet).changes
    allowed = altered(idle, offload={"least": 0})
    assert decide(of, allowed, quiet).changes == {"offload": 0}
    assert not decide(of, allowed, InstallationState(unknown="nothing is measured")).changes, "not known to be idle"


arbitrary = st.builds(
    lambda workload, hub, offload, counts, arrivals, mbps, most: Installation(
        pools=(
            Pool(name="offload", role="prefill", replicas=counts[0], link="eu", profile=offload, most=most[0]),
            Pool(name="local", role="prefill", replicas=counts[1], profile=hub, most=most[1]),
            Pool(name="swing", role="prefill", replicas=counts[2], shares=True, most=most[2]),
            Pool(name="decode", role="decode", replicas=counts[3], profile=hub, most=most[3]),
        ),
        links=(LinkCapacity(name="eu", capacity_mbps=mbps),),
        threshold=AUTO,
        load=MeasuredLoad(
            workload=workload, arrivals_per_second=arrivals, output_tokens=500.0, max_batch=16, step_seconds=0.03
        ),
    ),
    workloads,
    profiles,
    profiles,
    st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 6), st.integers(1, 8)),
    st.floats(0.01, 50),
    st.floats(1, 1e5),
    st.tuples(*(st.none() | st.integers(8, 12) for _ in range(4))),
)
any_rules = st.builds(
    rules,
    converts=st.booleans(),
    scales=st.booleans(),
    min_prefill=st.integers(0, 2),
    min_decode=st.integers(1, 3),
    ttft_seconds=st.none() | st.floats(0.1, 100),
)


@settings(deadline=None, max_examples=60)
@given(any_rules, arbitrary)
def test_on_constant_facts_it_rests_and_never_comes_back_to_where_it_was(of, installation):
    states = [tuple(state.counts.values()) for state in run(of, installation)]
    assert len(set(states)) == len(states)


@settings(deadline=None, max_examples=60)
@given(any_rules, arbitrary)
def test_bounds_hold_and_conversions_keep_the_number_of_instances(of, installation):
    decision = decide(of, installation, calm(installation))
    bounds = {pool.name: pool for pool in installation.pools}
    for name, count in decision.changes.items():
        assert 0 <= count <= (math.inf if bounds[name].most is None else bounds[name].most)
        assert decision.reason == "Converting" or bounds[name].most is not None
    if decision.reason == "Converting":
        new = {**installation.counts, **decision.changes}
        assert sum(new.values()) == sum(installation.counts.values())
        within = new["swing"] >= of.min_prefill and new["decode"] >= of.min_decode
        assert within or sum(decision.changes.values()) < of.min_prefill + of.min_decode
    elif decision.changes:
        assert len(decision.changes) == 1


@settings(deadline=None, max_examples=60)
@given(arbitrary, st.floats(1.0, 4.0))
def test_longer_prompts_never_lower_the_number_that_prefills(installation, factor):
    load = installation.load
    assert load is not None
    stretched = sorted({max(length, round(length * factor)) for length in load.workload.lengths})
    assume(len(stretched) == len(load.workload.lengths))
    longer = msgspec.structs.replace(load, workload=Workload(stretched, load.workload.weights))
    of = rules(min_prefill=0)
    found = [
        find_best_split(of, one, forecast(one, one.counts)).counts["swing"]
        for one in (installation, msgspec.structs.replace(installation, load=longer))
    ]
    assert found[1] >= found[0]
