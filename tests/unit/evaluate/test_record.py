"""Proves that a file that is no run of the case is said, and its neighbours count."""

import msgspec
import pytest

from prfaas.errors import ConfigError
from prfaas.evaluate.record import MachineTruth, RunKey, read_run, read_runs

from .cases import CASE, live

KEY = RunKey("threshold", 0.5, 1)


def content(**changed) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(live(KEY), **changed))


def test_a_run_is_read_as_it_was_written():
    assert read_run(content(), CASE.digest) == live(KEY)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (content(version=1), "version 1"),
        (content(case="another"), "another case"),
        (content()[:-100], "no whole record"),
        (b"", "no whole record"),
        (b'{"version": 3}', "no whole record"),
        (b'{"version": 1}', "version 1"),
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


def test_a_run_whose_machine_nobody_looked_at_does_not_count():
    unknown = MachineTruth(mean_late=None, p99_late=None, busy_share=None)

    assert "nobody knows" in unknown.why_invalid


@pytest.mark.parametrize(("mean_late", "counts"), [(0.0, True), (0.02, True), (0.021, False)])
def test_a_machine_that_was_too_slow_in_the_mean_is_said(mean_late, counts):
    """A few late steps are forgiven."""
    machine = MachineTruth(mean_late=mean_late, p99_late=0.5, busy_share=0.7)

    assert (not machine.why_invalid) == counts
