"""An editor of MemberClusters wants the operator to use, or to tell about, a Secret that is no kubeconfig of prfaas."""

import json

import pytest
from tests.attacks.conftest import MODEL, OPENS, member, pool, resource, secret


@pytest.mark.parametrize("name", ["prod-kubeconfig", "huggingface"])
@pytest.mark.parametrize("use", ["", "api-keys"])
async def test_another_ones_kubeconfig_is_not_used(plain_hub, use, name):
    """Cluster API, for one, keeps an administrator's kubeconfig of each cluster under such a name."""
    hub = plain_hub(member(name), secret(name, use, kubeconfig=OPENS))
    await hub.reconcile("MemberCluster", "eu")
    assert hub.ready("MemberCluster", "eu")["reason"] == "ForbiddenSecret"
    assert hub.connected == []


def made_by_join(use: str = ""):
    made = secret("eu-kubeconfig", use, kubeconfig=OPENS)
    made["metadata"]["labels"]["app.kubernetes.io/managed-by"] = "prfaas-cli"
    return made


async def test_what_a_former_version_made_is_still_used(plain_hub):
    """Neither a free name nor a Secret that `join` wrote without the label may stop the offload after an upgrade."""
    for name, kept in (("eu-kubeconfig", made_by_join()), ("eu", secret("eu", "kubeconfig", kubeconfig=OPENS))):
        hub = plain_hub(member(name), kept)
        await hub.reconcile("MemberCluster", "eu")
        assert hub.connected == ["eu"]


async def test_what_join_made_and_its_owner_gave_to_something_else_is_not_used(plain_hub):
    hub = plain_hub(member("eu-kubeconfig"), made_by_join("api-keys"))
    await hub.reconcile("MemberCluster", "eu")
    assert (hub.connected, hub.ready("MemberCluster", "eu")["reason"]) == ([], "ForbiddenSecret")


async def test_another_ones_secret_is_not_kept_from_its_deletion(plain_hub):
    user = resource("PrefillPool", "offload", clusterName="eu", model=MODEL)
    for use, finalizers in (("", None), ("kubeconfig", ["prfaas.io/cleanup"])):
        hub = plain_hub(member("prod-kubeconfig"), user, secret("prod-kubeconfig", use, kubeconfig=OPENS))
        await hub.reconcile("MemberCluster", "eu")
        assert hub.server.objects["Secret", "prod-kubeconfig"]["metadata"].get("finalizers") == finalizers


async def test_control_with_the_label_or_without_the_look_at_it_the_operator_uses_it(plain_hub, monkeypatch):
    hub = plain_hub(member("prod-kubeconfig"), secret("prod-kubeconfig", "kubeconfig", kubeconfig=OPENS))
    await hub.reconcile("MemberCluster", "eu")
    assert hub.connected == ["eu"]
    monkeypatch.setattr("prfaas_operator.reconcile.members.check_given", lambda *_: None)
    hub = plain_hub(member("prod-kubeconfig"), secret("prod-kubeconfig", kubeconfig=OPENS))
    await hub.reconcile("MemberCluster", "eu")
    assert hub.connected == ["eu"]


@pytest.mark.parametrize("use", ["", "kubeconfig"])
async def test_no_status_tells_what_is_in_a_secret(plain_hub, use):
    hub = plain_hub(member("team-kubeconfig"), secret("team-kubeconfig", use, hf_token="eA==", users="eA=="))
    await hub.reconcile("MemberCluster", "eu")
    told = json.dumps([hub.server.objects["MemberCluster", "eu"]["status"], *hub.server.applied])
    assert "SecretNotFound" in told or "ForbiddenSecret" in told
    assert "hf_token" not in told


async def test_naming_a_secret_takes_it_from_no_pool(plain_hub):
    """A MemberCluster that named a team's Secret once stopped every pool that reads it."""
    reads = {"env": [{"name": "T", "valueFrom": {"secretKeyRef": {"name": "huggingface", "key": "token"}}}]}
    hub = plain_hub(member("huggingface"), secret("huggingface"), pool(template=reads))
    await hub.reconcile("MemberCluster", "eu")
    await hub.reconcile("DecodePool", "decode")
    assert hub.loot("decode") == {"huggingface"}
