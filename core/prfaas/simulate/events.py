"""Virtual time: an event queue, and resources whose jobs share one rate.

Events happen in the order in which they are due; those due together, in the order in which they were scheduled. The
order is total, so a run depends on its inputs only. No event is ever cancelled: its action checks a count or an epoch.

`FairShare` is processor sharing, for a link among transfers and a decode batch among requests. It needs no event for
each byte or token. All jobs progress at one rate, `rate_each(n)` units a second for n jobs. It is capacity / n on a
link, 1 / step time in a batch. The work that each job received since the beginning is then one number. A job ends when
that number reaches its value at the job's arrival plus the job's size. So a heap of those ends is enough, and coming
and going costs O(log n) however long the jobs are. A job that gets more work only ends later. Its old entry in the heap
is corrected when it comes up.
"""

from collections.abc import Callable, Hashable, Iterator
from heapq import heappop, heappush
from typing import Any, Generic, TypeVar


class EventQueue:
    """The one clock of a run. `now` is in seconds of virtual time since its start."""

    __slots__ = ("_count", "_heap", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[Any], object], Any]] = []
        self._count = 0

    def at(self, seconds: float, action: Callable[[Any], object], subject: Any = None) -> None:
        """Have `action(subject)` called at this time; a time that has passed means now."""
        self._count += 1
        heappush(self._heap, (seconds if seconds > self.now else self.now, self._count, action, subject))

    def after(self, seconds: float, action: Callable[[Any], object], subject: Any = None) -> None:
        self.at(self.now + seconds, action, subject)

    def step(self) -> bool:
        """Run the next action; False when there is none."""
        if not self._heap:
            return False
        self.now, _, action, subject = heappop(self._heap)
        action(subject)
        return True


_Job = TypeVar("_Job", bound=Hashable)
_ROUNDING_SECONDS = 1e-8
"""Less time than this is rounding, and counts as served: the clock is no finer on long runs."""


class FairShare(Generic[_Job]):
    """One shared resource.

    `rate_each` returns the units a second that each of n > 0 jobs gets; 0 stops all of them. `done` is called with a
    job when all that it was given is served; it has left by then.
    """

    def __init__(self, events: EventQueue, rate_each: Callable[[int], float], done: Callable[[_Job], None]):
        self._events = events
        self._rate_each = rate_each
        self._done = done
        self._ends: dict[_Job, float] = {}
        self._heap: list[tuple[float, int, _Job]] = []
        self._count = 0
        self._each = 0.0  # units that every job present got since the resource was last idle
        self._rate = 0.0
        self._sum_of_ends = 0.0
        self._since = 0.0
        self._due = float("inf")
        self._served = 0.0
        self._busy_seconds = 0.0

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[_Job]:
        return iter(self._ends)

    def __contains__(self, job: object) -> bool:
        return job in self._ends

    @property
    def served(self) -> float:
        self._advance()
        return self._served

    @property
    def busy_seconds(self) -> float:
        """Time so far in which a job was here."""
        self._advance()
        return self._busy_seconds

    @property
    def unserved(self) -> float:
        """Units that were given and are not served yet."""
        self._advance()
        return max(0.0, self._sum_of_ends - len(self._ends) * self._each)

    def add(self, job: _Job, units: float) -> None:
        """Give a job work, or more of it."""
        self._advance()
        end = self._ends.get(job)
        if end is None:
            self._ends[job] = self._each + units
            self._sum_of_ends += self._each + units
            self._push(job)
            self.rate_changed()
        else:
            self._ends[job] = end + units
            self._sum_of_ends += units

    def remove(self, job: _Job) -> float:
        """Take a job out before its end, and return what was left of it; 0 if it is not here."""
        self._advance()
        end = self._ends.pop(job, None)
        if end is None:
            return 0.0
        self._sum_of_ends -= end
        left = max(0.0, end - self._each)
        self.rate_changed()
        return left

    def rate_changed(self) -> None:
        """Ask `rate_each` again; call this whenever its answer may have changed."""
        self._advance()
        if not self._ends:
            self._each = self._sum_of_ends = self._rate = 0.0
            self._heap.clear()
            self._due = float("inf")
            return
        self._rate = self._rate_each(len(self._ends))
        self._plan()

    def _advance(self) -> None:
        now = self._events.now
        seconds = now - self._since
        if seconds > 0:
            self._since = now
            count = len(self._ends)
            if count:
                self._each += self._rate * seconds
                self._served += self._rate * seconds * count
                self._busy_seconds += seconds

    def _push(self, job: _Job) -> None:
        self._count += 1
        heappush(self._heap, (self._ends[job], self._count, job))

    def _plan(self) -> None:
        """Schedule a wake-up at the next end. An earlier one finds nothing to do, and plans anew."""
        if self._rate <= 0:
            return
        due = self._events.now + max(0.0, self._heap[0][0] - self._each) / self._rate
        if due < self._due:
            self._due = due
            self._events.at(due, self._wake, due)

    def _wake(self, due: float) -> None:
        if due != self._due:
            return
        self._due = float("inf")
        self._advance()
        reached = self._each + self._rate * _ROUNDING_SECONDS
        ended: list[_Job] = []
        while self._heap and self._heap[0][0] <= reached:
            entry, _, job = heappop(self._heap)
            end = self._ends.get(job)
            if end is None or end < entry:  # left, and perhaps came back with another end
                continue
            if end > reached:
                self._push(job)
                continue
            del self._ends[job]
            self._sum_of_ends -= end
            ended.append(job)
        self.rate_changed()
        for job in ended:
            self._done(job)
