"""A member cluster that was cut off still has a certificate of hours, and wants to be used on."""

import base64
from datetime import timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from tests.attacks.conftest import MODEL, OPENS, Hub, member, policy, pool, resource, secret
from tests.memory_cluster import MemoryCluster

from prfaas import identity
from prfaas.errors import IdentityError, RequestError
from prfaas.names import GATEWAY_TLS_SECRET, LABEL_POOL_UID, LABEL_ROLE, TLS_REVOKED, TLS_SECRET
from prfaas.routing.facts import check_places, usable_places
from prfaas.wire.preferences import NO_PREFERENCES, Preferences
from prfaas.wire.routes import RoutingTable
from prfaas_operator.plan.certificates import CertificateMode
from prfaas_operator.plan.credentials import Access
from prfaas_operator.plan.pod_facts import project_pod
from prfaas_operator.render.gateway import read_config_map

OFFLOAD = resource("PrefillPool", "offload", clusterName="eu", model=MODEL)


class Reached(MemoryCluster):
    """The member's API server, which answers."""

    async def version(self) -> str:
        return "v1.34.0"

    async def try_list(self, *_: Any, **__: Any) -> None:
        pass


class Stage:
    """A hub and the member eu, with a certificate each."""

    def __init__(self):
        offloading = policy()
        offloading["spec"] |= {"prefillPools": ["offload"], "threshold": {"mode": "Fixed"}}
        self.hub = Hub(
            CertificateMode.OPERATOR,
            member("eu-kubeconfig"),
            secret("eu-kubeconfig", "kubeconfig", kubeconfig=OPENS),
            OFFLOAD,
            pool(),
            offloading,
        )
        self.there = Reached()
        self.certificates = self.hub.certificates
        self.certificates._members._connect = self._connect

    async def _connect(self, _name: str, _namespace: str, _access: Access) -> Any:
        return self.there

    async def settle(self) -> None:
        """Let the operator look twice at everything; the first passes make the authority, and record what changes."""
        for _ in range(2):
            await self.hub.reconcile("MemberCluster", "eu")
            self.certificates._wanted.add("eu")
            await self.certificates._pass()
        observed = self.hub.controller.hub
        pod = {"name": "p", "labels": {LABEL_POOL_UID: "uid-offload", LABEL_ROLE: "prefill"}}
        connection = self.certificates._members._connections["eu"]
        status = {"podIP": "192.0.2.7", "conditions": [{"type": "Ready", "status": "True"}]}
        connection.pods.items["p"] = project_pod({"metadata": pod, "spec": {}, "status": status})
        connection.pods.synced.set()
        observed.pods.synced.set()
        await self.hub.reconcile("PrfaaSPolicy", "kimi")

    async def mark(self, *, revoked: bool) -> None:
        self.hub.server.objects["MemberCluster", "eu"]["spec"]["revoked"] = revoked
        await self.settle()

    def refused(self, certificate: bytes, by: str = TLS_SECRET) -> str:
        """Return why the holder of a Secret of the hub refuses a peer's certificate; empty if it does not."""
        data = self.hub.server.objects["Secret", by]["data"]
        told = {name: base64.b64decode(text) for name, text in data.items()}
        revoked = identity.read_revoked(told[TLS_REVOKED]) if TLS_REVOKED in told else {}
        der = x509.load_pem_x509_certificate(certificate).public_bytes(Encoding.DER)
        try:
            peers = identity.PeerRules(revoked)
            identity.check_peer(der, told["ca.crt"], self.hub.server.now(), peers)
        except IdentityError as error:
            return str(error)
        return ""

    @property
    def theirs(self) -> bytes:
        """The certificate that lies in the member."""
        return base64.b64decode(self.there.objects["Secret", TLS_SECRET]["data"]["tls.crt"])

    def table(self) -> RoutingTable:
        table = read_config_map(self.hub.server.objects["ConfigMap", "kimi-routes"])
        assert table is not None
        return table

    def routed(self) -> tuple[set[str], set[str]]:
        table = self.table()
        return {one.cluster for one in table.instances}, {one.name for one in table.clusters}

    def places(self) -> set[str]:
        """Return the places whose cached bytes may serve a request that forbids nothing."""
        return set(usable_places(self.table(), NO_PREFERENCES)) - {"*"}

    def condition(self) -> tuple[str, str]:
        state = self.certificates.conditions("eu")["CertificateReady"]
        return state.status, state.reason


@pytest.fixture
async def stage() -> Stage:
    made = Stage()
    await made.settle()
    return made


