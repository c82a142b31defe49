"""Proves what `prfaas cluster check` makes of what it saw: what fails, what is only worth a look, and what to do."""

import copy
from datetime import UTC, datetime, timedelta

import pytest

from prfaas.api import Condition, PrefillPool, crd
from prfaas_operator import check
from prfaas_operator.plan.credentials import TokenFacts

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def token(age_days: float, left_days: float) -> TokenFacts:
    return TokenFacts("ns", "a", NOW - timedelta(days=age_days), NOW + timedelta(days=left_days))


@pytest.mark.parametrize(
    ("facts", "level", "message"),
    [
        (None, "ok", "no end"),
        (token(10, 20), "ok", "outlives an outage of 20 days"),
        (token(0.1, 0.1), "ok", "outlives an outage of 2.4 hours"),
        (token(25, 5), "warning", "should have been renewed"),
        (token(30, 0), "failed", "run `prfaas cluster join eu` again"),
    ],
)
def test_a_token_is_judged_by_what_is_left_of_it(facts, level, message):
    finding = check.token_finding(facts, "eu", NOW)
    assert finding.level == level
    assert message in finding.message


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("v1.34.4", "ok"),
        ("v1.29.0-eks-1a2b", "ok"),
        ("v1.28.9", "failed"),
        ("v1.30+", "ok"),
        ("", "warning"),
        ("v2.1", "warning"),
    ],
)
def test_a_server_that_is_too_old_fails_and_an_unknown_one_is_named(text, level):
    assert check.version_finding(text).level == level


@pytest.mark.parametrize(("seconds", "level"), [(0, "ok"), (-5, "ok"), (6, "warning"), (-61, "failed")])
def test_clocks_may_differ_a_little(seconds, level):
    assert check.clock_finding(NOW, NOW + timedelta(seconds=seconds)).level == level


def test_missing_rights_are_named_one_by_one():
    finding = check.rights_finding({"create deployments": True, "patch configmaps": False, "list pods": False})
    assert finding.level == "failed"
    assert "missing: list pods, patch configmaps;" in finding.message


def link(status: str) -> Condition:
    return Condition.model_validate(
        {"type": "LinkHealthy", "status": status, "reason": "Why", "message": "m", "lastTransitionTime": "x"}
    )


@pytest.mark.parametrize(
    ("links", "reached", "level"),
    [
        ([link("True")], {"10.0.0.1:8000": False}, "ok"),
        ([link("True"), link("False")], {"10.0.0.1:8000": True}, "failed"),
        ([], {"10.0.0.1:8000": True}, "ok"),
        ([], {"10.0.0.1:8000": False}, "warning"),
        ([link("Unknown")], {}, "warning"),
    ],
)
def test_the_scheduler_knows_the_data_path_better_than_a_terminal_does(links, reached, level):
    assert check.data_path_finding(links, reached).level == level


def test_the_operators_own_report_counts(make):
    assert check.operators_view(make.member()).level == "failed"
    assert check.last_contact(make.member(), NOW).level == "failed"
    body = make.member().model_dump(by_alias=True)
    body["status"] = {
        "lastContactTime": "2025-12-31T23:50:00Z",
        "conditions": [{**link("False").model_dump(by_alias=True), "type": "Ready"}],
    }
    silent = type(make.member()).model_validate(body)
    assert check.operators_view(silent)[:3] == ("operator", "failed", "Why: m")
    assert check.last_contact(silent, NOW)[:3] == ("last contact", "warning", "2025-12-31T23:50:00Z, 600 s ago")


def test_recognises_a_crd_of_another_version_by_its_fields():
    ours = crd.crd(PrefillPool)
    assert check.crd_skew("PrefillPool", ours, ours).level == "ok"
    assert check.crd_skew("PrefillPool", ours, None).level == "failed"
    other = copy.deepcopy(ours)
    spec = other["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    del spec["replicas"]
    assert ".spec.replicas" in check.crd_skew("PrefillPool", ours, other).message
    assert check.crd_skew("PrefillPool", ours, other).level == "failed"
    newer = check.crd_skew("PrefillPool", other, ours)
    assert (newer.level, ".spec.replicas" in newer.message) == ("warning", True)


def test_all_is_well_unless_something_failed():
    ok, warning, failed = (check.Finding("x", level, "") for level in ("ok", "warning", "failed"))
    assert check.is_well([ok, warning])
    assert not check.is_well([ok, failed])
