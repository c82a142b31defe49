"""Proves that files replaced while we serve are used from the next connection on, and that whatever cannot be used
changes nothing, is logged once, and is forgotten when it is repaired.
"""

import datetime
import logging

import pytest

from prfaas import credentials as module
from prfaas import identity
from prfaas.errors import ConfigError
from prfaas.identity import Validity
from prfaas.names import TLS_SETTLE
from prfaas_transfer.credentials import PeerCredentials
from prfaas_worker.front.auth import credentials_of, unreachable
from prfaas_worker.options import parse

pytestmark = pytest.mark.system

NOW = datetime.datetime.now(datetime.UTC)
YEAR = identity.valid_for(NOW, 300)
DAY = datetime.timedelta(days=1)
FLAGS = ["--model-source", "x", "--model-name", "tiny"]


@pytest.mark.parametrize("name", ["tls.crt", "tls.key", "ca.crt"])
@pytest.mark.parametrize("content", [None, b"", b"half"])
def test_a_start_without_usable_files_names_the_directory(mount, name: str, content: bytes | None):
    path = mount("hub").path
    (path / name).unlink()
    if content is not None:
        (path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"--tls-dir {path}: .*(read|give)"):
        PeerCredentials(path)


def test_a_worker_does_not_start_with_another_clusters_credentials(mount):
    path = str(mount("eu").path)
    with pytest.raises(ConfigError, match="is of cluster 'eu' and --cluster is 'hub'"):
        credentials_of(parse([*FLAGS, "--tls-dir", path]))
    found = credentials_of(parse([*FLAGS, "--tls-dir", path, "--cluster", "eu"]))
    assert found is not None


def test_a_worker_without_credentials_warns(caplog: pytest.LogCaptureFixture):
    assert credentials_of(parse(FLAGS)) is None
    assert "give --tls-dir" in caplog.text


@pytest.mark.parametrize("in_place", [False, True])
def test_replaced_files_are_used_at_once(mount, authority, in_place: bool):
    place = mount("hub")
    credentials = PeerCredentials(place.path)
    first = credentials.now()
    assert credentials.now() is first, "nothing is read again while nothing changes"
    pair = identity.issue(authority, "hub", Validity(YEAR.not_before, YEAR.not_after - DAY))
    if in_place:
        (place.path / "tls.key").write_bytes(pair.key)
        assert credentials.now() is first, "a key without its certificate is not used"
        (place.path / "tls.crt").write_bytes(pair.certificate)
    else:
        place.put(pair, authority)
    assert credentials.now().files.validity.not_after == YEAR.not_after - DAY
    assert credentials.expires_unix_seconds == (YEAR.not_after - DAY).timestamp()
    assert credentials.problem == ""


def test_unusable_files_change_nothing_and_are_logged_once(mount, authority, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    place = mount("hub")
    credentials = PeerCredentials(place.path)
    first = credentials.now()
    moment = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: moment)
    expired = identity.issue(authority, "hub", Validity(NOW - DAY, NOW - datetime.timedelta(minutes=1)))
    good = {"tls.crt": expired.certificate, "tls.key": expired.key, "ca.crt": authority.certificate}
    half = {**good, "tls.crt": b"-----BEGIN"}
    for files, message in ((good, "expired"), (half, "no certificate"), ({}, "tls.crt cannot be read")):
        caplog.clear()
        place.put_files(files)
        for name in {"tls.crt", "tls.key", "ca.crt"} - files.keys():
            (place.path / name).unlink()
        for _ in range(5):
            moment += 2 * module.RETRY_SECONDS
            assert credentials.now() is first
        assert message in credentials.problem
        assert len(caplog.records) == 1
        assert message in caplog.text
        assert "PRIVATE" not in caplog.text
    caplog.clear()
    place.put(identity.issue(authority, "hub", YEAR), authority)
    assert credentials.now().files.generation == first.files.generation + 1
    assert credentials.problem == ""
    assert "credentials of cluster hub are in use" in caplog.text


