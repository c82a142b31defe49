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
from prfaas_transfer.credentials import PeerCredentials
from prfaas_worker.front.auth import credentials_of
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
