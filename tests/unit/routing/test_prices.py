"""Prices: each request goes where it costs least with what waits there, and without prices the threshold decides."""

import math

import msgspec
import pytest
from tests.tables import make_table

from prfaas.routing.balance import Offered
from prfaas.routing.controller import Config, ControllerFacts, Step, initial_state, step
from prfaas.routing.decide import decide
from prfaas.routing.facts import Route, rule_in_force
from prfaas.routing.facts import RoutingFacts as RequestFacts
from prfaas.routing.feedforward import PoolFacts
from prfaas.routing.lengths import BINS, LengthTally, demand_of
from prfaas.routing.links import LinkFacts, LinkSample
from prfaas.routing.prices import Backlog, Work
from prfaas.wire.control import Price, ThresholdUpdate
from prfaas.wire.profile import Profile
from prfaas.wire.routes import Cluster, Instance, LinkWatermarks, RoutingTable, Threshold

MARKS = LinkWatermarks(high_percent=80, low_percent=50)
THRESHOLD = Threshold(mode="Priced", tokens=2048, min_tokens=256, max_tokens=131_072)


def price(cluster: str, token: float = 1e-4, link_mbps: float = 0.0, **fields) -> Price:
    of = {"state_bytes": 0, "token_bytes": 0, "samples": 5, "token_seconds": token} | fields
    return Price(cluster=cluster, profile=Profile(**of), link_mbps=link_mbps)


HOME, AWAY = price("hub", 1e-4), price("eu", 2e-5, 800.0, fixed_seconds=0.2, token_bytes=1000)
"""Away an idle prompt of n tokens takes 0.2 s + 20 us n, and its cache 10 us n of the link."""


def instance(name: str, cluster: str, role: str = "prefill") -> Instance:
    return Instance(name=name, pool=cluster, cluster=cluster, role=role, url="http://192.0.2.1:8000")


def table(mode: str = "Priced", *more: Instance, clusters: tuple[str, ...] = ("eu",), **fields) -> RoutingTable:
    return make_table(
        instance("home", "hub"),
        instance("decode", "hub", "decode"),
        *(instance(f"away-{name}", name) for name in clusters),
        *more,
        threshold=msgspec.structs.replace(THRESHOLD, mode=mode),
        clusters=tuple(
            Cluster(name=name, datacenter=name, capacity_mbps=100, utilisation_query="q") for name in clusters
        ),
        **fields,
    )


def route(tokens: int, *, prices=(HOME, AWAY), alive=("eu",), routes: RoutingTable | None = None, **more) -> Route:
    of = routes or table()
    update = ThresholdUpdate(
        tokens=1000, bandwidth="Scarce", offload_clusters=alive, expires_seconds=10, reason="", prices=tuple(prices)
    )
    facts = RequestFacts(
        **({"now_seconds": 0.0} | more), request_id="r", total_tokens=tokens, rule=rule_in_force(of, update), table=of
    )
    decision = decide(facts)
    assert isinstance(decision, Route)
    return decision


def waiting(**seconds: float) -> Backlog:
    """Return a backlog of one request at each of these instances, with `_` for `-`."""
    backlog = Backlog()
    for name, amount in seconds.items():
        backlog.add(name, name.replace("_", "-"), Work(seconds=amount), 0.0)
    return backlog


def test_a_short_prompt_stays_where_a_long_one_leaves():
    assert (route(2400).kind, route(2400).reason) == ("local", "Cheaper")
    assert (route(2600).kind, route(2600).reason) == ("offload", "Cheaper")


def test_a_queue_at_home_sends_even_a_short_prompt_away_and_one_there_keeps_a_long_one():
    assert route(100, backlog=waiting(home=1.0)).kind == "offload"
    assert route(10_000, backlog=waiting(away_eu=3.0)).kind == "local"


def test_a_request_pays_for_those_that_it_keeps_waiting():
    """0.1 s at home against 0.22 s away, behind 0.01 s of one request and behind as much of ten."""
    few, many = Backlog(), Backlog()
    few.add(0, "home", Work(seconds=0.01), 0.0)
    for number in range(10):
        many.add(number, "home", Work(seconds=0.001), 0.0)
    assert route(1000, backlog=few).kind == "local"
    assert route(1000, backlog=many).kind == "offload"


def test_a_backlog_on_the_link_keeps_prompts_at_home():
    behind = Backlog()
    behind.add(0, "another", Work(seconds=0.0, link="eu", bits=2.4e9, mbps=800.0), 0.0)  # three seconds of it
    assert route(10_000, backlog=behind).kind == "local"
    assert route(10_000, backlog=behind, now_seconds=2.9).kind == "offload"


def test_in_a_hub_without_prefill_instances_home_is_the_decode_instance():
    routes = table()
    routes = msgspec.structs.replace(routes, instances=tuple(one for one in routes.instances if one.name != "home"))
    short, long = route(2400, routes=routes), route(2600, routes=routes)
    assert (short.kind, short.reason, short.prefill) == ("local", "Cheaper", None)
    assert short.work == Work(seconds=pytest.approx(0.24))
    assert (long.kind, long.reason, long.decode.name) == ("offload", "Cheaper", "decode")
    assert route(100, routes=routes, backlog=waiting(decode=1.0)).kind == "offload"


