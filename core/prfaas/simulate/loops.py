"""The control loops of a run: the scheduler's short loop and the operator's long loop, both with the live code.

The short loop steps the controller once an interval, on the metrics that Prometheus would have then, and on what the
gateway counts itself. The long loop converts instances of the hub, and scales offload pools within bounds, as load and
links ask. Its input is the summary in a policy's status. A conversion costs as much as there. The role changes a moment
later, and an instance finishes what runs on it. A new instance serves once it has started; one that goes gets no more.
"""

import math
from collections import deque
from functools import partial
from operator import sub
from typing import Final, NamedTuple

from prfaas.capacity.installation import Installation, MeasuredLoad, Pool
from prfaas.capacity.longloop import InstallationState, Rules, decide
from prfaas.capacity.system import HubPool, LinkCapacity
from prfaas.capacity.workload import MIN_PROMPTS, slices, workload_of
from prfaas.names import HUB
from prfaas.routing.balance import Offered, find_work
from prfaas.routing.controller import ControllerFacts, Step, config_of, initial_state, step
from prfaas.routing.facts import RouteKind
from prfaas.routing.feedforward import PoolFacts
from prfaas.routing.lengths import BINS, EDGES, demand_of
from prfaas.routing.links import LinkFacts
from prfaas.simulate.request_process import RequestProcess
from prfaas.simulate.scenario import ConversionPolicy
from prfaas.simulate.scrapes import Scrapes
from prfaas.wire.control import LinkReport, PrefillTokens

LENGTHS_WINDOW_SECONDS: Final = 300.0
LENGTHS_STEP_SECONDS: Final = 10.0
ARRIVALS_WINDOW_SECONDS: Final = 30.0
SHARER: Final = "{}/prefill"
"""Name of the PrefillPool that shares a hub pool's instances."""


class _Counted(NamedTuple):
    at_seconds: float
    lengths: tuple[int, ...]
    tokens: dict[RouteKind, PrefillTokens]


