"""Which Secrets of a pool are looked into, and how often."""

import base64
from types import SimpleNamespace
from typing import Any

import pytest
from tests.memory_cluster import MemoryCluster

from prfaas.api.template import PodTemplate
from prfaas_operator.errors import ForbiddenSecretError
from prfaas_operator.reconcile.content import AGAIN_SECONDS, ContentCheck
from prfaas_operator.render.service_account import kubeconfig

TOKEN = {"kind": "Secret", "metadata": {"name": "s"}, "type": "kubernetes.io/service-account-token", "data": {}}
HARMLESS = TOKEN | {"type": "Opaque"}
CERTIFICATE = "-----BEGIN CERTIFICATE-----\nMAo=\n-----END CERTIFICATE-----\n"
KUBECONFIG = base64.b64encode(kubeconfig("eu", "https://192.0.2.1", CERTIFICATE, "t").encode()).decode()
READS = PodTemplate.model_validate({"imagePullSecrets": [{"name": "s"}]})


class Server(MemoryCluster):
    """An API server that counts what is read; `uid` is that of the namespace's own ConfigMap."""

    def __init__(self, *objects: Any, uid: str = "u"):
        super().__init__({"kind": "ConfigMap", "metadata": {"name": "kube-root-ca.crt", "uid": uid}}, *objects)
        self.reads = 0

    async def get(self, *which: Any) -> Any:
        self.reads += 1
        return await super().get(*which)


class Stage:
    def __init__(self, *objects: Any):
        self.now = 0.0
        self.server = Server(*objects)
        self.named: set[tuple[str, str]] = set()
        view: Any = SimpleNamespace(client=self.server, kubeconfig_keys=lambda: self.named)
        self._check = ContentCheck(view, lambda: self.now)

    async def look(self, cluster: Any = None) -> int:
        """Return how many reads of the hub a look takes."""
        before = self.server.reads
        await self._check.check(READS, cluster or self.server)
        return self.server.reads - before


async def test_what_is_harmless_is_not_read_again_for_a_while():
    stage = Stage(HARMLESS)
    assert [await stage.look(), await stage.look()] == [1, 0]
    stage.now = AGAIN_SECONDS - 1
    assert await stage.look() == 0
    stage.now = AGAIN_SECONDS
    assert await stage.look() == 1


async def test_what_is_refused_or_not_there_is_read_at_each_look():
    stage = Stage()
    assert [await stage.look(), await stage.look()] == [1, 1]
    stage.server.objects["Secret", "s"] = TOKEN
    for _ in range(2):
        with pytest.raises(ForbiddenSecretError, match="s holds a service account's token"):
            await stage.look()
    stage.server.objects["Secret", "s"] = HARMLESS
    assert await stage.look() == 1


@pytest.mark.parametrize(("there", "is_hub"), [("other", False), ("u", True)])
async def test_a_secret_of_the_same_name_in_another_cluster_is_another_one(there: str, is_hub: bool):
    """A MemberCluster that is the hub's namespace by another address is no other cluster."""
    stage = Stage(TOKEN)
    if is_hub:
        with pytest.raises(ForbiddenSecretError):
            await stage.look(Server(uid=there))
    else:
        await stage.look(Server(uid=there))


async def test_where_nobody_can_tell_the_clusters_apart_it_is_refused():
    member = Server()
    del member.objects["ConfigMap", "kube-root-ca.crt"]
    with pytest.raises(ForbiddenSecretError):
        await Stage(TOKEN).look(member)


async def test_a_cluster_that_becomes_the_hubs_namespace_is_looked_at_as_such():
    """What was not looked into is not known as harmless."""
    stage, member = Stage(TOKEN), Server(uid="other")
    await stage.look(member)
    member.objects["ConfigMap", "kube-root-ca.crt"]["metadata"]["uid"] = "u"
    with pytest.raises(ForbiddenSecretError):
        await stage.look(member)


async def test_a_secret_that_a_member_begins_to_name_is_read_again():
    """The control: while no MemberCluster names that key, a kubeconfig is its owner's."""
    stage = Stage(HARMLESS | {"data": {"kubeconfig": KUBECONFIG}})
    stage.named = {("s", "other"), ("another", "kubeconfig")}
    assert [await stage.look(), await stage.look()] == [1, 0]
    stage.named.add(("s", "kubeconfig"))
    with pytest.raises(ForbiddenSecretError, match="holds the kubeconfig of a MemberCluster"):
        await stage.look()
