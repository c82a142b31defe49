"""A pod wants the operator to take instances out of TLS: a strange one, an old one, one that claims to be a gateway."""

from typing import Any

import pytest
from tests.attacks.conftest import pool

from prfaas.names import LABEL_MANAGED_BY, LABEL_POLICY_UID, MANAGED_BY
from prfaas_operator.plan.certificates import CertificateMode
from prfaas_operator.plan.pod_facts import PodFacts, project_pod


def pod(name: str, scheme: str = "http", **labels: str) -> PodFacts:
    metadata = {
        "name": name,
        "labels": {LABEL_MANAGED_BY: MANAGED_BY, **labels},
        "annotations": {"prfaas.io/scheme": scheme},
    }
    return project_pod({"metadata": metadata, "spec": {}, "status": {"phase": "Running"}})


GATEWAY = {LABEL_POLICY_UID: "uid-kimi"}
GOOD = pod("gateway", scheme="https", **GATEWAY)
HOSTILE = {
    "no pod at all": [],
    "a pod with the operator's label": [GOOD, pod("toolbox")],
    "a plain pod that says it is a gateway": [GOOD, pod("liar", **GATEWAY)],
    "the old gateway of a paused policy": [pod("old", **GATEWAY)],
}
each_hostile = pytest.mark.parametrize("pods", HOSTILE.values(), ids=HOSTILE.keys())


def in_tls(hub: Any) -> bool:
    (worker,) = hub.pod("decode")["spec"]["containers"]
    return "--tls-dir" in worker["args"]


async def among(hub: Any, pods: list[PodFacts]) -> bool:
    """Reconcile the pool among these pods; return whether its instances then are inside TLS."""
    hub.controller.hub.pods.items.clear()
    hub.controller.hub.pods.items.update({one.name: one for one in pods})
    await hub.reconcile("DecodePool", "decode")
    return in_tls(hub)


@each_hostile
async def test_no_pod_takes_a_pool_out_of_tls(tls_hub, pods):
    hub = tls_hub(pool())
    assert await among(hub, [GOOD])
    assert await among(hub, pods)


@each_hostile
async def test_no_pod_makes_a_new_pool_plain(tls_hub, pods):
    assert await among(tls_hub(pool()), pods)


async def test_an_operator_that_starts_again_remembers(tls_hub):
    hub = tls_hub(pool())
    assert await among(hub, [GOOD])
    again = tls_hub(*hub.server.objects.values())
    assert await among(again, [pod("liar", **GATEWAY)])


async def test_only_the_mode_disabled_turns_tls_off(tls_hub):
    hub = tls_hub(pool())
    assert await among(hub, [GOOD])
    assert not await among(tls_hub(*hub.server.objects.values(), mode=CertificateMode.DISABLED), [GOOD])


async def test_control_an_operator_that_does_not_look_at_what_runs_falls_for_a_lie(tls_hub, monkeypatch):
    monkeypatch.setattr("prfaas_operator.render.certificates.is_in_tls", lambda _: False)
    hub = tls_hub(pool())
    assert await among(hub, [GOOD])
    assert not await among(hub, [GOOD, pod("liar", **GATEWAY)])
