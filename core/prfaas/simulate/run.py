"""Runs arrivals, faults and control loops on one clock, until every request has ended.

`highest_rate` repeats runs to find Lambda at an SLO: the highest rate of arrivals that keeps a promise.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prfaas.names import HUB
from prfaas.simulate.loops import LongLoop, ShortLoop
from prfaas.simulate.outcome import Interval, Result, Tally
from prfaas.simulate.request import Arrival
from prfaas.simulate.request_process import RequestProcess
from prfaas.simulate.scenario import Failure, Scenario

PROGRESS_EVERY = 1000
DOUBLINGS: Final = 8
HALVINGS: Final = 6


def simulate(
    scenario: Scenario, arrivals: Iterable[Arrival], tally: Tally, progress: Callable[[int], None] | None = None
) -> Result:
    """Serve the arrivals, which are in order of time, and return the result.

    The tally is a fresh one. `progress` is called now and then with the number of requests that have arrived. Raises
    ConfigError for a scenario that makes no sense.
    """
    return _Run(scenario.validated(), iter(arrivals), tally, progress).result()


class _Run:
    def __init__(
        self, scenario: Scenario, arrivals: Iterator[Arrival], tally: Tally, progress: Callable[[int], None] | None
    ):
        self._arrivals = arrivals
        self._tally = tally
        self._progress = progress
        self._process = RequestProcess(scenario, tally)
        self._events = self._process.events
        self._loop = ShortLoop(self._process)
        self._more = True
        Faults(self._process)
        self._next_arrival()
        if scenario.offloads:
            self._events.at(0.0, self._interval)
            if scenario.policy.conversion is not None:
                LongLoop(self._process, self._loop, scenario.policy.conversion)

    def result(self) -> Result:
        while (self._more or self._tally.ended < self._tally.arrived) and self._events.step():
            pass
        return self._tally.result(sum(link.to_hub.served for link in self._process.links.values()))

    def _next_arrival(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is None:
            self._more = False
        else:
            self._events.at(arrival.at_seconds, self._arrive, arrival)

    def _arrive(self, arrival: Arrival) -> None:
        self._process.start(arrival)
        self._next_arrival()
        if self._progress is not None and self._tally.arrived % PROGRESS_EVERY == 0:
            self._progress(self._tally.arrived)

    def _interval(self, _: None) -> None:
        process = self._process
        made = self._loop.step()
        process.gateway.update(made.update(process.table.stale_after_seconds))
        self._tally.timeline.append(
            Interval(
                at_seconds=self._events.now,
                threshold_tokens=process.gateway.rule.threshold_tokens,
                utilisation_percent=max((link.utilisation_percent or 0.0 for link in made.links), default=0.0),
                sent_bytes=sum(link.to_hub.served for link in process.links.values()),
                unsent_bytes=sum(link.to_hub.unserved for link in process.links.values()),
                in_flight=self._tally.arrived - self._tally.ended,
                hub_prefills=sum(one.cluster == HUB and one.role == "prefill" for one in process.table.instances),
                offload_instances=sum(one.cluster != HUB for one in process.table.instances),
            )
        )
        self._events.after(process.table.short_interval_seconds, self._interval)


class Faults:
    """Puts a scenario's schedules and failures onto the clock."""

    def __init__(self, process: RequestProcess):
        self._process = process
        scenario, events = process.scenario, process.events
        self._deaths: dict[str, int] = {}
        for name, conditions in scenario.conditions.items():
            for at_seconds, mbps in conditions.schedule:
                events.at(at_seconds, self._carry, (name, mbps))
        for failure in scenario.failures:
            events.at(failure.at_seconds, self._fail, failure)
            events.at(failure.at_seconds + failure.for_seconds, self._recover, failure)

    def _carry(self, change: tuple[str, float]) -> None:
        name, mbps = change
        self._process.links[name].set_mbps(mbps)
        self._notice(name)

    def _fail(self, failure: Failure) -> None:
        link = self._process.links.get(failure.name)
        if link is not None:
            self._count(failure.name, 1)
            link.set_cut(True)
            self._notice(failure.name)
        for name in self._instances(failure):
            self._count(name, 1)
            self._kill(name)

    def _recover(self, failure: Failure) -> None:
        """Overlapping failures of one thing end with the last of them."""
        link = self._process.links.get(failure.name)
        if link is not None and self._count(failure.name, -1) == 0:
            link.set_cut(False)
        for name in self._instances(failure):
            if self._count(name, -1) == 0:
                self._process.dead.discard(name)

    def _kill(self, name: str) -> None:
        process = self._process
        process.dead.add(name)
        process.caches.clear(name)
        for request in list(process.gateway.on[name]):
            route = request.route
            process.withdraw(request)
            process.fail_later(request, "decode" if route is not None and route.decode.name == name else "prefill")
        process.instances[name].restart()

    def _notice(self, link: str) -> None:
        """Make the requests that need the link notice that it carries nothing."""
        process = self._process
        if not process.links[link].down:
            return
        for request in list(process.links[link].to_hub):
            if request.route is not None and request.route.kind == "local":
                process.fail_later_if_stalled(request)
        for one in process.all_instances:
            if one.cluster == link:
                for request in list(process.gateway.on[one.name]):
                    process.fail_later_if_stalled(request)

    def _instances(self, failure: Failure) -> list[str]:
        return [one.name for one in self._process.all_instances if failure.name in (one.name, one.cluster)]

    def _count(self, name: str, change: int) -> int:
        self._deaths[name] = self._deaths.get(name, 0) + change
        return self._deaths[name]


def highest_rate(keeps: Callable[[float], bool], start_per_second: float) -> float:
    """Return the highest rate found to keep the promise, within about 1 %; 0 if none down to a 256th of `start`.

    `keeps` tries a rate, and is taken to be true up to some rate and false above.
    """
    low, high = start_per_second, start_per_second
    if keeps(start_per_second):
        for _ in range(DOUBLINGS):
            high = 2 * low
            if not keeps(high):
                break
            low = high
    else:
        for _ in range(DOUBLINGS):
            low = high / 2
            if keeps(low):
                break
            high = low
        else:
            return 0.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low
