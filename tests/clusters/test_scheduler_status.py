"""The scheduler's status on a real API server, with exactly the rights that the operator gives a gateway's pods.

Two writers share one status: what the operator wrote stays, what the scheduler no longer knows goes.
"""

import asyncio
import base64
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from tests.clocks import Clock

from prfaas.api import PrfaaSPolicy
from prfaas.conditions import ConditionState
from prfaas.kube import KubeSession, StatusError
from prfaas.kube.session import token_of_file
from prfaas.names import gateway_name
from prfaas_operator.render import gateway
from prfaas_scheduler import status
from prfaas_scheduler.status import Publisher, Report, policy_ref

pytestmark = pytest.mark.clusters

CRDS = Path(__file__).parents[2] / "crds"
NAMESPACE = "scheduler-status"
SPEC = {"model": "m", "decodePool": "d", "prefillPools": ["p"], "threshold": {"mode": "Fixed"}}


@pytest.fixture(scope="module")
def policy(hub) -> Iterator[dict]:
    """A policy with the access that the operator renders for it."""
    hub.install_crds()
    hub.kubectl("create", "namespace", NAMESPACE)
    body = {
        "apiVersion": "prfaas.io/v1alpha1",
        "kind": "PrfaaSPolicy",
        "metadata": {"name": "kimi", "namespace": NAMESPACE},
        "spec": SPEC,
    }
    hub.kubectl("create", "-f", "-", stdin=json.dumps(body))
    made = json.loads(hub.kubectl("-n", NAMESPACE, "get", "prfaas", "kimi", "-o", "json"))
    typed = PrfaaSPolicy.model_validate(made)
    for render in (gateway.service_account, gateway.role, gateway.role_binding, gateway.lease):
        manifest = render(typed)
        manifest["metadata"].setdefault("namespace", NAMESPACE)
        hub.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
    yield made
    hub.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


@pytest.fixture
def session(hub, policy, tmp_path) -> KubeSession:
    """A session of the gateway's own account, as its pods would open it."""
    cluster = yaml.safe_load(hub.kubeconfig.read_text())["clusters"][0]["cluster"]
    token = hub.kubectl("-n", NAMESPACE, "create", "token", gateway_name("kimi"))
    (tmp_path / "token").write_text(token)
    authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
    return KubeSession(cluster["server"], authorization=token_of_file(tmp_path / "token"), ca_cert_data=authority)


def make_report(tokens: int, offloaded: int | None, healthy: str = "True") -> Report:
    return Report(
        generation=1,
        figures={
            "thresholdTokens": tokens,
            "bandwidth": "Scarce",
            "offloadedPercent": offloaded,
            "linkUtilisationPercent": 1000,
        },
        conditions={
            status.METRICS_FRESH: ConditionState("True", "Fresh", "every live link is measured"),
            status.LINK_HEALTHY: ConditionState(healthy, "AllAlive", "eu: alive"),
        },
    )


async def test_two_writers_share_a_status_and_transition_times_survive_a_new_holder(hub, policy, session):
    def current() -> dict:
        return json.loads(hub.kubectl("-n", NAMESPACE, "get", "prfaas", "kimi", "-o", "json"))["status"]

    ready = {"type": "Ready", "status": "True", "reason": "Ready", "message": "", "observedGeneration": 1}
    operators = {"readyPrefill": 2, "conditions": [ready | {"lastTransitionTime": "2026-01-01T00:00:00Z"}]}
    patch = {"apiVersion": policy["apiVersion"], "kind": policy["kind"], "metadata": {"name": "kimi"}}
    as_operator = ("--server-side", "--subresource=status", "--field-manager=prfaas-operator", "-f", "-")
    hub.kubectl("-n", NAMESPACE, "apply", *as_operator, stdin=json.dumps(patch | {"status": operators}))

    clock = Clock()
    report = make_report(4096, 37)
    async with session:
        first = Publisher(session, policy_ref(NAMESPACE, "kimi"), "pod-a", lambda: report, clock)
        await first.once()
        written = current()
        assert written["thresholdTokens"] == 4096
        assert (written["offloadedPercent"], written["linkUtilisationPercent"]) == (37, 1000)
        assert written["readyPrefill"] == 2
        assert {one["type"] for one in written["conditions"]} == {"Ready", "MetricsFresh", "LinkHealthy"}

        rival = Publisher(session, policy_ref(NAMESPACE, "kimi"), "pod-b", lambda: make_report(1, 1), clock)
        await rival.once()
        assert current() == written, "one holder at a time"

        report = make_report(8192, None, healthy="False")
        clock.seconds += 3
        await first.once()
        narrowed = current()
        assert "offloadedPercent" not in narrowed, "what is unknown is removed"
        assert narrowed["thresholdTokens"] == 8192
        assert narrowed["readyPrefill"] == 2

        ending = asyncio.create_task(first.run())
        await asyncio.sleep(0)
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
        await asyncio.sleep(1.1)  # so that a new time would differ
        report = make_report(8192, 50, healthy="False")
        second = Publisher(session, policy_ref(NAMESPACE, "kimi"), "pod-c", lambda: report, clock)
        await second.once()
        assert current()["offloadedPercent"] == 50
        assert times(current()) == times(narrowed)
    assert (
        hub.kubectl("-n", NAMESPACE, "get", "lease", "kimi-scheduler", "-o", "jsonpath={.spec.holderIdentity}")
        == "pod-c"
    )


def times(of: dict) -> dict[str, str]:
    found = {one["type"]: one["lastTransitionTime"] for one in of["conditions"]}
    assert all(datetime.fromisoformat(at) <= datetime.now(UTC) for at in found.values())
    return found


async def test_the_account_may_do_nothing_else(session):
    async with session:
        for method, path in [
            ("GET", f"/apis/prfaas.io/v1alpha1/namespaces/{NAMESPACE}/prfaaspolicies"),
            ("GET", f"/api/v1/namespaces/{NAMESPACE}/secrets"),
            ("DELETE", f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/kimi-scheduler"),
        ]:
            with pytest.raises(StatusError) as refused:
                await session.call(method, path)
            assert refused.value.status == 403
