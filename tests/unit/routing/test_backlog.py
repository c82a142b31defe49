"""The backlog of a gateway: what waits is never more than was placed, wears off with time, and nothing stays behind. A
promise that counts what waits holds also where an instance is slower than its profile, or serves other gateways.
"""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.routing.prices import Backlog, Work

seconds = st.floats(0, 100)
works = st.builds(lambda s, bits: Work(seconds=s, link="eu", bits=bits, mbps=100.0), seconds, st.floats(0, 1e10))


def of(*placed: Work) -> Backlog:
    backlog = Backlog()
    for number, work in enumerate(placed):
        backlog.add(number, "a", work, 0.0)
    return backlog


def test_work_is_done_a_second_a_second_and_bits_as_the_link_carries_them():
    backlog = of(Work(seconds=3.0, link="eu", bits=4e8, mbps=100.0))
    assert (backlog.waiting_seconds("a", 1.0), backlog.waiting_bits("eu", 1.0, 100.0)) == (2.0, 3e8)
    assert (backlog.waiting_seconds("a", 9.0), backlog.waiting_bits("eu", 9.0, 100.0)) == (0.0, 0.0)


def test_what_answered_before_its_time_waits_no_longer():
    backlog = of(Work(seconds=5.0), Work(seconds=1.0))
    backlog.remove(0, 0.0)
    assert (backlog.waiting_seconds("a", 0.0), backlog.waiting_requests("a")) == (1.0, 1)


def test_what_only_waits_for_the_link_does_not_occupy_the_instance():
    backlog = of(Work(seconds=1.0, link="eu", bits=1e9, mbps=10.0))
    assert backlog.waiting_seconds("a", 2.0) == 0.0
    backlog.add("next", "a", Work(seconds=1.0), 2.0)
    assert backlog.waiting_seconds("a", 2.0) == 1.0


def test_an_instance_or_link_that_nothing_was_placed_on_has_nothing_waiting():
    backlog = of(Work(seconds=1.0))
    backlog.remove("unknown", 0.0)
    assert (backlog.waiting_seconds("b", 0.0), backlog.waiting_requests("b")) == (0.0, 0)
    assert backlog.waiting_bits("eu", 0.0, 100.0) == 0.0


@given(st.lists(st.tuples(works, st.booleans(), st.floats(0, 10)), max_size=40))
def test_what_waits_is_bounded_and_nothing_remains_at_the_end(steps):
    backlog, held, now = Backlog(), {}, 0.0
    for number, (work, leaves, later) in enumerate(steps):
        backlog.add(number, "a", work, now)
        held[number] = work
        now += later
        if leaves:
            oldest = next(iter(held))
            backlog.remove(oldest, now)
            backlog.remove(oldest, now)  # once is enough
            del held[oldest]
        held_seconds = sum(one.seconds for one in held.values())
        assert 0 <= backlog.waiting_seconds("a", now) <= backlog.unanswered_seconds("a", now) + 1e-6
        assert backlog.unanswered_seconds("a", now) <= held_seconds + 1e-6
        assert 0 <= backlog.waiting_bits("eu", now, 100.0) <= sum(one.bits for one in held.values()) * (1 + 1e-9) + 1
        assert backlog.waiting_requests("a") == len(backlog) == len(held)
    for number in list(held):
        backlog.remove(number, now)
    assert len(backlog) == 0
    assert backlog.waiting_seconds("a", now) == backlog.waiting_bits("eu", now, 100.0) == 0.0
    assert backlog.unanswered_seconds("a", now) == 0.0


PROMISED_SECONDS = 1.0
WORK = Work(seconds=0.04)


def longest_wait(known, *, takes: float, gateways: int = 1) -> float:
    """Return the longest wait for an instance that takes so many seconds for each request. Gateways offer it twice what
    it carries for a minute, and send it what finds no more than the promise waiting by `known`."""
    backlogs, under_way = [Backlog() for _ in range(gateways)], deque[tuple[float, int]]()
    free_at = longest = 0.0
    for number in range(round(120 / takes)):
        now = number * takes / 2
        while under_way and under_way[0][0] <= now:
            answered_at, answered = under_way.popleft()
            backlogs[answered % gateways].remove(answered, answered_at)
        if known(backlogs[number % gateways], "a", now) <= PROMISED_SECONDS:
            backlogs[number % gateways].add(number, "a", WORK, now)
            longest = max(longest, free_at - now)
            free_at = max(free_at, now) + takes
            under_way.append((free_at, number))
    return longest


@pytest.mark.parametrize("slowness", [1.0, 1.25, 2.0])
def test_a_promise_is_late_by_no_more_than_the_instance_is_slower_than_its_profile(slowness: float):
    longest = longest_wait(Backlog.unanswered_seconds, takes=slowness * WORK.seconds)
    assert 0.9 * PROMISED_SECONDS < longest < 1.1 * slowness * PROMISED_SECONDS


def test_of_two_gateways_each_counts_its_own_and_the_wait_is_twice_as_long():
    longest = longest_wait(Backlog.unanswered_seconds, takes=WORK.seconds, gateways=2)
    assert PROMISED_SECONDS < longest < 2.2 * PROMISED_SECONDS


@pytest.mark.parametrize(("slowness", "gateways"), [(1.25, 1), (1.0, 2)])
def test_control_by_time_alone_the_wait_grows_as_long_as_the_overload_lasts(slowness: float, gateways: int):
    assert longest_wait(Backlog.waiting_seconds, takes=slowness * WORK.seconds, gateways=gateways) > 8.0


@pytest.mark.parametrize(("is_news", "left_seconds"), [(False, 0.0), (True, 9.0)])
def test_a_whole_answer_says_nothing_of_what_was_placed_behind_it(is_news: bool, left_seconds: float):
    """It comes long after its first token. The control takes it for one, and so refuses others where nothing waits."""
    backlog = of(*[Work(seconds=0.1)] * 91)
    backlog.remove(0, 30.0 if is_news else None)
    assert backlog.unanswered_seconds("a", 30.0) == pytest.approx(left_seconds)


def test_a_short_request_that_overtakes_a_long_one_takes_back_nothing_of_what_that_has():
    backlog = of(Work(seconds=5.0), Work(seconds=0.1))
    backlog.remove(1, 4.0)
    assert backlog.unanswered_seconds("a", 4.0) == pytest.approx(1.1)
