"""The summary for the operator's long loop: what the custom resource declares, and a workload and profiles again."""

import random

import pytest

from prfaas.api.policystatus import MAX_SLICES, Observed
from prfaas.capacity.profile import MeasuredPoint, prefill_seconds, profile_through
from prfaas.capacity.workload import slices, workload_of
from prfaas.routing.lengths import EDGES, LengthTally
from prfaas.routing.links import LinkState
from prfaas.wire.control import Counters, LinkReport
from prfaas.wire.profile import Profile
from prfaas.wire.routes import Instance
from prfaas_scheduler import observe
from prfaas_scheduler.loop import offered_of, pools_of
from prfaas_scheduler.measure import Measurements
from prfaas_scheduler.observe import CounterHistory
from prfaas_scheduler.prometheus import Figure

NOW = "2026-02-03T04:05:06Z"
PROFILE = Profile(
    state_bytes=7_000_000, token_bytes=1100, fixed_seconds=0.4, token_seconds=4e-5, squared_seconds=9e-11, samples=12
)
RANDOM = random.Random(1)
DRAWN = [round(RANDOM.lognormvariate(9.0, 1.0)) for _ in range(20_000)]


def counted(lengths: list[int]) -> tuple[int, ...]:
    tally = LengthTally()
    for length in lengths:
        tally.add(length)
    return tally.counts


def figure(name: str, value: float, **labels: str) -> Figure:
    return Figure({"figure": name} | labels, value, 1000.0)


def link(cluster: str, state: LinkState = "Alive") -> LinkReport:
    return LinkReport(cluster=cluster, state=state, effective_mbps=91.6, utilisation_percent=40.0)


FIGURES = [
    figure("tokens", 300.0),
    figure("answers", 1.6),
    figure("decode_seconds", 0.9),
    figure("decode_steps", 30.0),
    figure("batch", 32.0),
    figure("waiting", 3.0, pool="offload"),
]
SEEN = observe.SummaryInputs(counted(DRAWN), 1.25, (link("eu"), link("us", "Silent")), {("eu", "offload"): PROFILE})


def test_a_summary_is_what_the_custom_resource_declares():
    found = Observed.model_validate(observe.summarise(SEEN, FIGURES, NOW), extra="forbid")
    assert (found.time, found.prompts, found.gateway_arrival_milli_per_second) == (NOW, 20_000, 1250)
    assert (found.output_milli_tokens, found.decode_step_micros, found.decode_batch) == (187_500, 30_000, 32)
    assert [(one.cluster_name, one.effective_mbps) for one in found.links] == [("eu", 92)]
    (pool,) = found.pools
    assert (pool.name, pool.samples, pool.waiting_prefills) == ("offload", 12, 3)
    assert len(found.length_tokens) == MAX_SLICES


def test_what_is_not_known_is_left_out_and_an_idle_system_says_that_nothing_comes():
    idle = observe.summarise(observe.SummaryInputs((), 0.0, (), {}), [figure("decode_steps", 0.0)], NOW)
    assert idle == {
        "time": NOW, "prompts": 0, "gatewayArrivalMilliPerSecond": 0, "lengthTokens": [], "links": [], "pools": [],
    }  # fmt: skip
    absurd = [figure("tokens", float("nan")), figure("answers", 1.0), figure("batch", float("inf"))]
    assert observe.summarise(observe.SummaryInputs((), 0.0, (), {}), absurd, NOW) == idle


def test_lengths_and_profiles_come_back_as_they_were():
    found = Observed.model_validate(observe.summarise(SEEN, FIGURES, NOW))
    workload = workload_of(found.length_tokens)
    assert workload.mean_tokens == pytest.approx(sum(DRAWN) / len(DRAWN), rel=0.01)
    for share in (0.1, 0.5, 0.9):
        assert workload.quantile(share) == pytest.approx(sorted(DRAWN)[int(share * len(DRAWN))], rel=0.06)
    points = [MeasuredPoint(one.tokens, one.prefill_micros / 1e6, one.cache_bytes) for one in found.pools[0].profile]
    profile = profile_through(points, 12)
    assert profile is not None
    for tokens in (100, 5_000, 200_000):
        assert prefill_seconds(profile, tokens) == pytest.approx(prefill_seconds(PROFILE, tokens), rel=1e-4)
    assert (profile.state_bytes, profile.token_bytes) == (PROFILE.state_bytes, PROFILE.token_bytes)


