"""Proves that a file that is no run of the case is said, and its neighbours count."""

import msgspec
import pytest

from prfaas.errors import ConfigError
from prfaas.evaluate.case import rate_per_second
from prfaas.evaluate.record import MachineTiming, RunKey, read_run, read_runs

from .cases import CASE, keys, live

KEY = RunKey("threshold", 0.5, 1)


def content(**changed) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(live(KEY), **changed))


def planned_rate(key: RunKey) -> float:
    return rate_per_second(CASE, key)


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
    runs, excluded = read_runs([("torn.json", b"{"), ("good.json", content())], CASE.digest, planned_rate)

    assert [run.key for run in runs] == [KEY]
    assert [one.name for one in excluded] == ["torn.json"]


@pytest.mark.parametrize(
    ("field", "old", "says"),
    [
        ("software", "prfaas 0.1.0, commit 1", "its software is prfaas 0.1.0, commit 1"),
        ("hardware", "another machine", "its hardware is another machine"),
        ("instances", {"pd-decode": 4}, "its instances is"),
        ("link_mbps", 2, "its link_mbps is 2"),
        (None, None, ""),
    ],
)
def test_runs_of_a_load_that_were_made_otherwise_than_its_latest_are_left_out(field, old, says):
    """The last case is the negative control."""
    runs = [live(key) for key in keys("threshold", 0.5, seeds=2)]
    changed = {} if field is None else {field: old}
    runs[0] = msgspec.structs.replace(runs[0], began_at="2026-11-28T12:00:00", **changed)
    another = msgspec.structs.replace(live(RunKey("naive", 0.5, 1)), **changed)
    files = [(run.key.name, msgspec.json.encode(run)) for run in (*runs, another)]
    found, excluded = read_runs(files, CASE.digest, planned_rate)

    assert [run.key for run in found if run.key.policy == "threshold"] == [run.key for run in runs[bool(says) :]]
    assert another.key in [run.key for run in found], "another load has a latest run of its own"
    assert [(one.name, says in one.why) for one in excluded] == ([("threshold-50-1", True)] if says else [])


def test_a_run_at_a_rate_that_the_plan_says_no_more_is_left_out():
    old = msgspec.structs.replace(live(KEY), rate_per_second=1.1 * live(KEY).rate_per_second)
    found, (excluded,) = read_runs([("old.json", msgspec.json.encode(old))], CASE.digest, planned_rate)

    assert found == []
    assert "by today's plan" in excluded.why


def test_a_run_whose_machine_nobody_looked_at_does_not_count():
    unknown = MachineTiming(mean_late=None, p99_late=None, busy_share=None)

    assert "nobody knows" in unknown.why_invalid


@pytest.mark.parametrize(
    ("count", "changed", "says"),
    [
        (1, {"lost": "timeout", "error": "504: late"}, "1 of 400 requests met a timeout: 504: late"),
        (5, {"lost": "failure", "error": "502: gone"}, "5 of 400 requests failed: 502: gone"),
        (5, {"fallback": True}, "5 of 400 requests fell back"),
        (4, {"lost": "failure", "error": "502: gone"}, ""),
        (4, {"fallback": True}, ""),
        (400, {"lost": "refused", "error": "429: full"}, ""),
    ],
)
def test_timeouts_failures_and_many_fallbacks_make_a_run_invalid_and_refusals_do_not(count, changed, says):
    run = live(KEY)
    answers = [msgspec.structs.replace(one, **changed) for one in run.answers[:count]]
    why = msgspec.structs.replace(run, answers=(*answers, *run.answers[count:])).why_invalid

    assert (says in why) if says else not why


@pytest.mark.parametrize(("share", "counts"), [(0.019, True), (0.021, False)])
def test_a_driver_that_sends_too_late_makes_a_run_invalid(share, counts):
    answers = [msgspec.structs.replace(one, sent_late_seconds=share * one.ttft_seconds) for one in live(KEY).answers]
    why = msgspec.structs.replace(live(KEY), answers=tuple(answers)).why_invalid

    assert (not why) if counts else "the driver was too slow" in why


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"mean_late": 0.02, "late_share": 0.05, "busy_share": 0.9}, ""),
        ({"mean_late": 0.021}, "the machine was too slow: steps ended 2.1% of their time late in the mean"),
        ({"late_share": 0.06}, "the machine was too slow: 6% of the steps ended later than by 5% of their time"),
        ({"busy_share": 0.91}, "the machine was too slow: its cores were busy for 91% of the time"),
        ({"busy_share": None}, ""),
    ],
)
def test_a_machine_that_was_too_slow_is_said(changed, says):
    """Single late steps are forgiven, however late."""
    timing = MachineTiming(mean_late=0.0, late_share=0.0, p99_late=0.5, busy_share=0.7)

    assert msgspec.structs.replace(timing, **changed).why_invalid == says


def test_a_record_without_the_share_of_late_steps_counts_by_its_mean():
    old = msgspec.json.decode(b'{"mean_late": 0.02, "p99_late": 0.1, "busy_share": 0.4}', type=MachineTiming)
    late = msgspec.structs.replace(old, mean_late=0.03)

    assert not old.why_invalid
    assert late.why_invalid
