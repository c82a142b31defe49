"""The scheduler's part of a run: the live controller, stepped once an interval on what the simulated system shows.

What a scheduler would read from metrics and its gateway is gathered here over windows of the same length as there.
"""

from collections import deque
from operator import sub
from typing import Final, NamedTuple

from prfaas.names import HUB
from prfaas.routing.controller import Config, Facts, LinkFacts, Offered, Step, initial_state, step
from prfaas.routing.feedforward import PoolFacts
from prfaas.routing.lengths import BINS, demand_of
from prfaas.routing.links import LinkReport, LinkSample
from prfaas.simulate.request_process import RequestProcess
from prfaas.wire.control import ThresholdUpdate

LENGTHS_WINDOW_SECONDS: Final = 300.0
LENGTHS_STEP_SECONDS: Final = 10.0
ARRIVALS_WINDOW_SECONDS: Final = 30.0


class _Counted(NamedTuple):
    at_seconds: float
    lengths: tuple[int, ...]


class ShortLoop:
    """The policy's short timescale.

    Args:
        process: what is watched.

    """

    def __init__(self, process: RequestProcess):
        table = process.table
        self._process = process
        self._table = table
        self._config = Config(
            threshold=table.threshold, watermarks=table.watermarks, stale_after_seconds=table.stale_after_seconds
        )
        self._state = initial_state(self._config)
        self._offloads = deque([(0.0, 0)])
        self._lengths: deque[_Counted] = deque()
        self.links: tuple[LinkReport, ...] = ()
        """As the last step saw them."""
        self._profiles = process.scenario.profiles

    def step(self) -> Step:
        """Measure, and decide."""
        now_seconds = self._process.events.now
        self._count_lengths(now_seconds)
        made = step(
            self._config,
            self._state,
            Facts(
                now_seconds=now_seconds,
                links=self._links(),
                hub_measured=True,
                recent_offloads=self._recent_offloads(now_seconds),
                offered=self._offered(now_seconds),
            ),
        )
        self._state, self.links = made.state, made.links
        return made

    def lengths_lately(self) -> list[int]:
        """Return the prompts of the last minutes by bin."""
        latest = self._process.lengths.counts
        return list(map(sub, latest, self._lengths[0].lengths)) if self._lengths else []

    def arrivals_lately(self) -> float | None:
        """Return the requests a second over the same minutes; None: too few seconds."""
        if not self._lengths:
            return None
        seconds = self._process.events.now - self._lengths[0].at_seconds
        return None if seconds < LENGTHS_STEP_SECONDS else sum(self.lengths_lately()) / seconds

    def update(self, made: Step) -> ThresholdUpdate:
        """Return what the gateway is told of a step."""
        return ThresholdUpdate(
            tokens=made.tokens,
            bandwidth=made.bandwidth,
            offload_clusters=made.offload_clusters,
            expires_seconds=self._table.stale_after_seconds,
            reason=made.reason,
            prices=made.prices,
        )

    def _links(self) -> tuple[LinkFacts, ...]:
        return tuple(
            LinkFacts(
                cluster=cluster.name,
                capacity_mbps=cluster.capacity_mbps,
                reachable=cluster.reachable,
                ready_instances=sum(one.cluster == cluster.name for one in self._process.living()),
                sample=self._sample(cluster.name),
            )
            for cluster in self._table.clusters
        )

    def _sample(self, cluster: str) -> LinkSample | None:
        link = self._process.links[cluster]
        sample = link.sample(self._config.window_seconds, self._waiting(cluster))
        return None if link.down else sample

    def _waiting(self, cluster: str) -> int:
        """Return the prompts that wait at prefill instances of a cluster."""
        process = self._process
        return sum(
            process.prefills[one.name].waiting_prefills
            for one in process.table.instances
            if one.cluster == cluster and one.role == "prefill"
        )

    def _recent_offloads(self, now_seconds: float) -> int:
        offloads = self._process.offloads
        self._offloads.append((now_seconds, offloads))
        while len(self._offloads) > 2 and self._offloads[1][0] <= now_seconds - self._config.window_seconds:
            self._offloads.popleft()
        return offloads - self._offloads[0][1]

    def _count_lengths(self, now_seconds: float) -> None:
        if not self._lengths or now_seconds - self._lengths[-1].at_seconds >= LENGTHS_STEP_SECONDS:
            self._lengths.append(_Counted(now_seconds, self._process.lengths.counts))
            while len(self._lengths) > 1 and self._lengths[1].at_seconds <= now_seconds - LENGTHS_WINDOW_SECONDS:
                self._lengths.popleft()

    def _offered(self, now_seconds: float) -> Offered | None:
        """Return what came lately and who can prefill it; None before anything came, or where nothing moves."""
        if self._config.threshold.mode not in ("Auto", "Priced"):
            return None
        demand = demand_of(BINS, self.lengths_lately())
        if demand is None:
            return None
        ready: dict[tuple[str, str], int] = {}
        for one in self._process.living():
            if one.role == "prefill":
                ready[one.cluster, one.pool] = ready.get((one.cluster, one.pool), 0) + 1
        return Offered(
            demand=demand,
            arrivals_per_second=self._arrivals_per_second(_Counted(now_seconds, self._process.lengths.counts)),
            pools=tuple(
                PoolFacts(cluster=cluster, ready_instances=count, profile=self._profiles[pool])
                for (cluster, pool), count in ready.items()
            ),
            local_waiting_prefills=float(self._waiting(HUB)),
        )

    def _arrivals_per_second(self, latest: _Counted) -> float | None:
        earlier = [one for one in self._lengths if one.at_seconds <= latest.at_seconds - ARRIVALS_WINDOW_SECONDS]
        first = earlier[-1] if earlier else self._lengths[0]
        seconds = latest.at_seconds - first.at_seconds
        return None if seconds < LENGTHS_STEP_SECONDS else (sum(latest.lengths) - sum(first.lengths)) / seconds
