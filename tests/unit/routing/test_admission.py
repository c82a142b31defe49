"""Proves what an SLO refuses: a request before which more waits than the promise allows at every place that its
decision considered, and nothing else. An idle system refuses no prompt.
"""

import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.tables import make_instance, make_table

from prfaas.names import HUB
from prfaas.routing.decide import Overload, decide, find_considered, find_overload
from prfaas.routing.facts import Route, RoutingFacts, RoutingRule
from prfaas.routing.prices import Backlog, Work
from prfaas.wire.control import Price
from prfaas.wire.profile import Profile
from prfaas.wire.routes import Cluster, Threshold

PROFILE = Profile(state_bytes=1000, token_bytes=10, token_seconds=1e-3, samples=9)
NAMES = ["d0", "d1", "p0", "p1", "x0", "x1"]
PRICES = (Price(cluster=HUB, profile=PROFILE), Price(cluster="eu", profile=PROFILE, link_mbps=1000.0))


def facts(
    names, waits=None, *, slo: int | None = 1000, total: int = 10_000, prices=(), now: float = 0.0
) -> RoutingFacts:
    """RoutingFacts by which an instance has so many seconds of work before it."""
    table = make_table(
        *map(make_instance, names),
        threshold=Threshold(mode="Auto", tokens=5000, min_tokens=1, max_tokens=5000),
        ttft_slo_millis=slo,
        clusters=(Cluster(name="eu", capacity_mbps=1000, utilisation_query="", round_trip_millis=10),),
    )
    backlog = Backlog()
    for name, seconds in (waits or {}).items():
        backlog.add(name, name, Work(seconds=seconds), 0.0)
    return RoutingFacts(
        now_seconds=now,
        request_id="r",
        total_tokens=total,
        rule=RoutingRule(threshold_tokens=5000, bandwidth="Scarce", offload_clusters=frozenset({"eu"}), prices=prices),
        table=table,
        backlog=backlog,
        profiles=dict.fromkeys(names, PROFILE),
    )


def judge(world: RoutingFacts) -> Overload | None:
    route = decide(world)
    assert isinstance(route, Route)
    return find_overload(world, route)


fleets = st.sets(st.sampled_from(NAMES)).map(lambda names: sorted({"d0", *names}))
lengths = st.integers(1, 10_000_000)
waits = st.dictionaries(st.sampled_from(NAMES), st.floats(0, 1e6))
prices = st.sampled_from([(), PRICES])


@given(fleets, lengths, st.integers(1, 3_600_000), prices)
def test_an_idle_system_refuses_no_prompt(names, total, slo, priced):
    assert judge(facts(names, slo=slo, total=total, prices=priced)) is None


@given(fleets, lengths, waits, prices)
def test_without_an_slo_nothing_is_refused(names, total, waiting, priced):
    assert judge(facts(names, waiting, slo=None, total=total, prices=priced)) is None


@given(fleets, lengths, waits, st.integers(1, 100_000), prices)
def test_a_refused_request_has_no_place_in_time_and_is_taken_after_the_stated_wait(names, total, waiting, slo, priced):
    world = facts(names, waiting, slo=slo, total=total, prices=priced)
    route = decide(world)
    assert isinstance(route, Route)
    places = [one.name for one in find_considered(world, route)]
    assert (route.prefill or route.decode).name in places
    late = find_overload(world, route)
    assert (late is not None) == all(waiting.get(name, 0.0) > slo / 1000 for name in places)
    if late is not None:
        assert math.isclose(late.wait_seconds, min(waiting[name] for name in places))
        moment = late.retry_after_seconds + 1e-6 * late.wait_seconds
        assert moment > 0
        later = msgspec.structs.replace(world, now_seconds=moment)
        assert find_overload(later, route) is None


@given(fleets, lengths, waits, st.integers(1, 100_000))
def test_one_more_idle_instance_where_prefill_runs_ends_refusals(names, total, waiting, slo):
    kind = decide(facts(names, waiting, slo=slo, total=total))
    assert isinstance(kind, Route)
    more = {"d": "d9", "p": "p9", "x": "x9"}[(kind.prefill or kind.decode).name[0]]
    assert judge(facts([*names, more], waiting, slo=slo, total=total)) is None


def test_each_decision_is_judged_by_the_places_that_it_considered():
    assert judge(facts(["d0", "p0", "p1"], {"p0": 5.0, "p1": 2.5}, total=100)).retry_after_seconds == 1.5
    assert judge(facts(["d0", "p0"], {"d0": 5.0}, total=100)) is None, "decode instances prefill nothing here"
    assert judge(facts(["d0", "d1"], {"d0": 5.0, "d1": 3.0}, total=100)).wait_seconds == 3.0
    long_prompt = facts(["d0", "x0", "x1"], {"x0": 5.0, "x1": 9.0})
    assert judge(long_prompt).wait_seconds == 5.0
    assert judge(facts(["d0", "x0"], {"d0": 5.0})) is None
    assert judge(facts(["d0", "p0", "x0"], {"p0": 90.0, "x0": 5.0}, prices=PRICES)).wait_seconds == 5.0
    assert judge(facts(["d0", "p0", "x0"], {"x0": 5.0}, prices=PRICES)) is None


def test_what_has_no_first_token_waits_however_long_ago_it_was_due():
    world = facts(["d0"], slo=6000, total=100)
    for number in range(10):
        world.backlog.add(number, "d0", Work(seconds=1.0), 0.0)
    world.backlog.remove(0, 5.0)
    late = msgspec.structs.replace(world, now_seconds=5.0)
    assert judge(late).wait_seconds == 9.0
    for number in range(1, 5):
        world.backlog.remove(number, 5.0)
    assert judge(late) is None, "control: five are done after five seconds"


def test_knows_the_work_of_a_request_by_the_profile_of_its_prefill_instance():
    route = decide(facts(["d0"], total=4000))
    assert isinstance(route, Route)
    assert route.work == Work(seconds=4.0)
    unknown = msgspec.structs.replace(facts(["d0"]), profiles={})
    assert decide(unknown).work is None
    nonsense = Profile(state_bytes=1, token_bytes=1, token_seconds=math.inf, samples=9)
    assert decide(msgspec.structs.replace(unknown, profiles={"d0": nonsense})).work is None
    fetched = msgspec.structs.replace(
        facts(["d0", "d1"], total=4000), cached_on={"d1": 3000}, queued_tokens={"d1": 9000}
    )
    route = decide(fetched)
    assert (route.decode.name, route.prefix.name, route.work) == ("d0", "d1", Work(seconds=1.0))
