"""One run: arrivals, faults and the short loop on one clock, until every request has ended."""

from collections.abc import Callable, Iterable, Iterator

from prfaas.names import HUB
from prfaas.simulate.faults import Faults
from prfaas.simulate.longloop import LongLoop
from prfaas.simulate.outcome import Interval, Result, Tally
from prfaas.simulate.request import Arrival
from prfaas.simulate.request_process import RequestProcess
from prfaas.simulate.scenario import Scenario
from prfaas.simulate.shortloop import ShortLoop

PROGRESS_EVERY = 1000


def simulate(
    scenario: Scenario, arrivals: Iterable[Arrival], tally: Tally, progress: Callable[[int], None] | None = None
) -> Result:
    """Serve the arrivals, which are in order of time, and return what came of it.

    Args:
        scenario: what serves them; raises ConfigError where it makes no sense.
        arrivals: read as they are needed.
        tally: a fresh one.
        progress: called now and then with how many requests have arrived.

    """
    return _Run(scenario.validated(), iter(arrivals), tally, progress).result()


class _Run:
    def __init__(
        self,
        scenario: Scenario,
        arrivals: Iterator[Arrival],
        tally: Tally,
        progress: Callable[[int], None] | None,
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
        """Run to the end."""
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
        process.gateway.update(self._loop.update(made))
        self._tally.timeline.append(
            Interval(
                at_seconds=self._events.now,
                threshold_tokens=process.gateway.rule.threshold_tokens,
                utilisation_percent=max((link.utilisation_percent or 0.0 for link in made.links), default=0.0),
                unsent_bytes=sum(link.to_hub.unserved for link in process.links.values()),
                in_flight=self._tally.arrived - self._tally.ended,
                hub_prefills=sum(one.cluster == HUB and one.role == "prefill" for one in process.table.instances),
            )
        )
        self._events.after(process.table.short_interval_seconds, self._interval)
