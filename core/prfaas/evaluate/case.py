"""A case, and the runs that answer it: one file describes it to the planner, to the simulator and to a live run.

Each policy is a system of its own hardware, as in the simulator: see `prfaas.simulate.setup`. Its loads are shares of
what its own plan carries. All systems meet the same prompts at the same load and seed, as far as their rates are equal.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import Final

import msgspec

from prfaas.capacity.planfile import PlanFile
from prfaas.capacity.workload import Randomness
from prfaas.evaluate.record import RunKey
from prfaas.simulate import setup as setups
from prfaas.simulate.arrivals import poisson, sharing
from prfaas.simulate.request import Arrival
from prfaas.simulate.scenario import PolicyName, Scenario
from prfaas.simulate.setup import Setup

REPEATED_FROM: Final = 0.9
"""Loads from which a run is repeated with further seeds: there its luck counts most."""
_BETWEEN_RUNS_SECONDS: Final = 45.0


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked. `requests` are sent in each run; times and caches are scaled by the last two."""

    name: str
    file: PlanFile
    requests: int
    stretch: float
    cache_scale: int
    text: str
    """Of the file."""

    @property
    def digest(self) -> str:
        """Tells runs of this case from those of another, or of this one at another scale."""
        known = repr((self.text, self.requests, self.stretch, self.cache_scale))
        return hashlib.sha256(known.encode()).hexdigest()[:12]


def runs_of(
    policies: Sequence[PolicyName], loads: Sequence[float], seeds: int, done: Collection[RunKey], rng: Randomness
) -> list[RunKey]:
    """Return the runs that are missing, in random order: what drifts on a machine then meets all systems alike."""
    wanted = [
        RunKey(policy, load, seed)
        for policy in policies
        for load in loads
        for seed in range(1, 1 + (seeds if load >= REPEATED_FROM else 1))
    ]
    drawn = {key: rng.random() for key in wanted if key not in done}
    return sorted(drawn, key=drawn.__getitem__)


def rate_per_second(case: Case, key: RunKey) -> float:
    """Return the arrivals of a run."""
    return key.load * setups.capacity(case.file, key.policy)


def scenario_of(case: Case, key: RunKey) -> Scenario:
    """Return what runs and what the simulator is given; raises ConfigError where the file cannot be run."""
    horizon_seconds = 2 * case.requests / rate_per_second(case, key) + 3600
    return setups.scenario(case.file, _setup(case, key), key.policy, horizon_seconds)


def arrivals_of(case: Case, key: RunKey, new_rng: Callable[[str], Randomness]) -> Iterable[Arrival]:
    """Return the requests of a run, the same in each of the same key. `new_rng` makes a source of chance of a seed."""
    setup = _setup(case, key)
    tokens, rate = round(case.file.system.output_tokens), rate_per_second(case, key)
    drawn = poisson(case.file.workload, tokens, rate, new_rng(f"arrivals of {key.seed}"), setup.bursts)
    if setup.prefix_share > 0:
        drawn = sharing(drawn, setup.prefix_share, new_rng(f"prefixes of {key.seed}"))
    return islice(drawn, case.requests)


def run_seconds(case: Case, key: RunKey) -> float:
    """Return about how long a run takes by the clock: its arrivals, the last answer, and the pods that start."""
    last_seconds = case.file.system.output_tokens * max(pool.step_seconds for pool in case.file.system.hub)
    return case.stretch * (case.requests / rate_per_second(case, key) + last_seconds) + _BETWEEN_RUNS_SECONDS


def _setup(case: Case, key: RunKey) -> Setup:
    said = {name: value for name, value in case.file.simulation.items() if name != "ratePerSecond"}
    asked = {"requests": case.requests, "seed": key.seed, "load": key.load, "warmupRequests": 0}
    return setups.read(msgspec.structs.replace(case.file, simulation={**said, **asked}))
