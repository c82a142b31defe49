"""Proves what preflight makes of what it saw: every fault is named, with its place and its cure, and no other."""

import re
from datetime import timedelta
from pathlib import Path

import pytest
import yaml

from prfaas_operator.clusters import kinds
from prfaas_operator.preflight import findings
from prfaas_operator.preflight.facts import Admission, Scrape
from prfaas_operator.preflight.look import (
    INSTALLED_IN_HUB,
    INSTALLED_IN_MEMBER,
    rights_at,
    rights_of_hub,
    rights_of_member,
)

from .conftest import NOW, WELL, cluster, devices, path

CHARTS = Path(__file__).parents[3] / "charts"
SERVER = "10.245.0.1:6443"


def wrong(found) -> dict[str, tuple[str, str]]:
    """Return (level, text) of what is not well, by check; whatever is not well has a cure."""
    found = list(found)
    assert all(one.cure for one in found if one.level != "ok")
    return {one.check: (one.level, one.text) for one in found if one.level != "ok"}


def test_of_clusters_and_a_path_that_are_well_nothing_is_wrong():
    assert wrong(findings.of_cluster(cluster(), has_prometheus=False)) == {}
    assert wrong(findings.of_path(WELL, SERVER)) == {}
    assert wrong([findings.of_both(cluster(), cluster()), findings.of_admission(Admission("restricted", ""))]) == {}


@pytest.mark.parametrize(
    ("changed", "check", "level", "says"),
    [
        ({"rights": {"create roles": False, "create pods": True}}, "rights", "failed", "missing: create roles;"),
        (
            {"rights": {"create validatingadmissionpolicies": False, "create pods": True}},
            "admission rights",
            "warning",
            "missing: create validatingadmissionpolicies; have them granted, or set admission.enabled=false",
        ),
        ({"accelerators": ()}, "accelerators", "warning", "nvidia.com/gpu or amd.com/gpu; install the vendor's device"),
        ({"accelerators": None}, "accelerators", "warning", "may not list nodes"),
        ({"accelerators": devices("", 8)}, "accelerators", "warning", "8 x nvidia.com/gpu on 1 node; install GPU feat"),
        ({"has_pod_monitors": False}, "monitoring", "warning", "give your Prometheus by --prometheus"),
    ],
)
def test_a_fault_of_a_cluster_is_named(changed, check, level, says):
    ((found, (its_level, text)),) = wrong(findings.of_cluster(cluster(**changed), has_prometheus=False)).items()
    assert (found, its_level) == (check, level)
    assert says in text


def test_a_prometheus_that_a_person_names_needs_no_operator():
    assert wrong(findings.of_cluster(cluster(has_pod_monitors=False), has_prometheus=True)) == {}


def test_an_old_server_and_clocks_that_differ_fail():
    late = cluster(probe=cluster().probe._replace(version="v1.28.1", date=NOW + timedelta(seconds=90)))
    found = wrong(findings.of_cluster(late, has_prometheus=False))
    assert found["version"] == ("failed", "v1.28.1; upgrade the cluster: 1.29 is needed")
    assert found["clock"][1].startswith("90 s from this machine;")
    assert "90 s between hub and member" in findings.of_both(late, cluster()).message


def test_the_time_between_two_questions_is_no_difference_of_clocks():
    later = NOW + timedelta(minutes=5)
    asked_later = cluster(probe=cluster().probe._replace(date=later, at=later))
    assert findings.of_both(cluster(), asked_later).level == "ok"


def test_accelerators_are_shown_by_product_memory_and_nodes():
    (found,) = [one for one in findings.of_cluster(cluster(), has_prometheus=False) if one.check == "accelerators"]
    assert found.message == "16 x NVIDIA-H200 of 140 GiB on 2 nodes"


def test_a_refused_pod_fails_with_the_servers_own_sentence():
    found = findings.of_admission(Admission("", "exceeded quota: none"))
    assert found.level == "failed"
    assert "no standard, and a restricted pod is refused: exceeded quota: none" in found.message


