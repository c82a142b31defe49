"""Proves on the running system that `helm test` finds an installation in order, that its alerts are quiet, and that the
dashboards show what happens.

Alerts and queries come from the environment's own Prometheus, which scrapes as docs/operate/metrics.md says.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import yaml
from tests.waiting import eventually_async

from prfaas_sandbox.demo.client import DemoClient, text_of
from prfaas_sandbox.demo.install import MODEL, NAMESPACE, ExampleInstallation

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

FILES = Path(__file__).parents[2] / "charts" / "prfaas" / "files"
VARIABLES = {"$__rate_interval": "60s", "$cluster": ".*", "$pool": ".*"}
MUST_SHOW = {
    "prfaas-overview": {"Threshold", "Link utilisation", "Link traffic", "Requests by decision", "Time to first token"},
    "prfaas-workers": {"Queue", "Time to first token, p99, by part", "Transfers", "Transfer time", "Cache in use"},
    "prfaas-operator": {"Leaders", "Queue", "Reconcile time, p99", "Contact with member clusters", "Writes"},
}
"""Panels that have something to show once an offloaded request was answered. Others wait for trouble."""


@pytest_asyncio.fixture(loop_scope="session")
async def prometheus(installation: ExampleInstallation) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=installation.environment.prometheus_url, timeout=20) as client:
        yield client


async def ask(prometheus: httpx.AsyncClient, query: str) -> list[dict]:
    """Return the series that Prometheus answers to a query."""
    for variable, value in VARIABLES.items():
        query = query.replace(variable, value)
    answer = await prometheus.get("/api/v1/query", params={"query": query})
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]["result"]


async def test_helm_test_finds_everything_in_place(installation: ExampleInstallation):
    environment = installation.environment
    output = await environment.helm(environment.hub, "test", "prfaas", "-n", NAMESPACE, "--timeout", "90s")
    assert "Succeeded" in output
    left = await environment.kubectl(environment.hub, "-n", NAMESPACE, "get", "pods", "-o", "name")
    assert "pod/prfaas-test" not in left


async def test_the_dashboards_show_a_request_that_was_offloaded(installation: ExampleInstallation, prometheus):
    client = DemoClient(installation.gateway_url, MODEL)
    await client.ask(text_of(6_000, start=4711), act="shown")
    await client.close()
    waiting = {(name, title) for name, titles in MUST_SHOW.items() for title in titles}

    async def all_show() -> bool:
        for path in sorted((FILES / "dashboards").glob("*.json")):
            for panel in json.loads(path.read_text())["panels"]:
                answers = [await ask(prometheus, target["expr"]) for target in panel["targets"]]
                if all(answers):
                    waiting.discard((path.stem, panel["title"]))
        return not waiting

    await eventually_async(all_show, lambda: f"there is something to see in {sorted(waiting)}", poll=1)


async def test_no_alert_is_about_to_fire_on_a_system_that_works(prometheus):
    groups = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
    pending = {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}
    assert len(pending) > 10

    async def none_is_pending() -> bool:
        nonlocal pending
        pending = {alert: query for alert, query in pending.items() if await ask(prometheus, query)}
        return not pending

    await eventually_async(none_is_pending, lambda: f"these alerts rest: {pending}", poll=1)
