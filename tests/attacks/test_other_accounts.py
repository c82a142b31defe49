"""An author of pools wants the rights of a service account in a cloud, or to preempt what else runs in the hub."""

from unittest.mock import AsyncMock

import pytest
from tests.attacks.conftest import MODEL, OPENS, Hub, member, pool, resource, secret

from prfaas.names import AUTHORITY_SECRET, LABEL_ROLE
from prfaas_operator.clusters.kinds import Object
from prfaas_operator.plan.pod_facts import ROLE_GATE, project_pod
from prfaas_operator.reconcile.pool import PoolReconciler

WANTED = {"serviceAccountName": "cloud-admin", "priorityClassName": "most-urgent"}
LISTED = {"worker_service_accounts": "reader,writer", "worker_priority_classes": "batch"}

each_field = pytest.mark.parametrize("field", WANTED)


@pytest.mark.parametrize("options", [{}, LISTED])
@each_field
async def test_a_pool_of_the_hub_gets_no_account_and_no_class_that_its_owner_did_not_list(plain_hub, field, options):
    hub = plain_hub(pool(template={field: WANTED[field]}), **options)
    await hub.reconcile("DecodePool", "decode")
    ready = hub.ready("DecodePool", "decode")
    assert (ready["reason"], f"remove template.{field}" in ready["message"]) == ("ForbiddenTemplate", True)
    assert hub.images("decode") == set()


@each_field
async def test_a_running_pool_gets_none_by_an_edit(plain_hub, field):
    hub = plain_hub(pool())
    await hub.reconcile("DecodePool", "decode")
    hub.server.objects["DecodePool", "decode"]["spec"]["template"] = {field: WANTED[field]}
    await hub.reconcile("DecodePool", "decode")
    assert hub.images("decode"), "it still runs"
    assert field not in hub.pod("decode")["spec"]


async def replace_a_pod(hub: Hub, forbidden: Object) -> str:
    """Have a pool that two share want what it may not, then a pod replaced; return the role of the one that is new."""
    await hub.reconcile("DecodePool", "decode")
    hub.server.objects["DecodePool", "decode"]["spec"] |= forbidden
    template = hub.pod("decode")
    metadata = {**template["metadata"], "name": "new", "uid": "uid-new", "resourceVersion": "1"}
    new = hub.server.objects["Pod", "new"] = {"kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    facts = hub.controller.hub.pods.items["new"] = project_pod(new)
    assert (facts.shared.gated, facts.shared.gate_open, facts.role) == (True, False, "")
    hub.server.applied.clear()
    await hub.reconcile("DecodePool", "decode")
    assert hub.ready("DecodePool", "decode")["reason"] in {"ForbiddenTemplate", "ForbiddenSecret", "ProfileNotFound"}
    assert "Deployment" not in {one["kind"] for one in hub.server.applied}
    opened = {one["type"]: one["status"] for one in new.get("status", {}).get("conditions", ())} == {ROLE_GATE: "True"}
    return new["metadata"]["labels"][LABEL_ROLE] if opened else ""


each_refused = pytest.mark.parametrize(
    "forbidden",
    [
        *({"template": {field: name}} for field, name in WANTED.items()),
        {"template": {"imagePullSecrets": [{"name": AUTHORITY_SECRET}]}},
        {"profile": {"builtin": "unknown"}},
    ],
    ids=["account", "class", "secret", "profile"],
)


@each_refused
async def test_a_refused_pool_that_two_share_gives_a_new_pod_its_role_and_no_more(plain_hub, forbidden):
    """Without one it would never be ready, and a pool that ran before an upgrade would lose its pods one by one."""
    hub = plain_hub(pool(), resource("PrefillPool", "local", shareWith="decode"))
    assert await replace_a_pod(hub, forbidden) == "decode"


@each_refused
async def test_control_where_it_gives_none_a_new_pod_waits_for_ever(plain_hub, monkeypatch, forbidden):
    monkeypatch.setattr(PoolReconciler, "_give_roles", AsyncMock())
    hub = plain_hub(pool(), resource("PrefillPool", "local", shareWith="decode"))
    assert await replace_a_pod(hub, forbidden) == ""


@each_field
async def test_control_without_the_look_at_the_names_the_pods_get_it(plain_hub, monkeypatch, field):
    monkeypatch.setattr("prfaas_operator.plan.pool_status.check_names", lambda *_: None)
    hub = plain_hub(pool(template={field: WANTED[field]}))
    await hub.reconcile("DecodePool", "decode")
    assert hub.pod("decode")["spec"][field] == WANTED[field]


@pytest.mark.parametrize(("account", "priority"), [("writer", "batch"), ("default", "batch")])
async def test_what_the_hubs_owner_lists_is_used(plain_hub, account, priority):
    hub = plain_hub(pool(template={"serviceAccountName": account, "priorityClassName": priority}), **LISTED)
    await hub.reconcile("DecodePool", "decode")
    spec = hub.pod("decode")["spec"]
    assert (spec["serviceAccountName"], spec["priorityClassName"]) == (account, priority)


async def test_in_a_member_its_own_owner_decides(plain_hub):
    there = resource("PrefillPool", "prefill", model=MODEL, clusterName="eu", template=WANTED)
    hub = plain_hub(there, member("eu-kubeconfig"), secret("eu-kubeconfig", "kubeconfig", kubeconfig=OPENS))
    await hub.reconcile("MemberCluster", "eu")
    await hub.reconcile("PrefillPool", "prefill")
    assert hub.ready("PrefillPool", "prefill")["reason"] == "ClusterUnreachable", "no rule of the hub stopped it before"
