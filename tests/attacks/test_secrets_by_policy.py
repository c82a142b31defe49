"""An editor of policies wants to run an image, or to read a Secret: the authority, a kubeconfig, somebody's token."""

import pytest
from tests.attacks.conftest import GATEWAY_IMAGE, WORKER_IMAGE, policy, pool, secret

from prfaas.api import PrfaaSPolicy
from prfaas_operator.render import gateway

EVIL = "evil.example/exfil:1"


def taking(name: str, **more):
    return policy(apiKeysSecretRef={"name": name}, **more)


@pytest.mark.parametrize("name", ["prfaas-ca", "prfaas-tls", "eu-kubeconfig", "huggingface"])
async def test_a_secret_of_the_operator_or_of_others_is_not_mounted(plain_hub, name):
    hub = plain_hub(pool(), taking(name, image=EVIL), secret(name, "api-keys"))
    await hub.reconcile("PrfaaSPolicy", "kimi")
    assert hub.ready("PrfaaSPolicy", "kimi")["reason"] == "ForbiddenSecret"
    assert hub.loot("kimi-gateway") == hub.images("kimi-gateway") == set()


def test_control_a_name_that_nobody_looks_at_is_mounted():
    body = PrfaaSPolicy.model_validate(taking("prfaas-ca"))
    volumes = gateway.deployment(body, gateway.GatewayImage(GATEWAY_IMAGE))["spec"]["template"]["spec"]["volumes"]
    assert "prfaas-ca" in [one["secret"]["secretName"] for one in volumes if "secret" in one]


@pytest.mark.parametrize("objects", [[], [secret("stripe-api-keys")], [secret("stripe-api-keys", "kubeconfig")]])
async def test_a_secret_that_nobody_gave_to_gateways_is_not_mounted(plain_hub, objects):
    hub = plain_hub(pool(), taking("stripe-api-keys"), *objects)
    await hub.reconcile("PrfaaSPolicy", "kimi")
    assert hub.ready("PrfaaSPolicy", "kimi")["reason"] == ("ForbiddenSecret" if objects else "SecretNotFound")
    assert hub.loot("kimi-gateway") == set()


async def test_an_editor_cannot_swap_the_secret_of_a_running_gateway(plain_hub):
    hub = plain_hub(pool(), taking("chat-api-keys"), secret("chat-api-keys", "api-keys"), secret("stripe-api-keys"))
    await hub.reconcile("PrfaaSPolicy", "kimi")
    assert hub.loot("kimi-gateway") == {"chat-api-keys"}
    hub.server.objects["PrfaaSPolicy", "kimi"]["spec"]["gateway"]["apiKeysSecretRef"]["name"] = "stripe-api-keys"
    await hub.reconcile("PrfaaSPolicy", "kimi")
    assert hub.loot("kimi-gateway") == {"chat-api-keys"}
    assert ("ConfigMap", "kimi-routes") in hub.server.objects, "its routing table stays current"


async def test_a_name_of_before_the_rule_freezes_nothing_but_the_gateways_pods(plain_hub, monkeypatch):
    """Such a policy was unreadable once, and its gateway lost every instance that came later."""
    hub = plain_hub(pool(), taking("old-keys"), secret("old-keys", "api-keys"))
    with monkeypatch.context() as before:
        before.setattr("prfaas_operator.reconcile.policy.check_given", lambda *_: None)
        await hub.reconcile("PrfaaSPolicy", "kimi")
    assert hub.loot("kimi-gateway") == {"old-keys"}
    for kind, name in (("ConfigMap", "kimi-routes"), ("Service", "kimi-gateway"), ("NetworkPolicy", "kimi-gateway")):
        del hub.server.objects[kind, name]
    hub.server.objects["PrfaaSPolicy", "kimi"]["spec"]["gateway"]["replicas"] = 2
    await hub.reconcile("PrfaaSPolicy", "kimi")
    ready = hub.ready("PrfaaSPolicy", "kimi")
    assert (ready["reason"], "old-keys is not named NAME-api-keys" in ready["message"]) == ("ForbiddenSecret", True)
    assert hub.server.objects["Deployment", "kimi-gateway"]["spec"]["replicas"] == 1
    for kind, name in (("ConfigMap", "kimi-routes"), ("Service", "kimi-gateway"), ("NetworkPolicy", "kimi-gateway")):
        assert (kind, name) in hub.server.objects


async def test_control_without_the_look_at_its_label_it_is_mounted(plain_hub, monkeypatch):
    monkeypatch.setattr("prfaas_operator.reconcile.policy.check_given", lambda *_: None)
    hub = plain_hub(pool(), taking("stripe-api-keys"), secret("stripe-api-keys"))
    await hub.reconcile("PrfaaSPolicy", "kimi")
    assert hub.loot("kimi-gateway") == {"stripe-api-keys"}


async def test_no_field_of_a_policy_names_the_image_or_the_account(plain_hub):
    free = {"image": EVIL, "serviceAccountName": "admin", "priorityClassName": "system-node-critical"}
    hub = plain_hub(pool(), policy(**free))
    await hub.reconcile("PrfaaSPolicy", "kimi")
    spec = hub.pod("kimi-gateway")["spec"]
    assert hub.images("kimi-gateway") == {GATEWAY_IMAGE}
    assert (spec["serviceAccountName"], "priorityClassName" in spec) == ("kimi-gateway", False)


async def test_a_pool_that_names_no_image_runs_the_one_of_the_operators_settings(plain_hub):
    """Once it ran a name that whoever owns it in the nodes' default registry could fill."""
    hub = plain_hub(pool())
    await hub.reconcile("DecodePool", "decode")
    assert hub.images("decode") == {WORKER_IMAGE}


async def test_control_the_same_image_in_a_pool_runs(plain_hub):
    """So the right to write pools is the right to run images; the page says who should have it."""
    hub = plain_hub(pool(engine={"image": EVIL}))
    await hub.reconcile("DecodePool", "decode")
    assert hub.images("decode") == {EVIL}
