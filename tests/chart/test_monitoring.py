"""Proves that alerts and dashboards query metrics that exist, in queries that Prometheus can read, and that an alert
fires when what it is about happens, and not before.

Metrics that exist are those that the processes' own registries give, with stand-in figures: a renamed one fails here.
"""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import yaml

from prfaas.wire.engine import Measured, Stats
from prfaas.wire.profile import Profile
from prfaas.wire.stats import CacheStats, LinkStats
from prfaas_gateway.metrics import GatewayMetrics
from prfaas_operator import metrics as operator
from prfaas_sandbox.tools import ensure_tools
from prfaas_scheduler.metrics import SchedulerMetrics as Scheduler
from prfaas_worker.front.metrics import WorkerMetrics

from .alert_cases import CASES, as_promtool

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "charts/prfaas/files/alerts.yaml"
DASHBOARDS = sorted((ROOT / "charts/prfaas/files/dashboards").glob("*.json"))
METRIC = re.compile(r"\b(?:prfaas_|vllm:|process_|up\b)[a-z0-9_:]*")
VARIABLES = {"$__rate_interval": "1m", "$cluster": ".*", "$pool": ".*"}
OF_OTHERS = {"up", "vllm:num_requests_running", "vllm:num_requests_waiting_by_reason"}
"""Of Prometheus, and of vLLM."""

each_dashboard = pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)


def registered() -> set[str]:
    """Return the names of every series that operator, gateway, scheduler and worker can show."""
    assert operator.CONTACT_AGE
    families = [
        *prometheus_client.REGISTRY.collect(),
        *GatewayMetrics().registry.collect(),
        *Scheduler().registry.collect(),
    ]
    families += worker_families()
    return {name for family in families for name in series(family.name, family.type)}


def worker_families() -> list[Any]:
    worker = WorkerMetrics(credentials=Certificate())  # pyright: ignore[reportArgumentType]
    worker.on_received(Measured(Profile(state_bytes=1, token_bytes=1)))
    stats = Stats(
        handle=0,
        requests_running=0,
        requests_waiting=0,
        prefills_running=0,
        prefills_waiting=0,
        transfers=[],
        sent_bytes=0,
        received_bytes=0,
        prompt_tokens=0,
        generation_tokens=0,
        preemptions=0,
        role="mixed",
        cache=CacheStats(),
        links=(LinkStats(peer="hub"),),
    )
    worker.render(stats)
    return list(worker.collect())


class Certificate:
    """Stands for the certificate of a worker inside TLS."""

    expires_unix_seconds = 1.0


def series(name: str, kind: str) -> list[str]:
    if kind == "counter":
        return [f"{name}_total"]
    if kind == "histogram":
        return [f"{name}_{part}" for part in ("bucket", "count", "sum")]
    return [name]


def used(query: str) -> set[str]:
    """Return the names of the series that a query reads; label values and names are no part of it."""
    return set(METRIC.findall(re.sub(r'"[^"]*"', "", query)))


def queries(path: Path) -> list[str]:
    """Return the queries of a dashboard, with its variables replaced."""
    found = [target["expr"] for panel in json.loads(path.read_text())["panels"] for target in panel["targets"]]
    for variable, value in VARIABLES.items():
        found = [query.replace(variable, value) for query in found]
    return found


@pytest.fixture(scope="session")
def promtool():
    """Return a function that runs promtool on a file; a refusal raises with what it says."""
    program = ensure_tools(lambda _: None)["promtool"]

    def run(*arguments: str | Path) -> None:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


@each_dashboard
def test_dashboards_read_metrics_that_exist(path):
    wanted = set().union(*(used(query) for query in queries(path)))
    assert wanted
    assert wanted - registered() - OF_OTHERS == set()


def test_alerts_read_metrics_that_exist():
    wanted = set().union(*(used(rule["expr"]) for rule in alerts()))
    assert wanted - registered() - OF_OTHERS == set()


def test_finds_a_metric_that_does_not_exist():
    assert used('sum by (pool) (rate(prfaas_tokens_total{kind="prfaas_x"}[1m]))') == {"prfaas_tokens_total"}
    assert "prfaas_tokens_total" not in registered()


@each_dashboard
def test_prometheus_can_read_every_query(promtool, tmp_path, path):
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries(path))]
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", tmp_path / "rules.yaml")


