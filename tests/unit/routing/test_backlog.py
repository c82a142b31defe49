"""The backlog of a gateway: what waits is never more than was placed, wears off with time, and nothing stays behind."""

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
    backlog.remove(0)
    assert (backlog.waiting_seconds("a", 0.0), backlog.waiting_requests("a")) == (1.0, 1)


def test_what_only_waits_for_the_link_does_not_occupy_the_instance():
    backlog = of(Work(seconds=1.0, link="eu", bits=1e9, mbps=10.0))
    assert backlog.waiting_seconds("a", 2.0) == 0.0
    backlog.add("next", "a", Work(seconds=1.0), 2.0)
    assert backlog.waiting_seconds("a", 2.0) == 1.0


def test_an_instance_or_link_that_nothing_was_placed_on_has_nothing_waiting():
    backlog = of(Work(seconds=1.0))
    backlog.remove("unknown")
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
            backlog.remove(oldest)
            backlog.remove(oldest)  # once is enough
            del held[oldest]
        assert 0 <= backlog.waiting_seconds("a", now) <= sum(one.seconds for one in held.values()) + 1e-6
        assert 0 <= backlog.waiting_bits("eu", now, 100.0) <= sum(one.bits for one in held.values()) * (1 + 1e-9) + 1
        assert backlog.waiting_requests("a") == len(backlog) == len(held)
    for number in list(held):
        backlog.remove(number)
    assert len(backlog) == 0
    assert backlog.waiting_seconds("a", now) == backlog.waiting_bits("eu", now, 100.0) == 0.0
