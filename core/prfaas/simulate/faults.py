"""What befalls links and instances while a run goes on: schedules of capacity, and failures."""

from prfaas.simulate.request_process import RequestProcess
from prfaas.simulate.scenario import Failure


class Faults:
    """Puts a scenario's schedules and failures onto the clock.

    Args:
        process: those that they befall.

    """

    def __init__(self, process: RequestProcess):
        self._process = process
        scenario, events = process.scenario, process.events
        self._deaths: dict[str, int] = {}
        for name, conditions in scenario.conditions.items():
            for at_seconds, mbps in conditions.schedule:
                events.at(at_seconds, self._carry, (name, mbps))
        for failure in scenario.failures:
            events.at(failure.at_seconds, self._fail, failure)
            events.at(failure.at_seconds + failure.for_seconds, self._mend, failure)

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

    def _mend(self, failure: Failure) -> None:
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
            process.doom(request, "decode" if route is not None and route.decode.name == name else "prefill")

    def _notice(self, link: str) -> None:
        """Let whoever needs the link find out that it stands still."""
        process = self._process
        if not process.links[link].down:
            return
        for request in list(process.links[link].to_hub):
            if request.route is not None and request.route.kind == "local":
                process.doom_if_stalled(request)
        for one in process.table.instances:
            if one.cluster == link:
                for request in list(process.gateway.on[one.name]):
                    process.doom_if_stalled(request)

    def _instances(self, failure: Failure) -> list[str]:
        table = self._process.table
        return [one.name for one in table.instances if failure.name in (one.name, one.cluster)]

    def _count(self, name: str, change: int) -> int:
        self._deaths[name] = self._deaths.get(name, 0) + change
        return self._deaths[name]