@each_dashboard
def test_panels_have_their_own_place_and_say_what_they_show(path):
    panels = json.loads(path.read_text())["panels"]
    cells = [cell for panel in panels for cell in area(panel["gridPos"])]
    assert len(cells) == len(set(cells)), "panels overlap"
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["title"] and panel["description"] and panel["targets"] for panel in panels)


def area(place: dict[str, int]) -> list[tuple[int, int]]:
    assert place["x"] + place["w"] <= 24
    return [(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])]


def test_alerts_are_rules_and_fire_when_they_should_and_only_then(promtool, tmp_path):
    promtool("check", "rules", ALERTS)
    (tmp_path / "cases.json").write_text(json.dumps(as_promtool(str(ALERTS))))
    promtool("test", "rules", tmp_path / "cases.json")


def test_every_alert_is_tried():
    assert {alert.partition(" ")[0] for alert in CASES} == {rule["alert"] for rule in alerts()}


def test_finds_an_alert_that_does_not_fire(promtool, tmp_path):
    """A control: with the series of two cases exchanged, promtool refuses."""
    cases = as_promtool(str(ALERTS))
    first, second = cases["tests"] = cases["tests"][:2]
    first["input_series"], second["input_series"] = second["input_series"], first["input_series"]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    with pytest.raises(AssertionError, match="PrfaasOperatorDown"):
        promtool("test", "rules", tmp_path / "cases.json")


def test_alerts_say_how_bad_it_is_and_what_to_do():
    for rule in alerts():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_rules_and_dashboards_reach_the_cluster_as_they_are(render):
    values = str(ROOT / "charts/prfaas/ci/everything-values.yaml")
    objects = render("prfaas", "--values", values)
    (rule,) = (each for each in objects if each["kind"] == "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(ALERTS.read_text())
    maps = [each for each in objects if each["kind"] == "ConfigMap"]
    shown = {name: text for each in maps for name, text in each["data"].items()}
    assert shown == {path.name: path.read_text().strip() for path in DASHBOARDS}
    assert {each["metadata"]["labels"]["grafana_dashboard"] for each in maps} == {"prfaas"}
    assert {each["metadata"]["annotations"]["grafana_folder"] for each in maps} == {"Serving"}


def test_the_alerts_of_certificates_follow_their_life(render):
    values = str(ROOT / "charts/prfaas/ci/everything-values.yaml")
    objects = render("prfaas", "--values", values, "--set", "certificates.certificateHours=1")
    (rule,) = (each for each in objects if each["kind"] == "PrometheusRule")
    queries = {each["alert"]: each["expr"] for group in rule["spec"]["groups"] for each in group["rules"]}
    assert [name for name, query in queries.items() if query.endswith("- time() < 1 * 900")] == [
        "PrfaasCertificateExpires",
        "PrfaasClusterCertificateExpires",
    ]
    waits = {each["alert"]: each["for"] for group in rule["spec"]["groups"] for each in group["rules"]}
    assert waits["PrfaasCertificateExpires"] == waits["PrfaasClusterCertificateExpires"] == "2m", "of 15 minutes"


def test_renders_no_kinds_of_other_projects_by_default(hub, member):
    assert not [each["kind"] for each in (*hub, *member) if each["kind"] in ("PodMonitor", "PrometheusRule")]


def test_pod_monitors_scrape_every_named_port_and_give_the_labels_that_queries_select_by(render):
    instance_ports = {"admin", "api", "link-metrics"}
    for chart, ports in (("prfaas", {"metrics"} | instance_ports), ("prfaas-member", instance_ports)):
        objects = render(chart, "--set", "monitoring.podMonitor.enabled=true")
        (monitor,) = (each["spec"] for each in objects if each["kind"] == "PodMonitor")
        assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} == ports
        for endpoint in monitor["podMetricsEndpoints"]:
            labels = {rule["targetLabel"] for rule in endpoint["relabelings"]}
            assert {"cluster", "pool", "role", "__scheme__", "__metrics_path__"} <= labels


def test_the_page_of_metrics_names_every_metric():
    page = (ROOT / "docs/operate/metrics.md").read_text()
    names = {re.sub(r"_(bucket|count|sum)$", "", name) for name in registered()}
    ours = {name for name in names if name.startswith("prfaas_")}
    assert len(ours) > 60
    assert sorted(name for name in ours if not re.search(rf"{name.removesuffix('_total')}(_total)?\b", page)) == []
