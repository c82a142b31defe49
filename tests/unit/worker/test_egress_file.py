"""The cap from a file: in force at once, followed when it changes, removed with the file, and unharmed by nonsense."""

import logging
from pathlib import Path

import pytest

from prfaas_transfer.limits import EgressBucket, EgressFile, traffic_of
from prfaas_worker.options import parse


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "egress-mbps"


def options(*flags: str):
    return parse(["--model-source", "builtin:kimi-linear-tiny", "--model-name", "tiny", *flags])


def test_the_file_overrides_the_flag_while_it_exists(path: Path):
    bucket = EgressBucket(50)
    file = EgressFile(path, bucket, otherwise=50)
    assert bucket.mbps == 50
    for content, mbps in ((b"400\n", 400), (b"200", 200)):
        path.write_bytes(content)
        file.look()
        assert bucket.mbps == mbps
    path.unlink()
    file.look()
    assert bucket.mbps == 50


def test_a_cap_set_by_hand_stays_until_the_file_changes(path: Path):
    path.write_bytes(b"400")
    bucket = EgressBucket()
    file = EgressFile(path, bucket, otherwise=None)
    bucket.set_mbps(10)
    file.look()
    assert bucket.mbps == 10
    path.write_bytes(b"300")
    file.look()
    assert bucket.mbps == 300


@pytest.mark.parametrize("content", [b"", b"0", b"-5", b"1.5", b"800mbit", b"\xff", "\u0665".encode(), b"9" * 63])
def test_what_is_no_cap_changes_nothing_but_the_log(path: Path, caplog: pytest.LogCaptureFixture, content: bytes):
    path.write_bytes(b"400")
    bucket = EgressBucket()
    file = EgressFile(path, bucket, otherwise=None)
    path.write_bytes(content)
    with caplog.at_level(logging.ERROR):
        file.look()
        file.look()
    assert bucket.mbps == 400
    assert [str(path) in record.getMessage() for record in caplog.records] == [True]


def test_a_file_that_cannot_be_read_changes_nothing(path: Path):
    path.mkdir()
    bucket = EgressBucket(9)
    EgressFile(path, bucket, otherwise=9)
    assert bucket.mbps == 9


def test_the_options_say_what_is_in_force_before_the_first_connection(path: Path):
    path.write_bytes(b"123")
    traffic = traffic_of(options("--egress-file", str(path), "--egress-mbps", "7"))
    assert traffic.egress.mbps == 123
    plain = traffic_of(options("--transfer-memory-mib", "3"))
    assert (plain.egress.mbps, plain.memory.limit_bytes) == (None, 3 << 20)
    assert traffic_of(options("--egress-mbps", "7")).egress.mbps == 7