@pytest.mark.parametrize("lengths", [[700], [5] * 3, [1, 1_000_000], list(range(1, 40))])
def test_slices_of_any_prompts_ascend_and_keep_their_mean(lengths):
    means = slices(EDGES, counted(lengths))
    assert len(means) == MAX_SLICES
    assert means == sorted(means)
    assert sum(means) / len(means) == pytest.approx(sum(lengths) / len(lengths), rel=0.05, abs=0.6)
    assert workload_of(means).mean_tokens == pytest.approx(sum(means) / len(means), rel=0.01, abs=0.5)


def test_points_that_fall_or_are_too_few_make_no_profile():
    rising = [MeasuredPoint(1, 1.0, 10.0), MeasuredPoint(2, 2.0, 20.0), MeasuredPoint(3, 3.0, 30.0)]
    assert profile_through(rising, 1) is not None
    assert profile_through(rising[:2], 1) is None
    assert profile_through([rising[0], rising[0], rising[1]], 1) is None
    assert profile_through([*rising[:2], MeasuredPoint(3, 0.5, 30.0)], 1) is None
    assert profile_through([*rising[:2], MeasuredPoint(3, float("nan"), 30.0)], 1) is None


def test_the_mean_of_arrivals_needs_half_a_minute():
    history = CounterHistory()

    def add(at_seconds: float, prompts: int) -> None:
        counts = counted([100] * prompts)
        history.add(at_seconds, Counters(offloaded=0, local=0, failed_offloads=0, lengths=counts))

    assert history.mean_arrivals_per_second() is None
    for at_seconds, prompts in ((0.0, 0), (10.0, 20), (29.0, 58)):
        add(at_seconds, prompts)
        assert history.mean_arrivals_per_second() is None
    add(40.0, 80)
    assert history.mean_arrivals_per_second() == pytest.approx(2.0)


def test_what_comes_to_all_gateways_is_taken_from_our_own_gateway_s_share(table):
    history, own = CounterHistory(), counted(DRAWN[:300])
    measured = Measurements({}, hub_measured=True, errors=(), profiles={("eu", "offload"): PROFILE})

    def arrivals_per_second(gateways: int) -> float | None:
        offered = offered_of(table(gateways=gateways), measured, history)
        assert offered is not None
        return offered.arrivals_per_second

    history.add(0.0, Counters(offloaded=0, local=0, failed_offloads=0, lengths=tuple(0 for _ in own)))
    history.add(1.0, Counters(offloaded=0, local=300, failed_offloads=0, lengths=own))
    assert arrivals_per_second(3) is None, "too few seconds"
    history.add(100.0, Counters(offloaded=0, local=300, failed_offloads=0, lengths=own))
    history.add(130.0, Counters(offloaded=0, local=600, failed_offloads=0, lengths=counted(DRAWN[:600])))
    assert (arrivals_per_second(1), arrivals_per_second(3)) == pytest.approx((10.0, 30.0))


def test_instances_that_two_pools_share_have_the_profile_of_the_decode_pool(table):
    def instance(name: str, pool: str, role) -> Instance:
        return Instance(name=name, pool=pool, cluster="hub", role=role, url="http://192.0.2.3:8000", convertible=True)

    shared = table(instances=(instance("a", "decode", "decode"), instance("b", "swing", "prefill")))
    measured = Measurements({}, hub_measured=True, errors=(), profiles={("hub", "decode"): PROFILE})
    (found,) = pools_of(shared, measured, {"hub": 1.5}.__getitem__)
    assert (found.cluster, found.ready_instances, found.profile, found.work) == ("hub", 1, PROFILE, 1.5)
