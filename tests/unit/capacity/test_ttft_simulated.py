"""Proves that estimated times to the first token are what the simulator sees, which knows nothing of the estimate."""

import random
from itertools import islice

import msgspec
import pytest
from tests.unit.capacity.systems import paper

from prfaas.capacity import optimum, ttft
from prfaas.simulate.arrivals import poisson
from prfaas.simulate.outcome import Tally
from prfaas.simulate.run import simulate
from prfaas.simulate.scenario import Policy, Scenario
from prfaas.wire.routes import Threshold


@pytest.mark.parametrize(("load", "link_mbps"), [(0.5, 100_000), (0.7, 100_000), (0.7, 14_000)])
def test_the_estimate_is_within_15_percent_of_the_simulation(load, link_mbps):
    file = paper()
    link = msgspec.structs.replace(file.system.links[0], capacity_mbps=link_mbps)
    system = msgspec.structs.replace(file.system, links=(link,))
    plan = optimum.best(system, file.workload)
    tokens = plan.threshold_tokens or 0
    arrivals = load * plan.lambda_max
    scenario = Scenario(
        system=system,
        prefill_instances={name: int(count) for name, count in plan.split.items()},
        policy=Policy(threshold=Threshold(mode="Fixed", tokens=tokens, min_tokens=0, max_tokens=131_072)),
    )
    requests = islice(poisson(file.workload, 1024, arrivals, random.Random(3)), 4_000)
    seen = simulate(scenario, requests, Tally()).ttft_seconds
    found = ttft.queued(system, file.workload, plan, arrivals)
    assert found.mean_seconds == pytest.approx(seen.mean, rel=0.15)
    assert found.p90_seconds == pytest.approx(seen.p90, rel=0.15)
