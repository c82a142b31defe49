"""A member that was cut off has a certificate that is still valid, and calls real workers with it."""

import http.client
from collections.abc import Iterator

import msgspec
import pytest

from prfaas import identity
from prfaas.credentials import utc_now
from prfaas.names import TLS_REVOKED, WORKER_API_PORT
from prfaas.rights import TRANSFER, Identity

from .conftest import DAYS, PROMPT, SECONDS, Installation, Target, Targets, call, gets_through

pytestmark = pytest.mark.system

EU = Identity("eu")


@pytest.fixture
def files(targets: Targets, installation: Installation) -> Iterator[dict[str, bytes]]:
    """The files of a worker of the member, which are put back."""
    pair = identity.issue(installation.authority, "eu", DAYS)
    found = {"tls.crt": pair.certificate, "tls.key": pair.key, "ca.crt": installation.authority.certificate}
    yield found
    (targets.eu.mount.path / TLS_REVOKED).unlink(missing_ok=True)
    targets.eu.mount.put_files(found)


def asks_on(target: Target, connection: http.client.HTTPSConnection) -> int:
    connection.request("POST", "/v1/completions", msgspec.json.encode(PROMPT))
    answer = connection.getresponse()
    answer.read()
    return answer.status


def test_the_next_request_and_the_next_transfer_are_refused(
    targets: Targets, installation: Installation, files: dict[str, bytes]
):
    """The control is the same certificate before, and the hub's gateways after."""
    target, shown = targets.eu, installation.credentials(EU)
    assert shown is not None
    kept = http.client.HTTPSConnection(target.worker.host, WORKER_API_PORT, timeout=SECONDS, context=shown.now().client)
    assert asks_on(target, kept) == 200
    assert gets_through(target, shown, TRANSFER)
    target.mount.put_files(files | {TLS_REVOKED: identity.write_revoked({"eu": utc_now()})})
    assert asks_on(target, kept) == 401, "on a kept connection"
    answer = call(target, shown, "POST", "/v1/completions", PROMPT)
    assert (answer.status, "revoked since" in answer.error["message"]) == (401, True)
    assert not gets_through(target, shown, TRANSFER)
    gateway = installation.credentials(Identity("hub", "gateway"))
    assert call(target, gateway, "POST", "/v1/completions", PROMPT).status == 200
    kept.close()
