"""The scheduler's part of the status: every condition names its cause, and says what its schema allows."""

import pytest

from prfaas.api import PrfaaSPolicyStatus
from prfaas.errors import ConfigError, ProtocolError, UnreachableError
from prfaas.routing.controller import State, Step
from prfaas.wire.control import LinkReport
from prfaas_scheduler import status

NOW, EARLIER = "2026-02-03T04:05:06Z", "2026-01-01T00:00:00Z"


def stepped(metrics="Fresh", **changes) -> Step:
    links = changes.pop("links", (link("eu", 41.6),))
    values = {
        "state": State(tokens=2000.0),
        "tokens": 2000,
        "bandwidth": "Abundant",
        "offload_clusters": ("eu",),
        "links": links,
        "metrics": metrics,
        "reason": "",
    }
    return Step(**(values | changes))


def link(cluster: str, percent: float | None, state="Alive") -> LinkReport:
    return LinkReport(cluster=cluster, state=state, effective_mbps=100.0, utilisation_percent=percent)


@pytest.fixture
def policy(table):
    return table(prometheus_url="http://prometheus:9090")


def test_the_body_is_what_the_custom_resource_declares(policy):
    report = status.report_of(policy, stepped(), (), 37, None)
    body = status.body_of(report, (), NOW)
    parsed = PrfaaSPolicyStatus.model_validate(body, extra="forbid")
    assert body["thresholdTokens"] == parsed.threshold_tokens == 2000
    assert (parsed.bandwidth, parsed.offloaded_percent, parsed.link_utilisation_percent) == ("Abundant", 37, 42)
    assert [(one.type, one.status, one.reason, one.observed_generation) for one in parsed.conditions] == [
        ("MetricsFresh", "True", "Fresh", 3),
        ("LinkHealthy", "True", "AllAlive", 3),
    ]
    assert "readyPrefill" not in body
    assert "observedGeneration" not in body, "the operator's fields are the operator's"


def test_what_is_not_known_is_left_out(policy):
    report = status.report_of(policy, stepped(links=(link("eu", None),)), (), None, None)
    assert set(status.body_of(report, (), NOW)) == {"thresholdTokens", "bandwidth", "conditions"}


def test_a_stale_or_dead_links_utilisation_is_not_shown(policy):
    assert status.busiest_percent(stepped(links=(link("eu", 90.0, "Silent"), link("us", 20.0)))) == 20
    assert status.busiest_percent(stepped("Stale")) is None


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UnreachableError("http://prometheus:9090 did not answer within 1 s"), "PrometheusUnreachable"),
        (ConfigError("Prometheus rejects the query sum(: parse error"), "QueryRejected"),
        (ProtocolError("Prometheus answers HTTP 200 with no JSON"), "AnswerDamaged"),
    ],
)
def test_stale_metrics_name_their_cause(policy, error, reason):
    verdict = status.metrics_fresh(policy, stepped("Stale"), [error])
    assert verdict[:2] == ("False", reason)
    assert str(error) in verdict.message
    assert "2000 tokens" in verdict.message


def test_stale_without_an_error_means_that_nothing_is_scraped(policy):
    assert status.metrics_fresh(policy, stepped("Stale"), [])[:2] == ("False", "NoSamples")


def test_a_short_gap_changes_nothing_and_nothing_is_known_before_the_first_sample(policy):
    first = status.report_of(policy, stepped("Held"), (), None, None)
    assert first.conditions["MetricsFresh"][:2] == ("Unknown", "Starting")
    fresh = status.report_of(policy, stepped("Fresh"), (), None, first)
    held = status.report_of(policy, stepped("Held"), (UnreachableError("slow"),), None, fresh)
    assert held.conditions["MetricsFresh"] == fresh.conditions["MetricsFresh"]


@pytest.mark.parametrize(
    ("state", "reason"),
    [("Unreachable", "ClusterUnreachable"), ("NoReadyInstance", "NoReadyInstance"), ("Silent", "NoSamples")],
)
def test_a_dead_link_is_named_with_its_cause(state, reason):
    verdict = status.link_healthy([link("us", 1.0), link("eu", 1.0, state)])
    assert verdict[:2] == ("False", reason)
    assert "eu" in verdict.message
    assert "us" not in verdict.message.split(":")[0].split()


def test_a_policy_with_only_the_hub_has_no_link_to_be_healthy():
    assert status.link_healthy([])[:2] == ("Unknown", "NoMemberCluster")


def test_a_condition_keeps_its_time_until_its_status_changes(policy):
    known = [
        {"type": "MetricsFresh", "status": "True", "lastTransitionTime": EARLIER},
        {"type": "LinkHealthy", "status": "True", "lastTransitionTime": EARLIER},
        {"type": "Ready", "status": "True", "lastTransitionTime": EARLIER},
    ]
    report = status.report_of(policy, stepped(links=(link("eu", 1.0, "Silent"),)), (), None, None)
    times = {one["type"]: one["lastTransitionTime"] for one in status.body_of(report, known, NOW)["conditions"]}
    assert times == {"MetricsFresh": EARLIER, "LinkHealthy": NOW}


def test_new_figures_are_no_turning_point(policy):
    first = status.report_of(policy, stepped(), (), 10, None)
    figures = status.report_of(policy, stepped(links=(link("eu", 77.0),)), (), 99, first)
    assert first.turning_points == figures.turning_points
    for change in (
        stepped(tokens=2001),
        stepped(bandwidth="Scarce"),
        stepped("Stale"),
        stepped(links=(link("eu", 41.6, "Silent"),)),
    ):
        assert status.report_of(policy, change, (), 10, first).turning_points != first.turning_points