def test_an_idle_instance_of_a_cluster_is_taken_before_a_busy_one():
    two = table("Priced", instance("home-2", "hub"))
    assert route(100, routes=two, backlog=waiting(home=0.01)).prefill == instance("home-2", "hub")


def test_a_route_names_its_work_for_the_instance_and_the_link():
    work = route(10_000, cached_tokens={"hub": 2_000, "eu": 4_000}).work
    assert work == Work(seconds=pytest.approx(0.2 + 2e-5 * 6_000), link="eu", bits=8e3 * 8_000, mbps=800.0)
    assert route(1_000).work == Work(seconds=pytest.approx(0.1))
    assert route(1_000, prices=()).work is None


def test_a_cache_counts_for_the_cluster_that_holds_it():
    assert route(10_000, cached_tokens={"hub": 9_000}).kind == "local"
    assert route(3_000, cached_tokens={"hub": 2_000}).kind == "local"
    assert route(3_000, cached_tokens={"eu": 2_000}).kind == "offload"


def test_the_cheaper_of_two_clusters_is_taken_unless_the_policy_prefers_the_other():
    both = table(clusters=("eu", "us"))
    prices = (HOME, AWAY, price("us", 1e-5, 8000.0))
    assert route(9_000, prices=prices, alive=("eu", "us"), routes=both).prefill == instance("away-us", "us")
    prefers = table(clusters=("eu", "us"), prefer_datacenters=("eu",))
    assert route(9_000, prices=prices, alive=("eu", "us"), routes=prefers).prefill == instance("away-eu", "eu")


def test_never_takes_a_dead_link():
    assert route(100_000, alive=()).kind == "local"


@pytest.mark.parametrize("prices", [(), (AWAY,)])
def test_without_the_price_of_home_the_threshold_decides(prices):
    assert route(1001, prices=prices).reason == "AboveThreshold"
    assert route(1000, prices=prices).reason == "WithinThreshold"


@pytest.mark.parametrize("mode", ["Auto", "Fixed", "Disabled"])
def test_no_other_mode_looks_at_prices(mode):
    assert route(2500, routes=table(mode)).reason != "Cheaper"


@pytest.mark.parametrize("absurd", [math.nan, math.inf, -1e9])
@pytest.mark.parametrize("field", ["fixed_seconds", "token_seconds"])
def test_an_absurd_price_is_the_dearest(absurd: float, field: str):
    assert route(9_000, prices=(HOME, price("eu", link_mbps=800.0, **{field: absurd}))).kind == "local"


@pytest.mark.parametrize("link_mbps", [0.0, -1.0, math.nan, math.inf])
def test_a_link_that_carries_nothing_known_is_never_taken(link_mbps: float):
    assert route(100_000, prices=(HOME, price("eu", 1e-9, link_mbps))).kind == "local"


# --- prices from the controller ---------------------------------------------------------------------------------------


def profile(token_seconds: float) -> Profile:
    return Profile(state_bytes=1000, token_bytes=1000, token_seconds=token_seconds, samples=5)


def stepped(*, mode: str = "Priced", busy: float = 0.0, waiting: float = 0.0, times: int = 1) -> Step:
    tally = LengthTally()
    for tokens in range(100, 8000, 20):
        tally.add(tokens)
    demand = demand_of(BINS, tally.counts)
    assert demand is not None
    pools = (
        PoolFacts(cluster="eu", ready_instances=1, profile=profile(2e-5)),
        PoolFacts(cluster="hub", ready_instances=1, profile=profile(1e-4)),
    )
    config = Config(threshold=msgspec.structs.replace(THRESHOLD, mode=mode), watermarks=MARKS, stale_after_seconds=10)
    state = initial_state(config)
    for second in range(times):
        sample = LinkSample(sampled_at_seconds=float(second), age_seconds=0.0, traffic_mbps=busy)
        link = LinkFacts(cluster="eu", capacity_mbps=100, reachable=True, ready_instances=1, sample=sample)
        offered = Offered(demand=demand, arrivals_per_second=1.0, pools=pools, local_waiting_prefills=waiting)
        result = step(
            config,
            state,
            ControllerFacts(
                now_seconds=float(second), links=(link,), hub_measured=True, recent_offloads=1, offered=offered
            ),
        )
        state = result.state
    return result


def test_each_side_is_charged_by_its_mean_profile_and_its_effective_link():
    home, away = stepped().prices
    assert (home.cluster, home.profile.token_seconds, home.link_mbps) == ("hub", 1e-4, 0.0)
    assert (away.cluster, away.profile.token_seconds, away.link_mbps) == ("eu", 2e-5, 100.0)


@pytest.mark.parametrize("mode", ["Auto", "Fixed", "Disabled"])
def test_prices_are_made_in_their_mode_only(mode):
    assert stepped(mode=mode).prices == ()


def test_in_mode_priced_the_threshold_moves_as_in_auto():
    assert stepped(busy=100.0).tokens == stepped(mode="Auto", busy=100.0).tokens
