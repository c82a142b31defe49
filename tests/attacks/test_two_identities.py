"""An author of the hub's pools reads the certificate that his pods mount, and wants to do what only gateways may."""

import base64
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.attacks.conftest import policy, pool

from prfaas import identity
from prfaas.identity import CertificateFacts
from prfaas.names import (
    AUTHORITY_SECRET,
    GATEWAY_TLS_SECRET,
    HUB,
    LABEL_MANAGED_BY,
    LABEL_POLICY_UID,
    MANAGED_BY,
    TLS_SECRET,
)
from prfaas.rights import RIGHTS, Identity, refusal
from prfaas_operator.plan.certificates import CertificateMode
from prfaas_operator.plan.pod_facts import PodFacts, project_pod

CONTROL = {"/v1/role", "/v1/egress", "/v1/cache/reset", "/v1/kv-events", "kv_transfer_params"}


def gateway_pod(name: str, secret: str) -> PodFacts:
    labels = {LABEL_MANAGED_BY: MANAGED_BY, LABEL_POLICY_UID: "uid-kimi"}
    volumes = [{"name": "tmp", "emptyDir": {}}, {"name": "prfaas-tls", "secret": {"secretName": secret}}]
    return project_pod({"metadata": {"name": name, "labels": labels}, "spec": {"volumes": volumes}})


async def passes(hub: Any, *pods: PodFacts) -> None:
    """Let the operator look at its certificates twice: the first pass makes the authority."""
    hub.controller.hub.pods.items.clear()
    hub.controller.hub.pods.items.update({one.name: one for one in pods})
    for _ in range(2):
        await hub.certificates._pass()


def proves(hub: Any, secret: str) -> Identity:
    """Return who the certificate of a Secret is to its peers."""
    return proven(hub, secret).identity


def proven(hub: Any, secret: str) -> CertificateFacts:
    """Return what the certificate of a Secret proves to its peers."""
    data = hub.server.objects["Secret", secret]["data"]
    certificate, key, trusted = (base64.b64decode(data[name]) for name in ("tls.crt", "tls.key", "ca.crt"))
    return identity.check(certificate, key, trusted, hub.server.now())


@pytest.fixture
def hub(bare_tls_hub):
    return bare_tls_hub(pool(), policy())


async def test_what_a_pool_of_the_hub_mounts_gives_no_control(hub):
    await passes(hub)
    await hub.reconcile("DecodePool", "decode")
    await hub.reconcile("PrfaaSPolicy", "kimi")
    assert (hub.loot("decode"), hub.loot("kimi-gateway")) == ({TLS_SECRET}, {GATEWAY_TLS_SECRET})
    mounted, gateways = proves(hub, TLS_SECRET), proves(hub, GATEWAY_TLS_SECRET)
    assert (mounted, gateways) == (Identity(HUB, "worker"), Identity(HUB, "gateway"))
    assert {endpoint for endpoint in RIGHTS if refusal(endpoint, mounted, HUB)} == CONTROL
    assert not any(refusal(endpoint, gateways, "eu") for endpoint in CONTROL)


async def test_control_one_certificate_for_the_whole_hub_gives_it(hub):
    assert not any(refusal(endpoint, Identity(HUB), HUB) for endpoint in CONTROL)


async def reported(hub: Any, *pods: PodFacts) -> list[str]:
    """Return the messages of GatewaysApart while the policy has these pods."""
    await passes(hub, *pods)
    await hub.reconcile("PrfaaSPolicy", "kimi")
    conditions = hub.server.objects["PrfaaSPolicy", "kimi"]["status"]["conditions"]
    return [one["message"] for one in conditions if one["type"] == "GatewaysApart"]


