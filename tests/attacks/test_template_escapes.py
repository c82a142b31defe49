"""An editor of pools wants his image to read what opens clusters or gateways, and to be more than a worker's pod."""

import base64
import datetime
from typing import Any

import pytest
from tests.attacks.conftest import OPENS, member, pool, secret

from prfaas import identity

SECRETS = (
    "prfaas-ca",
    "prfaas-tls",
    "prfaas-gateway-tls",
    "prfaas-eu-issued",
    "eu-kubeconfig",
    "own.name-kubeconfig",
    "chat-api-keys",
)


def by_volume(name: str) -> dict[str, Any]:
    mount = {"name": "loot", "mountPath": "/loot"}
    return {"volumes": [{"name": "loot", "secret": {"secretName": name}}], "volumeMounts": [mount]}


def by_variable(name: str) -> dict[str, Any]:
    return {"env": [{"name": "LOOT", "valueFrom": {"secretKeyRef": {"name": name, "key": "tls.key"}}}]}


def by_pull(name: str) -> dict[str, Any]:
    return {"imagePullSecrets": [{"name": name}]}


every_way = pytest.mark.parametrize("way", [by_volume, by_variable, by_pull])


@every_way
@pytest.mark.parametrize("name", SECRETS)
async def test_a_protected_secret_starts_no_instance(plain_hub, way, name):
    hub = plain_hub(pool(template=way(name)))
    await hub.reconcile("DecodePool", "decode")
    assert hub.ready("DecodePool", "decode")["reason"] == "ForbiddenSecret"
    assert hub.loot("decode") == set()


@every_way
async def test_a_running_pool_gets_none_by_an_edit(plain_hub, way):
    hub = plain_hub(pool())
    await hub.reconcile("DecodePool", "decode")
    hub.server.objects["DecodePool", "decode"]["spec"]["template"] = way("prfaas-ca")
    await hub.reconcile("DecodePool", "decode")
    assert hub.images("decode"), "it still runs"
    assert hub.loot("decode") == set()


NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
AUTHORITY = identity.make_authority("issuer's", identity.valid_for(NOW, 1))
LEAF = identity.issue(AUTHORITY, "eu", identity.valid_for(NOW, 0.5))


def pair(name: str, content: identity.KeyPair, entries: tuple[str, str] = ("tls.crt", "tls.key")) -> dict[str, Any]:
    encoded = (base64.b64encode(text).decode() for text in (content.certificate, content.key))
    return secret(name, **dict(zip(entries, encoded, strict=True)))


OPENING = {
    "a kubeconfig of a free, old name": (secret("eu", "kubeconfig", kubeconfig=OPENS),),
    "one that no label gives to prfaas yet": (secret("eu", kubeconfig=OPENS), member("eu")),
    "keys of a free, old name": (secret("eu", "api-keys"),),
    "an issuer's authority": (pair("eu", AUTHORITY),),
    "an authority of `prfaas certs init`": (pair("eu", AUTHORITY, ("ca.crt", "ca.key")),),
    "a service account's token": (secret("eu", token="eA==") | {"type": "kubernetes.io/service-account-token"},),
}


@every_way
@pytest.mark.parametrize("objects", OPENING.values(), ids=OPENING)
async def test_a_secret_that_opens_something_is_refused_by_its_content(plain_hub, way, objects):
    hub = plain_hub(pool(template=way("eu")), *objects)
    await hub.reconcile("DecodePool", "decode")
    assert hub.ready("DecodePool", "decode")["reason"] == "ForbiddenSecret"
    assert hub.loot("decode") == set()


HARMLESS = {
    "a certificate of its own": (pair("eu", LEAF),),
    "an authority without its key": (secret("eu", **{"tls.crt": base64.b64encode(AUTHORITY.certificate).decode()}),),
    "what a MemberCluster names and is no kubeconfig": (secret("eu", kubeconfig="eA=="), member("eu")),
    "authorities to trust beside its own certificate": (
        secret("eu", **pair("eu", LEAF)["data"], **{"ca.crt": base64.b64encode(AUTHORITY.certificate).decode()}),
    ),
    "nothing yet": (),
}


@every_way
@pytest.mark.parametrize("objects", HARMLESS.values(), ids=HARMLESS)
async def test_control_a_secret_that_opens_nothing_is_read(plain_hub, way, objects):
    hub = plain_hub(pool(template=way("eu")), *objects)
    await hub.reconcile("DecodePool", "decode")
    assert hub.loot("decode") == {"eu"}


@every_way
async def test_control_without_the_check_it_is_read(plain_hub, monkeypatch, way):
    monkeypatch.setattr("prfaas_operator.reconcile.pool.check_secrets", lambda *_: None)
    hub = plain_hub(pool(template=way("prfaas-ca")))
    await hub.reconcile("DecodePool", "decode")
    assert hub.loot("decode") == {"prfaas-ca"}


async def test_fields_of_a_pod_that_no_template_has_do_not_reach_it(plain_hub):
    free = {
        "hostNetwork": True,
        "hostPID": True,
        "automountServiceAccountToken": True,
        "securityContext": {"runAsUser": 0},
        "volumes": [{"name": "root", "hostPath": {"path": "/"}, "emptyDir": {}}],
        "initContainers": [{"name": "evil", "image": "evil.example/exfil:1"}],
    }
    hub = plain_hub(pool(template=free))
    await hub.reconcile("DecodePool", "decode")
    spec = hub.pod("decode")["spec"]
    assert not spec.keys() & {"hostNetwork", "hostPID"}
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert not any("hostPath" in volume for volume in spec["volumes"])
    assert "evil.example" not in str(spec)


async def test_control_a_field_that_a_template_has_reaches_it(plain_hub):
    hub = plain_hub(pool(template={"runtimeClassName": "nvidia", "schedulerName": "gang"}))
    await hub.reconcile("DecodePool", "decode")
    spec = hub.pod("decode")["spec"]
    assert (spec["runtimeClassName"], spec["schedulerName"]) == ("nvidia", "gang")
