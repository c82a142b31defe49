"""Proves processor sharing: exact ends in worked cases, and those of a plain step-by-step account for any jobs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.simulate.events import EventQueue, FairShare

CAPACITY = 100.0


class Resource:
    def __init__(self) -> None:
        self.events = EventQueue()
        self.capacity = CAPACITY
        self.ends: dict[object, float] = {}
        self.share: FairShare[object] = FairShare(self.events, lambda n: self.capacity / n, self.note)

    def note(self, job: object) -> None:
        assert job not in self.ends, "a job ends once"
        self.ends[job] = self.events.now

    def add(self, at: float, job: object, units: float) -> None:
        self.events.at(at, lambda _: self.share.add(job, units))

    def finish(self) -> dict[object, float]:
        while self.events.step():
            pass
        return self.ends


def test_a_job_to_which_more_is_added_ends_later_and_once():
    resource = Resource()
    resource.add(0, "a", 100)
    resource.add(0.5, "a", 100)
    assert resource.finish() == pytest.approx({"a": 2.0})


def test_a_rate_of_zero_stops_all_jobs_until_it_returns():
    resource = Resource()
    resource.add(0, "a", 100)

    def carry(capacity: float) -> None:
        resource.capacity = capacity
        resource.share.rate_changed()

    resource.events.at(0.5, carry, 0.0)
    resource.events.at(10.5, carry, CAPACITY)
    assert resource.finish() == pytest.approx({"a": 11.0})


def test_a_job_taken_out_leaves_its_rest_and_never_ends():
    resource = Resource()
    resource.add(0, "a", 100)
    resource.add(0, "b", 100)
    left: list[float] = []
    resource.events.at(1.0, lambda _: left.append(resource.share.remove("a")))
    assert resource.finish() == pytest.approx({"b": 1.5})
    assert left == pytest.approx([50.0])
    assert resource.share.served == pytest.approx(150.0)


JOBS = st.lists(st.tuples(st.floats(0, 20), st.floats(0.1, 500)), min_size=1, max_size=12)


@given(JOBS)
def test_ends_are_those_of_a_step_by_step_account(jobs):
    resource = Resource()
    for name, (at, units) in enumerate(jobs):
        resource.add(at, name, units)
    assert resource.finish() == pytest.approx(by_hand(jobs), abs=1e-6)
    assert resource.share.served == pytest.approx(sum(units for _, units in jobs))
    assert resource.share.unserved == pytest.approx(0, abs=1e-6)


def by_hand(jobs: list[tuple[float, float]]) -> dict[object, float]:
    coming = sorted((at, name) for name, (at, _) in enumerate(jobs))
    left: dict[int, float] = {}
    ends: dict[object, float] = {}
    now = 0.0
    while coming or left:
        until = coming[0][0] if coming else float("inf")
        if not left:
            now = until
        elif now + min(left.values()) * len(left) / CAPACITY <= until:
            least, count = min(left.values()), len(left)
            now += least * count / CAPACITY
            left = {name: units - least for name, units in left.items()}
            for name in [name for name, units in left.items() if units <= 1e-9]:
                ends[name] = now
                del left[name]
            continue
        else:
            served = (until - now) * CAPACITY / len(left)
            left = {name: units - served for name, units in left.items()}
            now = until
        name = coming.pop(0)[1]
        left[name] = jobs[name][1]
    return ends
