"""Proves the life of an ejection: it doubles, ends half-open, counts a burst as one, and dies with its pod."""

from prfaas_gateway.state import Ejections


def test_an_ejection_doubles_with_every_failed_try_up_to_its_bound():
    ejections, now, lengths = Ejections(1, 5), 0.0, []
    for _ in range(5):
        ejections.starting("d0", now)
        ejections.failed("d0", now)
        lengths.append(ejections.until_seconds["d0"] - now)
        now = ejections.until_seconds["d0"]
    assert lengths == [1, 2, 4, 5, 5]


def test_failures_of_requests_that_were_under_way_count_once():
    ejections = Ejections(1, 8)
    for _ in range(16):
        ejections.failed("d0", 10.0)
    assert ejections.until_seconds == {"d0": 11.0}


def test_after_an_ejection_one_request_tries_while_others_still_go_elsewhere():
    ejections = Ejections(1, 8)
    ejections.failed("d0", 10.0)
    ejections.starting("d0", 11.5)
    assert ejections.until_seconds["d0"] == 12.5
    ejections.succeeded("d0")
    assert ejections.until_seconds == {}


def test_a_last_resort_that_fails_neither_shortens_nor_lengthens_an_ejection():
    ejections = Ejections(1, 8)
    ejections.failed("d0", 10.0)
    ejections.starting("d0", 10.5)
    assert ejections.until_seconds == {"d0": 11.0}
    ejections.failed("d0", 10.6)
    assert ejections.until_seconds == {"d0": 11.0}
    ejections.succeeded("d0")
    assert ejections.until_seconds == {}


def test_a_try_that_never_reports_back_leaves_the_instance_open_again():
    ejections = Ejections(1, 8)
    ejections.failed("d0", 10.0)
    ejections.starting("d0", 11.0)
    assert ejections.until_seconds["d0"] <= 12.0


def test_success_starts_the_count_afresh():
    ejections = Ejections(1, 8)
    ejections.failed("d0", 0.0)
    ejections.starting("d0", 1.0)
    ejections.failed("d0", 1.0)
    ejections.succeeded("d0")
    ejections.failed("d0", 5.0)
    assert ejections.until_seconds == {"d0": 6.0}


def test_an_instance_that_left_the_table_is_forgotten():
    ejections = Ejections(1, 8)
    ejections.failed("d0", 0.0)
    ejections.failed("d1", 0.0)
    ejections.keep_only({"d1"})
    assert set(ejections.until_seconds) == {"d1"}