async def test_a_certificate_that_is_still_valid_is_refused_and_no_prompt_goes_there(stage: Stage):
    """The control is the state before: accepted, and routed to."""
    stolen = stage.theirs
    assert [stage.refused(stolen, by) for by in (TLS_SECRET, GATEWAY_TLS_SECRET)] == ["", ""]
    assert (stage.routed(), stage.condition()) == (({"eu"}, {"eu"}), ("True", "Issued"))
    await stage.mark(revoked=True)
    assert all("revoked since" in stage.refused(stolen, by) for by in (TLS_SECRET, GATEWAY_TLS_SECRET))
    assert (stage.routed(), stage.condition()) == ((set(), set()), ("False", "Revoked"))
    assert stage.hub.ready("MemberCluster", "eu")["reason"] == "Revoked"
    assert stage.hub.ready("PrfaaSPolicy", "kimi")["reason"] == "Revoked"
    await stage.hub.reconcile("PrefillPool", "offload")
    assert stage.hub.ready("PrefillPool", "offload")["reason"] == "Revoked"


async def test_control_without_the_look_at_the_time_of_issue_it_is_accepted(stage: Stage, monkeypatch):
    await stage.mark(revoked=True)
    assert stage.refused(stage.theirs)
    monkeypatch.setattr(identity, "is_revoked", lambda *_: False)
    assert not stage.refused(stage.theirs)


async def test_it_gets_no_other_certificate(stage: Stage):
    await stage.mark(revoked=True)
    before = dict(stage.there.objects)
    del stage.there.objects["Secret", TLS_SECRET]
    await stage.settle()
    assert ("Secret", TLS_SECRET) in before
    assert ("Secret", TLS_SECRET) not in stage.there.objects


async def test_who_joins_again_is_used_with_a_new_certificate_and_the_stolen_one_stays_refused(stage: Stage):
    stolen = stage.theirs
    await stage.mark(revoked=True)
    await stage.mark(revoked=False)
    assert stage.theirs != stolen
    assert (stage.refused(stage.theirs), "revoked since" in stage.refused(stolen)) == ("", True)
    assert (stage.routed(), stage.condition()) == (({"eu"}, {"eu"}), ("True", "Issued"))
    second = stage.theirs
    stage.hub.server.clock = lambda: MemoryCluster.now(stage.there) + timedelta(minutes=1)
    await stage.mark(revoked=True)
    assert "revoked since" in stage.refused(second), "a second time, too"


async def test_the_caches_that_it_gave_before_serve_no_request_when_it_has_joined_again(stage: Stage):
    """The control is a look at it in between: its caches stay in use."""
    given = stage.table().place_of("eu")
    stage.hub.server.clock = lambda: MemoryCluster.now(stage.there) + timedelta(minutes=1)
    await stage.settle()
    assert stage.places() == {given}
    await stage.mark(revoked=True)
    assert stage.places() == set()
    await stage.mark(revoked=False)
    assert stage.routed() == ({"eu"}, {"eu"})
    assert given not in stage.places()
    assert stage.places() == {stage.table().place_of("eu")}, "what it gives from now on is used"


async def test_its_place_may_still_be_forbidden(stage: Stage):
    """A request that forbids it is refused only when the MemberCluster is gone, and misspelt names always are."""
    stage.hub.server.objects["MemberCluster", "eu"]["spec"]["datacenter"] = "us-east-1"
    await stage.mark(revoked=True)
    assert stage.routed() == (set(), set())
    check_places(Preferences(forbid=("us",)), stage.table())
    with pytest.raises(RequestError, match="where no cluster is"):
        check_places(Preferences(forbid=("us-eats",)), stage.table())


async def test_an_authority_that_ended_meanwhile_is_replaced_and_the_member_stays_cut_off(stage: Stage):
    """As after a year in which no operator ran. The control are the first looks: the hub has no good certificate."""
    await stage.mark(revoked=True)
    later = stage.hub.server.now() + timedelta(days=366)

    async def look(second: int) -> bool:
        """Return whether the hub's instances have a certificate that is good, after a pass of the operator."""
        stage.hub.server.clock = lambda: later + timedelta(seconds=second)
        await stage.certificates._pass()
        own = base64.b64decode(stage.hub.server.objects["Secret", TLS_SECRET]["data"]["tls.crt"])
        return not stage.refused(own)

    # The first one makes the revocation anew, which ended with the authority.
    assert [await look(second) for second in range(6)] == [False, False, False, True, True, True]
    assert stage.condition() == ("False", "Revoked")


async def test_a_member_that_leaves_after_it_was_cut_off_stays_cut_off(stage: Stage):
    stolen = stage.theirs
    await stage.mark(revoked=True)
    del stage.hub.server.objects["MemberCluster", "eu"]
    await stage.certificates._pass()
    assert "revoked since" in stage.refused(stolen)
    stage.hub.server.clock = lambda: MemoryCluster.now(stage.there) + timedelta(days=366)
    for _ in range(4):
        await stage.certificates._pass()
    assert TLS_REVOKED not in stage.hub.server.objects["Secret", TLS_SECRET]["data"], "until nothing of it is valid"