async def test_an_old_gateway_that_does_not_end_is_named_by_its_policy(hub):
    """The control is a gateway of this version: nothing is reported. Once there was none but such, an old one that
    starts is named for what it lacks."""
    (stuck,) = await reported(hub, gateway_pod("stuck", TLS_SECRET)._replace(terminating=True))
    assert stuck.startswith("pod stuck of an older version")
    assert stuck.endswith("may do what only gateways may, until it ends; delete it if it does not end by itself")
    assert await reported(hub, gateway_pod("new", GATEWAY_TLS_SECRET)) == []
    (late,) = await reported(hub, gateway_pod("late", TLS_SECRET), gateway_pod("new", GATEWAY_TLS_SECRET))
    assert late.startswith("pod late of an older version")
    assert late.endswith("delete it, and its Deployment makes one of this version")


async def test_a_pod_that_mounts_it_later_gives_the_instances_no_right_back(hub):
    await passes(hub, gateway_pod("new", GATEWAY_TLS_SECRET))
    await passes(hub, gateway_pod("late", TLS_SECRET), gateway_pod("new", GATEWAY_TLS_SECRET))
    assert proves(hub, TLS_SECRET) == Identity(HUB, "worker")


async def test_gateways_of_before_lose_no_right_until_the_last_of_them_is_gone(hub):
    old, new = gateway_pod("old", TLS_SECRET), gateway_pod("new", GATEWAY_TLS_SECRET)
    for pods in ([old], [old, new], [old._replace(terminating=True), new]):
        await passes(hub, *pods)
        assert proves(hub, TLS_SECRET) == Identity(HUB)
    await passes(hub, new)
    assert proves(hub, TLS_SECRET) == Identity(HUB, "worker")
    assert proves(hub, GATEWAY_TLS_SECRET) == Identity(HUB, "gateway")


async def test_an_issuer_is_asked_for_both(bare_tls_hub):
    hub = bare_tls_hub(pool(), policy(), mode=CertificateMode.ISSUER, trust_domain="ours.example")
    await passes(hub)
    asked = {name: body["spec"]["uris"] for (kind, name), body in hub.server.objects.items() if kind == "Certificate"}
    assert asked == {
        "prfaas-hub": ["spiffe://ours.example/cluster/hub/worker"],
        "prfaas-hub.gateway": ["spiffe://ours.example/cluster/hub/gateway"],
    }


async def test_two_installations_have_two_trust_domains_and_an_operator_that_starts_again_keeps_its_own(bare_tls_hub):
    first, second = (bare_tls_hub(pool(), policy()) for _ in range(2))
    for one in (first, second):
        await passes(one)
    assert proven(first, TLS_SECRET).domain != proven(second, TLS_SECRET).domain
    again = bare_tls_hub(*first.server.objects.values(), trust_domain="other.example")
    del again.server.objects["Secret", TLS_SECRET]
    await passes(again)
    assert proven(again, TLS_SECRET).domain == proven(first, GATEWAY_TLS_SECRET).domain


async def test_an_installation_from_before_there_were_any_keeps_the_common_trust_domain(bare_tls_hub):
    before = identity.make_authority("before", identity.valid_for(datetime.now(UTC), 365))
    data = {"tls.crt": before.certificate, "tls.key": before.key}
    encoded = {name: base64.b64encode(text).decode() for name, text in data.items()}
    metadata = {"name": AUTHORITY_SECRET, "namespace": "ns", "uid": "ca", "resourceVersion": "1"}
    hub = bare_tls_hub(pool(), policy(), {"kind": "Secret", "metadata": metadata, "data": encoded})
    await passes(hub)
    assert proven(hub, TLS_SECRET).domain == "prfaas.io"


async def test_an_installation_changes_its_trust_domain_only_when_none_of_its_secrets_is_left(bare_tls_hub):
    first = bare_tls_hub(pool(), policy())
    await passes(first)
    again = bare_tls_hub(*first.server.objects.values(), trust_domain="other.example")
    for lost in (AUTHORITY_SECRET, TLS_SECRET):
        del again.server.objects["Secret", lost]
        await passes(again)
        assert ("Secret", AUTHORITY_SECRET) not in again.server.objects, "a lost authority is never replaced"
    del again.server.objects["Secret", GATEWAY_TLS_SECRET]
    await passes(again)
    assert {proven(again, secret).domain for secret in (TLS_SECRET, GATEWAY_TLS_SECRET)} == {"other.example"}
