"""A member that was cut off has a certificate that is still valid, and calls real workers with it.

The control is a worker that does not read the list of revoked clusters.
"""

import http.client
from collections.abc import Callable, Iterator
from contextlib import closing

import msgspec
import pytest

from prfaas import identity
from prfaas.credentials import utc_now
from prfaas.names import TLS_REVOKED, WORKER_API_PORT
from prfaas.rights import TRANSFER, Identity

from .conftest import DAYS, PROMPT, SECONDS, Answer, Installation, Target, Targets, call, gets_through

pytestmark = pytest.mark.system


@pytest.fixture
def cut_off(installation: Installation) -> Iterator[Callable[[Target], None]]:
    """Give a worker of the member the list that revokes its cluster; afterwards it has none again."""
    pair = identity.issue(installation.authority, "eu", DAYS)
    files = {"tls.crt": pair.certificate, "tls.key": pair.key, "ca.crt": installation.authority.certificate}
    done: list[Target] = []

    def give(target: Target) -> None:
        done.append(target)
        target.mount.put_files(files | {TLS_REVOKED: identity.write_revoked({"eu": utc_now()})})

    yield give
    for target in done:
        (target.mount.path / TLS_REVOKED).unlink()
        target.mount.put_files(files)


def asks_on(target: Target, connection: http.client.HTTPSConnection) -> int:
    connection.request("POST", "/v1/completions", msgspec.json.encode(PROMPT))
    answer = connection.getresponse()
    answer.read()
    return answer.status


def uses_after_the_cut(
    target: Target, installation: Installation, cut_off: Callable[[Target], None]
) -> tuple[int, Answer, bool]:
    """Return what the member's certificate gets after the cut: on a connection of before, on a new one, as a transfer.

    Before the cut it gets all three.
    """
    shown = installation.credentials(Identity("eu"))
    assert shown is not None
    kept = http.client.HTTPSConnection(target.worker.host, WORKER_API_PORT, timeout=SECONDS, context=shown.now().client)
    with closing(kept):
        assert asks_on(target, kept) == 200
        assert gets_through(target, shown, TRANSFER)
        cut_off(target)
        on_kept = asks_on(target, kept)
        return on_kept, call(target, shown, "POST", "/v1/completions", PROMPT), gets_through(target, shown, TRANSFER)


def test_the_next_request_and_the_next_transfer_are_refused(
    targets: Targets, installation: Installation, cut_off: Callable[[Target], None]
):
    on_kept, answer, fetched = uses_after_the_cut(targets.eu, installation, cut_off)
    assert (on_kept, answer.status, fetched) == (401, 401, False)
    assert "revoked since" in answer.error["message"]
    gateway = installation.credentials(Identity("hub", "gateway"))
    assert call(targets.eu, gateway, "POST", "/v1/completions", PROMPT).status == 200


def test_control_where_nobody_reads_the_list_they_are_served(
    targets: Targets, installation: Installation, cut_off: Callable[[Target], None]
):
    on_kept, answer, fetched = uses_after_the_cut(targets.credulous, installation, cut_off)
    assert (on_kept, answer.status, fetched) == (200, 200, True)
