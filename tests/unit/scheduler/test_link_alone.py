"""A link that no worker of ours counts: only the utilisationQuery moves the threshold, and a dead link is found."""

from dataclasses import dataclass, field

import pytest

from prfaas.routing import controller
from prfaas.routing.controller import ControllerFacts, initial_state
from prfaas.routing.links import LinkFacts
from prfaas_scheduler.measure import LinkTraffic, samples_of
from prfaas_scheduler.prometheus import Figure


def instances(cluster: str, at_seconds: float, now_seconds: float) -> Figure:
    return Figure({"cluster": cluster, "figure": "instances_sampled_at_seconds"}, at_seconds, now_seconds)


@dataclass
class Driven:
    """The controller on a link of 1 Gbit/s, a second a step."""

    config: controller.Config
    state: controller.State
    second: int = 0
    updates: list[controller.Step] = field(default_factory=list)

    def step(self, figures: list[Figure], traffic: LinkTraffic | None, *, hub_measured: bool = False):
        self.second += 1
        sample = samples_of(figures, {"eu": traffic}).get("eu")
        link = LinkFacts(cluster="eu", capacity_mbps=1000, reachable=True, ready_instances=4, sample=sample)
        facts = ControllerFacts(
            now_seconds=float(self.second), links=(link,), hub_measured=hub_measured, recent_offloads=10
        )
        step = controller.step(self.config, self.state, facts)
        self.state = step.state
        return step

    def traffic(self, mbps: float) -> LinkTraffic:
        return LinkTraffic(mbps, float(self.second), float(self.second))


@pytest.fixture
def driven(table) -> Driven:
    config = controller.config_of(table())
    return Driven(config, initial_state(config))


def test_a_query_without_counters_is_a_sample(driven):
    sample = samples_of([], {"eu": LinkTraffic(990.0, 20.0, 19.0)})["eu"]
    assert (sample.traffic_mbps, sample.sampled_at_seconds, sample.age_seconds) == (990.0, 19.0, 1.0)


def test_a_full_link_raises_the_threshold_and_an_idle_one_lowers_it(driven):
    for _ in range(20):
        step = driven.step([], driven.traffic(990.0))
    assert step.tokens > 4 * 1024
    assert (step.metrics, step.bandwidth) == ("Fresh", "Scarce")
    for _ in range(60):
        step = driven.step([], driven.traffic(10.0))
    assert step.tokens == 512
    assert step.bandwidth == "Abundant"


def test_nothing_moves_twice_on_one_sample(driven):
    first = driven.step([], LinkTraffic(990.0, 10.0, 9.0))
    for now in range(11, 18):  # the rate is a new number each second, of the samples of second 9
        again = driven.step([], LinkTraffic(990.0 + now, float(now), 9.0))
    assert again.tokens == first.tokens
    assert driven.step([], LinkTraffic(990.0, 18.0, 17.0)).tokens > first.tokens


def test_a_member_whose_instances_fell_silent_is_dead_even_if_a_router_still_counts(driven):
    def seen(now: float) -> list[Figure]:
        return [instances("hub", now, now), instances("eu", now, now)]

    for now in range(5):
        step = driven.step(seen(float(now)), driven.traffic(10.0), hub_measured=True)
    assert step.offload_clusters == ("eu",)
    states = []
    for now in range(5, 9):
        step = driven.step([instances("hub", float(now), float(now))], driven.traffic(0.0), hub_measured=True)
        states.append(step.links[0].state)
    assert states == ["Alive", "Silent", "Silent", "Silent"], "one lost scrape is no silence"
    assert step.offload_clusters == ()
    step = driven.step(seen(9.0), driven.traffic(10.0), hub_measured=True)
    assert step.offload_clusters == ("eu",)


def test_where_the_member_was_never_scraped_only_the_query_decides(driven):
    for now in range(5):
        step = driven.step([instances("hub", float(now), float(now))], driven.traffic(10.0), hub_measured=True)
    assert (step.links[0].state, step.metrics) == ("Alive", "Fresh")


def test_instances_without_any_traffic_keep_a_link_alive_and_measure_nothing(driven):
    for _ in range(12):
        now = float(driven.second)
        step = driven.step([instances("hub", now, now), instances("eu", now, now)], None, hub_measured=True)
    assert (step.links[0].state, step.metrics) == ("Alive", "Stale")
