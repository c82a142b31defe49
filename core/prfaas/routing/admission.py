"""Whether a request can still begin in time: what a policy with an SLO does not take.

    wait = the least that waits, in seconds of computing, at any of the places that its decision considered

`slo.ttftMillis` promises a first token. Where more than that waits before a prefill could even begin, no decision keeps
the promise, to this request or to those behind it: it is refused at once, with the time after which the wait is within
the promise if nothing else comes. Its own prefill does not count: an idle system refuses nothing, however long the
prompt. Nor does what crosses a link: with prices that is weighed by the decision, without them it is not known.
"""

import msgspec

from prfaas.routing.decide import considered
from prfaas.routing.facts import Facts, Route


class Overload(msgspec.Struct, frozen=True, kw_only=True):
    """A request is not taken: so much waits before it, and in so many seconds few enough will."""

    wait_seconds: float
    slo_seconds: float

    @property
    def retry_after_seconds(self) -> float:
        """After which the wait is within the promise, if nothing else comes."""
        return self.wait_seconds - self.slo_seconds


def overload(facts: Facts, route: Route) -> Overload | None:
    """Return why a request that `decide` gave this route is not to be taken; None where it is."""
    slo_millis, backlog = facts.table.ttft_slo_millis, facts.backlog
    if slo_millis is None or backlog is None:
        return None
    waits = [backlog.waiting_seconds(one.name, facts.now_seconds) for one in considered(facts, route)]
    wait_seconds, slo_seconds = min(waits, default=0.0), slo_millis / 1000
    return Overload(wait_seconds=wait_seconds, slo_seconds=slo_seconds) if wait_seconds > slo_seconds else None
