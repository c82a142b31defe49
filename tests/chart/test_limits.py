"""Proves that every container that a chart installs has requests and limits, and that values set them."""

from pathlib import Path

import pytest
from tests.containers import containers_in, lacking

CHARTS = Path(__file__).parents[2] / "charts"
VALUES = [
    pytest.param(chart, path, id=f"{chart}-{path.name if path else 'defaults'}")
    for chart in ("prfaas", "prfaas-member")
    for path in (None, *sorted((CHARTS / chart / "ci").glob("*.yaml")))
]
CONTAINERS = {"prfaas": ["operator", "test"], "prfaas-member": []}


@pytest.mark.parametrize(("chart", "values"), VALUES)
def test_every_container_of_a_chart_has_requests_and_limits(render, chart, values):
    objects = render(chart, *(["--values", str(values)] if values else []))
    assert sorted(one["name"] for each in objects for one in containers_in(each)) == CONTAINERS[chart]
    assert [lack for each in objects for lack in lacking(each)] == []


@pytest.mark.parametrize("name", CONTAINERS["prfaas"])
def test_finds_the_container_whose_values_are_taken_away(render, name):
    objects = render("prfaas", "--set", f"{name}.resources=null")
    wanted = [f"{name}: {one}" for one in ("requests.cpu", "requests.memory", "limits.memory")]
    assert [lack for each in objects for lack in lacking(each)] == wanted


def test_values_size_the_pod_that_tests_an_installation(render):
    objects = render("prfaas", "--set", "test.resources.limits.memory=1Gi")
    (pod,) = [each for each in objects if each["kind"] == "Pod"]
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {"memory": "1Gi"}