class Clock:
    """The time of day, and the monotonic one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.passed = datetime.timedelta()
        monkeypatch.setattr(module, "utc_now", lambda: NOW + self.passed)
        monkeypatch.setattr(module.time, "monotonic", self.passed_seconds)

    def passed_seconds(self) -> float:
        return self.passed.total_seconds()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def state(credentials: PeerCredentials) -> tuple[bool, set[bool]]:
    """Return whether only the own cluster is accepted, and whether OpenSSL leaves times to us, in all contexts."""
    found = credentials.now()
    left = {bool(one.verify_flags & module._NO_CHECK_TIME) for one in (found.data, found.api, found.client)}
    return found.files.ran_out, left


def test_what_nobody_renews_runs_out_and_a_late_renewal_counts_everywhere_a_little_later(
    mount, authority, clock: Clock, caplog: pytest.LogCaptureFixture
):
    place = mount("hub").put(identity.issue(authority, "hub", identity.valid_for(NOW, 1)), authority)
    credentials = PeerCredentials(place.path)
    lasting = credentials.api_context()
    clock.passed = DAY - datetime.timedelta(minutes=20)
    assert state(credentials) == (False, {False})
    assert not lasting.verify_flags & module._NO_CHECK_TIME
    clock.passed = DAY - datetime.timedelta(minutes=5)
    assert state(credentials) == (True, {True})
    assert lasting.verify_flags & module._NO_CHECK_TIME
    since = credentials.now().files.validity.not_before
    clock.passed = 3 * DAY
    assert state(credentials) == (True, {True})
    assert [one.message.count("renew it") for one in caplog.records] == [1], "once"
    place.put(identity.issue(authority, "hub", Validity(NOW + 3 * DAY, NOW + 4 * DAY)), authority)
    assert state(credentials) == (True, {True}), "others of the cluster may not have theirs yet"
    assert credentials.now().files.peers.ran_out == identity.RanOut("hub", since)
    clock.passed += datetime.timedelta(seconds=module.SETTLE_SECONDS)
    assert state(credentials) == (False, {False})
    assert not lasting.verify_flags & module._NO_CHECK_TIME


def test_a_late_renewal_waits_as_long_as_the_operator_lets_secrets_settle(mount, authority, clock: Clock):
    """A value that is none leaves the former files in use. The control is the test before: without one it is 180 s."""
    place = mount("hub").put(identity.issue(authority, "hub", identity.valid_for(NOW, 1)), authority)
    credentials = PeerCredentials(place.path)
    clock.passed = 2 * DAY
    assert state(credentials) == (True, {True})
    pair = identity.issue(authority, "hub", identity.valid_for(NOW + 2 * DAY, 1))
    files = {"tls.crt": pair.certificate, "tls.key": pair.key, "ca.crt": authority.certificate}
    place.put_files({**files, TLS_SETTLE: b"soon"})
    assert state(credentials) == (True, {True})
    assert "settle-seconds is b'soon'; want a number of seconds" in credentials.problem
    place.put_files({**files, TLS_SETTLE: b"600"})
    assert state(credentials) == (True, {True})
    assert "for 600 s" in credentials.why_alone
    clock.passed += datetime.timedelta(seconds=599)
    assert state(credentials) == (True, {True})
    clock.passed += datetime.timedelta(seconds=1)
    assert state(credentials) == (False, {False})


def test_a_start_with_a_certificate_that_has_expired_is_one_of_the_own_cluster_alone(mount, authority, clock: Clock):
    place = mount("hub").put(identity.issue(authority, "hub", identity.valid_for(NOW, 1)), authority)
    clock.passed = 2 * DAY
    assert state(PeerCredentials(place.path)) == (True, {True})


def test_who_is_reached_by_no_gateway_any_more_says_why(mount, clock: Clock):
    """Gateways run in the hub, and on a buyer's own machines."""
    found = {cluster: PeerCredentials(mount(cluster).path) for cluster in ("hub", "buyer/acme", "eu")}
    assert [unreachable(one) for one in (None, *found.values())] == ["", "", "", ""]
    clock.passed = 400 * DAY
    reasons = {cluster: unreachable(one) for cluster, one in found.items()}
    assert (reasons["hub"], reasons["buyer/acme"]) == ("", "")
    assert "only cluster 'eu' takes it; renew it" in reasons["eu"]