@pytest.mark.parametrize(
    ("changed", "check", "level", "says"),
    [
        (
            {"api": "silent"},
            "API server",
            "failed",
            f"{SERVER}, from the hub's pods: silent; open it for the hub's pods",
        ),
        ({"prometheus": Scrape(failure="refused")}, "Prometheus", "failed", "does not answer the hub's pods: refused"),
        ({"prometheus": Scrape(interval="15s")}, "Prometheus", "warning", "staleAfterSeconds to 90 or more and a wind"),
        ({"ports": {**WELL.ports, "8001": "silent"}}, "port 8001", "failed", "silent; open TCP 8001"),
        ({"ports": {**WELL.ports, "8000": "refused"}}, "port 8000", "failed", "refused; open TCP 8000"),
        ({"ports": {**WELL.ports, "8001": "stranger"}}, "port 8001", "failed", "another program answers at the"),
        ({"ports": {**WELL.ports, "5600": "silent"}}, "engines' ports", "warning", "5600 for vllm-nixl"),
        (
            {"lost": "member to hub", "packet_bytes": 1400},
            "MTU",
            "failed",
            "packets above 1400 bytes vanish from member",
        ),
        ({"lost": "hub to member", "packet_bytes": 0}, "MTU", "failed", "no packets cross from hub to member"),
        ({"round_trip_seconds": None}, "round trip", "failed", "no byte came back"),
        ({"mbps": {"1": 90.0, "4": 350.0}}, "Mbit/s", "warning", "90 by 1 connection, 350 by 4"),
        ({"mbps": {"1": 0.0, "4": 0.0}}, "Mbit/s", "failed", "0 by 1 connection"),
    ],
)
def test_a_fault_of_the_path_is_named_and_no_other(changed, check, level, says):
    ((found, (its_level, text)),) = wrong(findings.of_path(path(**changed), SERVER)).items()
    assert (found, its_level) == (check, level)
    assert says in text


def test_without_a_route_the_cure_is_a_route_and_nothing_is_measured():
    shut = path(ports=dict.fromkeys(WELL.ports, "silent"), packet_bytes=0, round_trip_seconds=None, mbps={})
    found = wrong(findings.of_path(shut, SERVER))
    assert found.keys() == {"port 8000", "port 8001"}
    assert all("route the member's pods' addresses" in text for _, text in found.values())


def test_a_path_says_which_address_the_members_chart_must_admit():
    """The control: a path that nothing crossed knows none."""
    (said,) = (one for one in findings.of_path(WELL, SERVER) if one.check == "hub's address")
    assert (said.level, "sees 192.0.2.7: name its range in networkPolicy.hubCidrs" in said.text) == ("ok", True)
    assert not [one for one in findings.of_path(path(hub_address=""), SERVER) if one.check == "hub's address"]


def test_a_path_that_reports_a_small_limit_is_no_hole():
    assert wrong(findings.of_path(path(packet_bytes=1280, sent_bytes=1280), SERVER)) == {}


def test_a_quick_scrape_is_well():
    assert wrong(findings.of_path(path(prometheus=Scrape(interval="5s")), SERVER)) == {}


@pytest.mark.parametrize(("text", "seconds"), [("1s", 1), ("1m30s", 90), ("500ms", 0.5), ("1h", 3600), ("", 0)])
def test_durations_are_read_as_prometheus_writes_them(text, seconds):
    assert findings.seconds_of(text) == seconds


@pytest.mark.parametrize(("chart", "asked"), [("prfaas", INSTALLED_IN_HUB), ("prfaas-member", INSTALLED_IN_MEMBER)])
def test_the_right_to_create_whatever_a_chart_creates_is_asked_for(chart, asked):
    templates = "".join(file.read_text() for file in (CHARTS / chart / "templates").glob("*.yaml"))
    created = set(re.findall(r"^kind: (\w+)$", templates, re.MULTILINE)) - {"PodMonitor", "PrometheusRule"}
    assert len(created) > 3
    assert created <= {kind.name for kind in asked}
    assert kinds.SECRET in asked, "Helm keeps releases in Secrets"


@pytest.mark.parametrize(
    ("version", "asked"), [("v1.29.9", 0), ("v1.30.0", 2), ("v1.30+", 2), ("v1.34.4-eks-1a2b", 2), ("unknown", 2)]
)
def test_rights_to_admission_policies_are_asked_for_where_the_chart_makes_them(version, asked):
    whole = rights_of_member("here")
    found = rights_at(version, whole)
    named = [one for one in found if "validatingadmission" in one["resources"][0]]
    assert (len(named), len(whole) - len(found)) == (asked, 2 - asked)


def rights(rules) -> set[tuple[str, str, str]]:
    """Return (group, resource, verb) of all rules that are not for some names only."""
    return {
        (group, resource, verb)
        for one in rules
        for group in one["apiGroups"]
        for resource in one["resources"]
        for verb in one["verbs"]
        if "resourceNames" not in one
    }


def test_the_rights_that_the_hubs_chart_grants_are_asked_for_and_no_others():
    files = [CHARTS / "prfaas" / "templates" / name for name in ("rbac.yaml", "roles.yaml")]
    texts = [re.sub(r"{{.*?}}", "", file.read_text(), flags=re.DOTALL) for file in files]
    roles = [one for text in texts for one in yaml.safe_load_all(text) if one["kind"] in {"Role", "ClusterRole"}]
    assert len(roles) == 5
    # Certificates are granted where cert-manager is chosen.
    granted = {one for role in roles for one in rights(role["rules"]) if one[0] != "cert-manager.io"}
    created = {one for one in rights(rights_of_hub()) if one[2] == "create"}
    assert granted <= rights(rights_of_hub())
    assert rights(rights_of_hub()) - granted <= created
