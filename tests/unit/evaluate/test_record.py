"""Proves that a file that is no run of the case is said, and its neighbours count."""

import msgspec
import pytest

from prfaas.errors import ConfigError
from prfaas.evaluate.record import RunKey, read_run, read_runs

from .cases import CASE, live

KEY = RunKey("threshold", 0.5, 1)


def content(**changed) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(live(KEY), **changed))


def test_a_run_is_read_as_it_was_written():
    assert read_run(content(), CASE.digest) == live(KEY)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (content(version=2), "version 2"),
        (content(case="another"), "another case"),
        (content()[:-100], "no whole record"),
        (b"", "no whole record"),
        (b'{"version": 1}', "no whole record"),
        (b'{"version": 2}', "version 2"),
        (b"\xff\x00", "no whole record"),
        (b"[" * 100_000, "no whole record"),
    ],
    ids=["version", "case", "torn", "empty", "fields", "old", "bytes", "nesting"],
)
def test_a_file_that_is_no_run_says_why(wrong, says):
    with pytest.raises(ConfigError, match=says):
        read_run(wrong, CASE.digest)


def test_bad_files_do_not_hide_good_ones():
    runs, excluded = read_runs([("torn.json", b"{"), ("good.json", content())], CASE.digest)

    assert [run.key for run in runs] == [KEY]
    assert [one.name for one in excluded] == ["torn.json"]
