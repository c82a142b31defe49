"""An author of pools wants the rights of a service account in a cloud, or to preempt what else runs in the hub."""

import pytest
from tests.attacks.conftest import MODEL, OPENS, member, pool, resource, secret

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
