"""An editor of MemberClusters wants the operator to use, or to tell about, a Secret that is no kubeconfig of prfaas."""

import base64
import json

import pytest
from tests.attacks.conftest import MODEL, pool, resource, secret

from prfaas_operator.render.service_account import kubeconfig

PEM = "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"
OPENS = base64.b64encode(kubeconfig("eu", "https://192.0.2.1", PEM, "t").encode()).decode()


def member(name: str):
    return resource("MemberCluster", "eu", kubeconfigSecretRef={"name": name}, link={"capacityMbps": 100})


async def test_a_secret_of_another_name_is_not_read(plain_hub):
    hub = plain_hub(member("huggingface"), secret("huggingface", "kubeconfig", kubeconfig=OPENS))
    await hub.reconcile("MemberCluster", "eu")
    assert hub.ready("MemberCluster", "eu")["reason"] == "Invalid"
    assert hub.connected == []


@pytest.mark.parametrize("use", ["", "api-keys"])
async def test_another_ones_kubeconfig_is_not_used(plain_hub, use):
    """Cluster API, for one, keeps an administrator's kubeconfig of each cluster under such a name."""
    hub = plain_hub(member("prod-kubeconfig"), secret("prod-kubeconfig", use, kubeconfig=OPENS))
    await hub.reconcile("MemberCluster", "eu")
    assert hub.ready("MemberCluster", "eu")["reason"] == "ForbiddenSecret"
    assert hub.connected == []


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
