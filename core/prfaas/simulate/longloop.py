"""The operator's part of a run: the live long loop, which converts instances of the hub as load and links ask for it.

It is told what an operator reads from a policy's status, summed up over the same minutes: lengths as slices, arrivals,
answers, links. A conversion costs what it costs there: the role changes a moment later, and what runs on an instance is
finished there. Numbers of instances stay as they are: what starting one takes is nothing that a profile tells.
"""

import math
from collections import deque
from typing import Final, NamedTuple

from prfaas.capacity.installation import Installation, Load, Pool
from prfaas.capacity.longloop import Moment, Rules, decide
from prfaas.capacity.observed import MIN_PROMPTS, slices, workload_of
from prfaas.capacity.system import HubPool, Link
from prfaas.names import HUB
from prfaas.routing.lengths import EDGES
from prfaas.simulate.request_process import RequestProcess
from prfaas.simulate.scenario import Conversion
from prfaas.simulate.shortloop import LENGTHS_WINDOW_SECONDS, ShortLoop

SHARER: Final = "{}/prefill"
"""How the PrefillPool is called here that shares a hub pool's instances."""


class _Answers(NamedTuple):
    at_seconds: float
    tokens: float
    finished: int


class LongLoop:
    """The policy's long timescale, for a hub of one pool; looks and converts by itself.

    Args:
        process: what is watched, and converted.
        short: has measured lengths and links.
        conversion: the policy's part.

    """

    def __init__(self, process: RequestProcess, short: ShortLoop, conversion: Conversion):
        self._process = process
        self._short = short
        self._conversion = conversion
        self._pool: HubPool = process.scenario.system.hub[0]
        self._rules = Rules(
            converts=True,
            min_prefill=max(1, self._pool.min_prefill),
            min_decode=max(1, self._pool.min_decode),
            conversion_cooldown_seconds=conversion.cooldown_seconds,
            scales=False,
            target_load=1.0,
            scaling_cooldown_seconds=math.inf,
            ttft_seconds=conversion.ttft_seconds,
        )
        self._prefilling = process.scenario.prefilling(self._pool)
        self._decided_at_seconds = -math.inf
        self._answers = deque([_Answers(0.0, 0.0, 0)])
        process.events.after(conversion.interval_seconds, self._look)

    def _look(self, _: None) -> None:
        self._process.events.after(self._conversion.interval_seconds, self._look)
        now_seconds, installation = self._process.events.now, self._installation()
        decision = decide(self._rules, installation, self._moment(installation))
        if decision.changes:
            self._prefilling = decision.changes[SHARER.format(self._pool.name)]
            self._decided_at_seconds = now_seconds
            self._process.events.after(self._conversion.conversion_seconds, self._convert, self._prefilling)

    def _convert(self, prefilling: int) -> None:
        self._process.gateway.divide(self._pool.name, prefilling)

    def _moment(self, installation: Installation) -> Moment:
        since_seconds = self._process.events.now - self._decided_at_seconds
        ours = since_seconds < self._conversion.conversion_seconds
        links = {link.name for link in installation.links}
        lacking = [
            one.name
            for one in self._process.table.instances
            if one.name in self._process.dead and (one.cluster == HUB or one.cluster in links)
        ]
        return Moment(
            arrivals_per_second=self._short.arrivals_lately(),
            since_change_seconds=since_seconds,
            unknown="" if installation.load else f"fewer than {MIN_PROMPTS} prompts came, or none was answered",
            under_way="a conversion is not over" if ours else ", ".join(lacking),
            ours=ours,
        )

    def _installation(self) -> Installation:
        scenario, name = self._process.scenario, self._pool.name
        links = tuple(
            Link(name=link.cluster, capacity_mbps=link.effective_mbps)
            for link in self._short.links
            if link.state == "Alive"
        )
        alive = {link.name for link in links}
        away = (
            Pool(name=pool.name, role="prefill", replicas=pool.instances, link=pool.link, profile=pool.profile)
            for pool in scenario.system.offload
            if pool.link in alive
        )
        decoding, profile = self._pool.instances - self._prefilling, self._pool.profile
        return Installation(
            pools=(
                Pool(name=name, role="decode", replicas=decoding, profile=profile),
                Pool(name=SHARER.format(name), role="prefill", replicas=self._prefilling, shares=True),
                *away,
            ),
            links=links,
            threshold=scenario.policy.threshold,
            load=self._load(),
        )

    def _load(self) -> Load | None:
        """Return what came and was answered in the last minutes; None: too little to plan with."""
        lengths, output_tokens = self._short.lengths_lately(), self._output_tokens()
        if sum(lengths) < MIN_PROMPTS or output_tokens is None:
            return None
        return Load(
            workload=workload_of(slices(EDGES, lengths)),
            arrivals_per_second=self._short.arrivals_lately() or 0.0,
            output_tokens=output_tokens,
            max_batch=self._pool.max_batch,
            step_seconds=self._pool.step_seconds,
        )

    def _output_tokens(self) -> float | None:
        """Return the tokens generated a finished answer."""
        process, now_seconds = self._process, self._process.events.now
        tokens = sum(one.generated_tokens for one in process.hub.values())
        self._answers.append(_Answers(now_seconds, tokens, process.tally.completed))
        while len(self._answers) > 2 and self._answers[1].at_seconds <= now_seconds - LENGTHS_WINDOW_SECONDS:
            self._answers.popleft()
        first, last = self._answers[0], self._answers[-1]
        finished = last.finished - first.finished
        return (last.tokens - first.tokens) / finished if finished and last.tokens > first.tokens else None
