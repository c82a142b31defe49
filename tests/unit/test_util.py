"""prfaas.util: deadlines, rates that may be overdrawn, pauses that double, files that change, messages logged once."""

import logging

import pytest

from prfaas.util import Backoff, Deadline, LogOnce, RateBucket, WatchedFiles, backoff_seconds, retry_after_seconds


def test_a_deadline_is_over_after_its_seconds_and_moves_when_it_is_renewed():
    now = 100.0
    deadline = Deadline(5.0, lambda: now)
    assert (deadline.left_seconds, deadline.is_over) == (5.0, False)

    now = 105.0
    assert not deadline.is_over
    now = 105.5
    assert (deadline.left_seconds, deadline.is_over) == (-0.5, True)

    deadline.renew(2.0)
    assert (deadline.left_seconds, deadline.is_over) == (2.0, False)


def test_a_bucket_refills_up_to_its_depth():
    bucket = RateBucket(2.0, 10.0, now_seconds=0.0, level=0.0)

    assert [bucket.level(at) for at in (0, 1, 5, 100)] == [0, 2, 10, 10]


def test_an_overdrawn_bucket_says_how_long_until_it_is_paid_back():
    bucket = RateBucket(2.0, 10.0, now_seconds=0.0)
    bucket.take(30.0, 0.0)

    assert bucket.level(0.0) == -20.0
    assert bucket.delay_seconds(0.0, 0.0) == 10.0
    assert bucket.delay_seconds(4.0, 10.0) == 2.0
    assert bucket.delay_seconds(4.0, 12.0) == 0.0


def test_a_clock_that_goes_back_adds_nothing_and_takes_nothing():
    bucket = RateBucket(1.0, 10.0, now_seconds=100.0, level=3.0)
    bucket.take(1.0, 50.0)

    assert bucket.level(50.0) == bucket.level(100.0) == 2.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("0", 0), ("120", 120), ("9" * 7, 1e6), ("9" * 5000, 1e6)),
        *(("Wed, 21 Oct 2026 07:28:00 GMT", 1), (None, 1), ("", 1), ("-5", 1), ("1e9", 1), ("²", 1)),
    ],
)
def test_the_pause_that_a_server_asks_for(text, seconds):
    assert retry_after_seconds(text) == seconds


def test_pauses_double_up_to_the_longest_and_restart_after_success():
    backoff = Backoff(0.5, 3.0)

    assert all(longest / 2 <= backoff.failed() <= longest for longest in (0.5, 1.0, 2.0, 3.0, 3.0))
    backoff.succeeded()
    assert backoff.failed() <= 0.5


def test_jitter_shortens_a_pause_to_no_less_than_half():
    pauses = {backoff_seconds(3, 1.0, 60.0) for _ in range(100)}

    assert all(2.0 <= pause < 4.0 for pause in pauses)
    assert len(pauses) > 1


def test_ten_thousand_failures_do_not_overflow():
    assert backoff_seconds(10_000, 0.2, 10.0, jitter=False) == 10.0


def test_files_have_changed_when_one_is_written_replaced_or_removed(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("1")
    watched = WatchedFiles([first, second])

    assert watched.changed()
    assert not watched.changed()
    second.write_text("new")
    assert watched.changed()
    (tmp_path / "other").write_text("2")
    (tmp_path / "other").replace(first)
    assert watched.changed()
    first.unlink()
    assert watched.changed()
    assert not watched.changed()


def test_a_failure_is_logged_once_and_its_end_once(caplog: pytest.LogCaptureFixture):
    once = LogOnce(logging.getLogger("test"))
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            once.failed("disk", "disk is full")
        once.failed("disk", "disk is read-only")
        once.worked("disk")
        once.worked("disk")

    assert caplog.messages == ["disk is full", "disk is read-only", "disk works again"]


def test_a_reason_decides_what_counts_as_the_same_failure(caplog: pytest.LogCaptureFixture):
    once = LogOnce(logging.getLogger("test"))
    once.failed("query", "timed out after 1.1 s", reason=TimeoutError)
    once.failed("query", "timed out after 1.2 s", reason=TimeoutError)

    assert caplog.messages == ["timed out after 1.1 s"]


def test_what_was_forgotten_may_fail_again(caplog: pytest.LogCaptureFixture):
    once = LogOnce(logging.getLogger("test"))
    once.failed("a", "a is bad")
    once.keep_only([])
    once.failed("a", "a is bad")

    assert caplog.messages == ["a is bad"] * 2
