"""Another installation, whose clusters have the same names as ours, calls a real worker of ours with its certificate.

The control is a worker that trusts its authority, and a certificate of that one which names our own trust domain: it
opens all.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas import identity
from prfaas.names import WORKER_API_PORT, WORKER_DATA_PORT
from prfaas.rights import Identity
from prfaas.wire.kvevents import EVENTS_PATH
from prfaas_transfer.credentials import PeerCredentials

from ...unit.tls.mounts import Mount
from .conftest import DAYS, Installation, Target, Targets, call

pytestmark = pytest.mark.system

PORTS = (("/healthz", WORKER_API_PORT), ("/v1/role", WORKER_API_PORT), (EVENTS_PATH, WORKER_DATA_PORT))


def statuses(target: Target, shown: PeerCredentials) -> list[int]:
    return [call(target, shown, "GET", path, port=port).status for path, port in PORTS]


@pytest.fixture
def trusting(targets: Targets, installation: Installation, stranger: Installation) -> Iterator[Target]:
    """The hub's worker, which trusts the other authority meanwhile."""
    target, own = targets.hub, identity.issue(installation.authority, "hub", DAYS)
    target.mount.put(own, installation.authority, stranger.authority)
    yield target
    target.mount.put(own, installation.authority)


@pytest.fixture(scope="module")
def outsider(installation: Installation, stranger: Installation) -> PeerCredentials:
    """The certificate of the other installation's hub, which trusts both authorities."""
    return PeerCredentials(stranger.mount(Identity("hub"), installation.authority).path)


def test_a_certificate_of_another_installation_opens_no_port(targets: Targets, outsider: PeerCredentials):
    assert statuses(targets.hub, outsider) == [0, 0, 0]


def test_an_authority_of_both_installations_opens_no_port_of_the_other_one(trusting: Target, outsider: PeerCredentials):
    assert statuses(trusting, outsider) == [200, 401, 0], "a probe needs no certificate"


def test_control_in_our_own_trust_domain_its_certificate_opens_all(
    trusting: Target, installation: Installation, stranger: Installation, tmp_path: Path
):
    domain = identity.domain_of(installation.authority.certificate)
    pair = identity.issue(stranger.authority, "hub", DAYS, domain=domain)
    shown = PeerCredentials(Mount(tmp_path).put(pair, stranger.authority, installation.authority).path)
    assert statuses(trusting, shown) == [200, 200, 200]
    trusting.mount.put(identity.issue(installation.authority, "hub", DAYS), installation.authority)
    assert statuses(trusting, shown) == [0, 0, 0]
