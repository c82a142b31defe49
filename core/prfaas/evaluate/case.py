"""A case, and the runs that answer it: one file describes it to the planner, to the simulator and to a live run.

Each policy is a system of its own hardware, as in the simulator: see `prfaas.simulate.setup`. Its loads are shares of
what its own plan carries. One load more of PrfaaS-PD is the rate of homogeneous at 90 %: there the first tokens of both
are compared. All systems meet the same prompts with the same seed, the faster the higher their rate is.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Final

import msgspec

from prfaas.capacity.planfile import PlanFile
from prfaas.capacity.workload import Randomness
from prfaas.evaluate.record import RunKey
from prfaas.simulate import setup as setups
from prfaas.simulate.arrivals import at_rate, in_whole_blocks
from prfaas.simulate.request import Arrival
from prfaas.simulate.scenario import PolicyName, Scenario
from prfaas.simulate.setup import Setup, Shift

REPEATED_FROM: Final = 0.9
"""Loads from which a run is repeated with further seeds: there its luck counts most."""
COMPARED_AT: Final = 0.9
"""Of what the plan of homogeneous carries: where first tokens of PrfaaS-PD and of homogeneous are compared."""
_BETWEEN_RUNS_SECONDS: Final = 45.0
_OF_A_RUN: Final = frozenset({"requests", "seed", "load", "ratePerSecond", "warmupRequests"})


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked. `requests` are sent in each run; times and caches are scaled by the last two."""

    name: str
    file: PlanFile
    requests: int
    stretch: float
    cache_scale: int
    trace: tuple[Arrival, ...] = ()
    """The requests of each run, whose times are those of its rate; none: they are drawn."""

    @property
    def digest(self) -> str:
        """Tells runs of this case from those of another, or of this one at another scale.

        It is of what the file means: the lengths of its trace count, and its comments do not.
        """
        workload = (list(self.file.workload.lengths), list(self.file.workload.weights))
        simulation = json.dumps(_lasting(self.file), sort_keys=True)
        known = (repr(self.file.system), workload, simulation, self.requests, self.stretch, self.cache_scale)
        return hashlib.sha256(repr((*known, self.trace) if self.trace else known).encode()).hexdigest()[:12]


def runs_of(case: Case, policies: Sequence[PolicyName], loads: Sequence[float], seeds: int) -> list[RunKey]:
    """Return the runs of these policies at these loads, with so many seeds of each from REPEATED_FROM on."""
    wanted = [
        RunKey(policy, load, seed)
        for policy in policies
        for load in loads
        for seed in range(1, 1 + (seeds if load >= REPEATED_FROM else 1))
    ]
    if COMPARED_AT in loads and {"threshold", "homogeneous"} <= {*policies}:
        wanted += [RunKey("threshold", compared_load(case.file), seed) for seed in range(1, 1 + seeds)]
    return wanted


def case_of_trace(case: Case, requests: Iterable[Arrival]) -> Case:
    """Return a case that serves the first requests of a trace, and is planned for their lengths.

    Prompts that begin alike do so live, too, so they end with a block: see `in_whole_blocks`.
    """
    trace = tuple(in_whole_blocks(islice(requests, case.requests)))
    return msgspec.structs.replace(case, file=setups.planned_for(case.file, trace), requests=len(trace), trace=trace)


def compared_load(file: PlanFile) -> float:
    """Return the load of PrfaaS-PD at which as many requests arrive as at COMPARED_AT of homogeneous."""
    homogeneous, ours = setups.capacity(file, "homogeneous"), setups.capacity(file, "threshold")
    return round(COMPARED_AT * homogeneous / ours, 4)


def rate_per_second(case: Case, key: RunKey) -> float:
    """Return the arrivals of a run."""
    return key.load * setups.capacity(case.file, key.policy)


def scenario_of(case: Case, key: RunKey) -> Scenario:
    """Return what runs and what the simulator is given; raises ConfigError where the file cannot be run."""
    horizon_seconds = 2 * case.requests / rate_per_second(case, key) + 3600
    scenario = setups.scenario(case.file, _setup(case, key), key.policy, horizon_seconds)
    # A live gateway assumes that much between instances, and knows nothing of the scale of their caches and times.
    cluster_mbps = scenario.cluster_mbps * case.cache_scale * case.stretch
    return msgspec.structs.replace(scenario, cluster_mbps=cluster_mbps)


def arrivals_of(case: Case, key: RunKey, new_rng: Callable[[str], Randomness]) -> Iterable[Arrival]:
    """Return the requests of a run, the same in each of the same key. `new_rng` makes a source of chance of a seed."""
    if case.trace:
        return at_rate(case.trace, rate_per_second(case, key))
    rng, prefix_rng = new_rng(f"arrivals of {key.seed}"), new_rng(f"prefixes of {key.seed}")
    return setups.draw(case.file, _setup(case, key), rate_per_second(case, key), rng, prefix_rng)


def shift_of(case: Case, key: RunKey) -> Shift | None:
    """Return when requests of other lengths begin, and which; None: never."""
    return _setup(case, key).shift


def longest_tokens(case: Case, key: RunKey) -> int:
    """Return the most tokens that a prompt and its answer may have together."""
    if case.trace:
        return max(one.input_tokens + one.output_tokens for one in case.trace)
    longest = case.file.workload.max_tokens + round(case.file.system.output_tokens)
    shift = shift_of(case, key)
    return max(longest, shift.workload.max_tokens + shift.output_tokens) if shift else longest


def run_seconds(case: Case, key: RunKey) -> float:
    """Return about how long a run takes by the clock: its arrivals, what waits when the last one has come, the last
    answer, and the pods that start."""
    last_seconds = case.file.system.output_tokens * max(pool.step_seconds for pool in case.file.system.hub)
    served_per_second = min(1.0, key.load) * setups.capacity(case.file, key.policy)
    return case.stretch * (case.requests / served_per_second + last_seconds) + _BETWEEN_RUNS_SECONDS


def _setup(case: Case, key: RunKey) -> Setup:
    asked = {"requests": case.requests, "seed": key.seed, "load": key.load, "warmupRequests": 0}
    if key.threshold_tokens:
        asked["thresholdTokens"] = key.threshold_tokens
    return setups.read(msgspec.structs.replace(case.file, simulation={**_lasting(case.file), **asked}))


def _lasting(file: PlanFile) -> dict[str, Any]:
    """Return what the file says of a simulation, without what each run says for itself."""
    return {name: value for name, value in file.simulation.items() if name not in _OF_A_RUN}