class ShortLoop:
    def __init__(self, process: RequestProcess):
        table = process.table
        self._process = process
        self._table = table
        self._config = config_of(table)
        self._state = initial_state(self._config)
        self._scrapes = Scrapes(process, self._config.window_seconds)
        self._offloads = deque([(0.0, 0)])
        self._lengths: deque[_Counted] = deque()
        self.links: tuple[LinkReport, ...] = ()
        """As the last step saw them."""
        self._profiles = process.scenario.profiles

    def step(self) -> Step:
        now_seconds = self._process.events.now
        self._count_lengths(now_seconds)
        made = step(
            self._config,
            self._state,
            ControllerFacts(
                now_seconds=now_seconds,
                links=self._links(),
                hub_measured=self._scrapes.began,
                recent_offloads=self._recent_offloads(now_seconds),
                offered=self._offered(now_seconds),
                recent_prompts=sum(self.lengths_lately()),
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

    def _links(self) -> tuple[LinkFacts, ...]:
        return tuple(
            LinkFacts(
                cluster=cluster.name,
                capacity_mbps=cluster.capacity_mbps,
                reachable=cluster.reachable,
                ready_instances=sum(one.cluster == cluster.name for one in self._process.living()),
                sample=self._scrapes.sample(cluster.name),
            )
            for cluster in self._table.clusters
        )

    def _recent_offloads(self, now_seconds: float) -> int:
        offloads = self._process.offloads
        self._offloads.append((now_seconds, offloads))
        while len(self._offloads) > 2 and self._offloads[1][0] <= now_seconds - self._config.window_seconds:
            self._offloads.popleft()
        return offloads - self._offloads[0][1]

    def _count_lengths(self, now_seconds: float) -> None:
        if not self._lengths or now_seconds - self._lengths[-1].at_seconds >= LENGTHS_STEP_SECONDS:
            self._lengths.append(self._counted(now_seconds))
            while len(self._lengths) > 1 and self._lengths[1].at_seconds <= now_seconds - LENGTHS_WINDOW_SECONDS:
                self._lengths.popleft()

    def _counted(self, now_seconds: float) -> _Counted:
        tokens = self._process.tokens
        by_kind: dict[RouteKind, PrefillTokens] = {"offload": tokens.of("offload"), "local": tokens.of("local")}
        return _Counted(now_seconds, self._process.lengths.counts, by_kind)

    def _offered(self, now_seconds: float) -> Offered | None:
        """Return the latest demand and the pools for it; None before any request, or in a mode that never moves."""
        if self._config.threshold.mode not in ("Auto", "Priced"):
            return None
        demand = demand_of(BINS, self.lengths_lately())
        if demand is None:
            return None
        ready: dict[tuple[str, str], int] = {}
        for one in self._process.living():
            if one.role == "prefill":
                ready[one.cluster, one.pool] = ready.get((one.cluster, one.pool), 0) + 1
        first, latest = self._lengths[0], self._counted(now_seconds)
        work = {kind: find_work(first.tokens[kind], last) for kind, last in latest.tokens.items()}
        return Offered(
            demand=demand,
            arrivals_per_second=self._arrivals_per_second(latest),
            pools=tuple(
                PoolFacts(
                    cluster=cluster,
                    ready_instances=count,
                    profile=self._profiles[pool],
                    work=work["local" if cluster == HUB else "offload"],
                )
                for (cluster, pool), count in ready.items()
            ),
            local_waiting_prefills=float(self._scrapes.local_waiting_prefills),
        )

    def _arrivals_per_second(self, latest: _Counted) -> float | None:
        earlier = [one for one in self._lengths if one.at_seconds <= latest.at_seconds - ARRIVALS_WINDOW_SECONDS]
        first = earlier[-1] if earlier else self._lengths[0]
        seconds = latest.at_seconds - first.at_seconds
        return None if seconds < LENGTHS_STEP_SECONDS else (sum(latest.lengths) - sum(first.lengths)) / seconds


class _Answers(NamedTuple):
    at_seconds: float
    tokens: float
    finished: int


class LongLoop:
    """The policy's long timescale, for a hub of one pool; it decides, and makes one change, once an interval."""

    def __init__(self, process: RequestProcess, short: ShortLoop, conversion: ConversionPolicy):
        self._process = process
        self._short = short
        self._conversion = conversion
        self._pool: HubPool = process.scenario.system.hub[0]
        self._rules = Rules(
            converts=True,
            min_prefill=max(1, self._pool.min_prefill),
            min_decode=max(1, self._pool.min_decode),
            conversion_cooldown_seconds=conversion.cooldown_seconds,
            scales=bool(conversion.scaled),
            target_load=conversion.target_load,
            scaling_cooldown_seconds=conversion.cooldown_seconds,
            ttft_seconds=conversion.ttft_seconds,
        )
        self._sharer = SHARER.format(self._pool.name)
        self._wanted = {pool.name: pool.instances for pool in process.scenario.system.offload}
        self._wanted[self._sharer] = process.scenario.prefilling(self._pool)
        self._bounds = {one.name: one for one in conversion.scaled}
        self._decided_at_seconds = self._done_at_seconds = -math.inf
        self._answers = deque([_Answers(0.0, 0.0, 0)])
        process.events.after(conversion.interval_seconds, self._look)

    def _look(self, _: None) -> None:
        self._process.events.after(self._conversion.interval_seconds, self._look)
        now_seconds, installation = self._process.events.now, self._installation()
        decision = decide(self._rules, installation, self._moment(installation))
        changes = {name: count for name, count in decision.changes.items() if name in self._wanted}
        for name, count in changes.items():  # what the decode pool gets is left of the prefill pool
            self._change(name, count)
        if changes:
            self._decided_at_seconds = now_seconds

    def _change(self, name: str, count: int) -> None:
        """Have so many instances of a pool, as soon as that takes."""
        process, conversion = self._process, self._conversion
        if name == self._sharer:
            change, seconds = partial(process.divide, self._pool.name), conversion.conversion_seconds
        else:
            grows = count > self._wanted[name]
            change, seconds = partial(process.scale, name), conversion.start_seconds if grows else 0.0
        self._wanted[name] = count
        self._done_at_seconds = process.events.now + seconds
        process.events.after(seconds, change, count)

    def _moment(self, installation: Installation) -> InstallationState:
        since_seconds = self._process.events.now - self._decided_at_seconds
        ours = self._process.events.now < self._done_at_seconds
        links = {link.name for link in installation.links}
        lacking = [
            one.name
            for one in self._process.table.instances
            if one.name in self._process.dead and (one.cluster == HUB or one.cluster in links)
        ]
        return InstallationState(
            arrivals_per_second=self._short.arrivals_lately(),
            since_change_seconds=since_seconds,
            unknown="" if installation.load else f"fewer than {MIN_PROMPTS} prompts came, or none was answered",
            under_way="a change is not over" if ours else ", ".join(lacking),
            ours=ours,
        )

    def _installation(self) -> Installation:
        scenario, name = self._process.scenario, self._pool.name
        links = tuple(
            LinkCapacity(name=link.cluster, capacity_mbps=link.effective_mbps)
            for link in self._short.links
            if link.state == "Alive"
        )
        alive = {link.name for link in links}
        away = (
            Pool(
                name=pool.name,
                role="prefill",
                replicas=self._wanted[pool.name],
                link=pool.link,
                least=bounds.least if (bounds := self._bounds.get(pool.name)) else None,
                most=bounds.most if bounds else None,
                profile=pool.profile,
            )
            for pool in scenario.system.offload
            if pool.link in alive
        )
        prefilling = self._wanted[self._sharer]
        decoding, profile = self._pool.instances - prefilling, self._pool.profile
        return Installation(
            pools=(
                Pool(name=name, role="decode", replicas=decoding, profile=profile),
                Pool(name=self._sharer, role="prefill", replicas=prefilling, shares=True),
                *away,
            ),
            links=links,
            threshold=scenario.policy.threshold,
            load=self._load(),
        )

    def _load(self) -> MeasuredLoad | None:
        """Return the load of the last minutes; None: too little to plan with."""
        lengths, output_tokens = self._short.lengths_lately(), self._output_tokens()
        if sum(lengths) < MIN_PROMPTS or output_tokens is None:
            return None
        return MeasuredLoad(
            workload=workload_of(slices(EDGES, lengths)),
            arrivals_per_second=self._short.arrivals_lately() or 0.0,
            output_tokens=output_tokens,
            max_batch=self._pool.max_batch,
            step_seconds=self._pool.step_seconds,
        )

    def _output_tokens(self) -> float | None:
        """Return the mean tokens of a finished answer."""
        process, now_seconds = self._process, self._process.events.now
        tokens = sum(one.generated_tokens for one in map(process.instances.__getitem__, sorted(process.hub)))
        self._answers.append(_Answers(now_seconds, tokens, process.tally.completed))
        while len(self._answers) > 2 and self._answers[1].at_seconds <= now_seconds - LENGTHS_WINDOW_SECONDS:
            self._answers.popleft()
        first, last = self._answers[0], self._answers[-1]
        finished = last.finished - first.finished
        return (last.tokens - first.tokens) / finished if finished and last.tokens > first.tokens else None
