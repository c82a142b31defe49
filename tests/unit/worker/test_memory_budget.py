"""The bound on transfers' memory: exceeded only by a single request, in the order of asking, and no wake-up is lost."""

import random
import threading
import time

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from prfaas.errors import CapacityError
from prfaas_transfer.limits import MemoryBudget, Stop, StoppedError

from ...waiting import eventually

pytestmark = pytest.mark.system

LIMIT = 100


class Asker:
    """One request, waiting in its own thread."""

    def __init__(self, budget: MemoryBudget, size: int):
        self.size, self.stop, self.outcome = size, Stop(), "waiting"
        self._budget = budget
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._budget.acquire(self.size, self.stop)
            self.outcome = "held"
        except StoppedError:
            self.outcome = "stopped"


class Scene:
    """A budget beside the model of it: after every act the two must come to agree."""

    def __init__(self) -> None:
        self.budget = MemoryBudget(LIMIT)
        self.waiting: list[Asker] = []
        self.held: list[Asker] = []
        self.stopped: list[Asker] = []

    def ask(self, size: int) -> None:
        # One at a time, so that the order of asking is known.
        self.waiting.append(Asker(self.budget, size))
        self._settle()

    def release(self, which: int) -> None:
        if self.held:
            self.budget.release(self.held.pop(which % len(self.held)).size)
            self._settle()

    def end(self, which: int) -> None:
        if self.waiting:
            asker = self.waiting.pop(which % len(self.waiting))
            self.stopped.append(asker)
            asker.stop.set()
            self._settle()

    def _settle(self) -> None:
        while self.waiting and self._fits(self.waiting[0].size):
            self.held.append(self.waiting.pop(0))
        eventually(self._agrees, self._describe, poll=0.0002)
        assert self.budget.used_bytes == sum(one.size for one in self.held)
        assert self.budget.used_bytes <= LIMIT or len(self.held) == 1

    def _fits(self, size: int) -> bool:
        return not self.held or sum(one.size for one in self.held) + size <= LIMIT

    def _agrees(self) -> bool:
        return (
            all(one.outcome == "held" for one in self.held)
            and all(one.outcome == "stopped" for one in self.stopped)
            and all(one.outcome == "waiting" for one in self.waiting)
            and self.budget.waiting == len(self.waiting)
        )

    def _describe(self) -> str:
        return ", ".join(f"{one.size}: {one.outcome}" for one in self.held + self.stopped + self.waiting)


ACTS = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, 150)),
    st.tuples(st.just("release"), st.integers(0, 9)),
    st.tuples(st.just("end"), st.integers(0, 9)),
)


# A failure here takes seconds to show, so it is not made smaller.
@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(acts=st.lists(ACTS, max_size=14))
def test_always_grants_what_fits_in_the_order_of_asking(acts):
    scene = Scene()
    for act, value in acts:
        getattr(scene, act)(value)
    for _ in acts:  # in any case each gets its turn
        scene.release(0)
    assert (scene.waiting, scene.budget.used_bytes) == ([], 0)


def test_many_threads_stay_within_the_limit_and_all_come_through():
    budget, lock, holding, seen = MemoryBudget(LIMIT), threading.Lock(), [], []
    rng = random.Random(5)
    work = [[(rng.randint(1, 130), rng.random() < 0.2) for _ in range(60)] for _ in range(12)]

    def run(tasks: list[tuple[int, bool]]) -> None:
        for size, ends in tasks:
            stop = Stop()
            if ends:
                threading.Timer(0.0005, stop.set).start()
            try:
                budget.acquire(size, stop)
            except StoppedError:
                assert ends
                continue
            with lock:
                holding.append(size)
                seen.append(sum(holding) <= LIMIT or len(holding) == 1)
            time.sleep(0)
            with lock:
                holding.remove(size)
            budget.release(size)

    threads = [threading.Thread(target=run, args=(tasks,), daemon=True) for tasks in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert all(seen)
    assert len(seen) > 400
    assert (budget.used_bytes, budget.waiting) == (0, 0)


def test_a_wait_that_takes_too_long_says_what_to_do_and_leaves_the_line():
    budget = MemoryBudget(LIMIT)
    budget.acquire(90, Stop())
    with pytest.raises(CapacityError, match="--transfer-memory-mib"):
        budget.acquire(20, Stop(), timeout_seconds=0.01)
    assert (budget.waiting, budget.used_bytes) == (0, 90)
    budget.acquire(10, Stop(), timeout_seconds=0.01)
    assert budget.used_bytes == LIMIT


def test_nothing_costs_nothing():
    budget = MemoryBudget(LIMIT)
    budget.acquire(LIMIT, Stop())
    budget.acquire(0, Stop())
    assert budget.used_bytes == LIMIT
    budget.release(0)
    assert budget.used_bytes == LIMIT
