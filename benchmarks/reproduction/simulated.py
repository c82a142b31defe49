"""Simulates the paper's case request by request with the product's decisions, and so includes what equations leave out.

carried      requests served per second when 15 % more arrive than the plan carries
stages       the same for each stage by itself, without limits of the other stages
first_token  times at 2 % load, almost without waits; caches cross after their prefill, as in the paper
"""

import random
from collections.abc import Iterable
from itertools import islice

import msgspec

from prfaas.capacity.optimum import Plan
from prfaas.capacity.planfile import PlanFile
from prfaas.capacity.system import HubPool, LinkCapacity, OffloadPool, System
from prfaas.capacity.workload import Workload
from prfaas.simulate.arrivals import poisson
from prfaas.simulate.outcome import Result, Tally
from prfaas.simulate.request import Arrival
from prfaas.simulate.run import simulate
from prfaas.simulate.scenario import Policy, Scenario
from prfaas.wire.profile import Profile
from prfaas.wire.routes import Threshold

OVERLOAD = 1.15
OVERLOAD_REQUESTS = 20_000
STAGE_REQUESTS = 20_000
QUIET_LOAD = 0.02
QUIET_REQUESTS = 5_000
WHOLE = 1 << 20
"""A step as long as any prompt: a cache crosses after its whole prefill."""
NO_WORK = Profile(state_bytes=0, token_bytes=1, token_seconds=1e-11)


def carried(system: System, workload: Workload, plan: Plan, seed: int = 1) -> Result:
    """Serve more than the plan carries."""
    rate = OVERLOAD * plan.lambda_max
    return _serve(scenario(system, plan), _requests(system, workload, rate, seed, OVERLOAD_REQUESTS))


def first_token(system: System, workload: Workload, plan: Plan) -> Result:
    """Serve a load so low that no request waits."""
    quiet = msgspec.structs.replace(scenario(system, plan), step_tokens=WHOLE)
    return _serve(quiet, _requests(system, workload, QUIET_LOAD * plan.lambda_max, 1, QUIET_REQUESTS))


def stages(file: PlanFile, system: System, plan: Plan) -> dict[str, float]:
    """Return the requests per second of each stage of the plan."""
    tokens = plan.threshold_tokens
    if tokens is None:
        tokens = 0 if plan.offloaded_fraction > 0 else file.workload.max_tokens
    prefilling = scenario(_with_hub(system, max_batch=1_000_000, step_seconds=1e-9), plan)
    at_home = scenario(_with_hub(system, profile=NO_WORK), plan, everything_at_home=True)
    decoding = msgspec.structs.replace(at_home, step_tokens=8 * WHOLE)  # no prompt takes a second step
    long, short = (_part(file.workload, offloaded, tokens) for offloaded in (True, False))
    found: dict[str, float] = {}
    for stage, one, own in (
        ("theta_prfaas", prefilling, long),
        ("theta_pd_p", prefilling, short),
        ("theta_pd_d", decoding, file.workload),
    ):
        rate: float = getattr(plan, stage)
        if rate > 0 and own is not None:
            arrivals = _requests(system, own, OVERLOAD * rate, 1, STAGE_REQUESTS)
            found[stage] = _serve(one, arrivals).requests_per_second
    return found


def _part(workload: Workload, offloaded: bool, threshold_tokens: int) -> Workload | None:
    """Return the lengths on one side of the threshold; None where there are none."""
    parts = [(tokens, weight) for tokens, weight in workload.items() if (tokens > threshold_tokens) is offloaded]
    return Workload([tokens for tokens, _ in parts], [weight for _, weight in parts]) if parts else None


def scenario(system: System, plan: Plan, everything_at_home: bool = False) -> Scenario:
    """Return the plan's split with its threshold, which does not move."""
    longest = 1 << 21
    tokens = plan.threshold_tokens
    if tokens is None:
        tokens = 0 if plan.offloaded_fraction > 0 else longest
    return Scenario(
        system=system,
        prefill_instances={name: round(count) for name, count in plan.split.items()},
        policy=Policy(
            threshold=Threshold(
                mode="Fixed", tokens=longest if everything_at_home else tokens, min_tokens=0, max_tokens=longest
            )
        ),
    )


def alone(profile: Profile, tokens: int) -> float:
    """Return the seconds of one prompt on an idle instance."""
    return _serve(_lone(profile, 1), [Arrival(0.0, tokens, 1)]).ttft_seconds.mean


def egress_gbps(profile: Profile, tokens: int, instances: int, rounds: int = 40) -> float:
    """Return the egress of instances that always have a prompt of this length to prefill."""
    arrivals = [Arrival(0.0, tokens, 1)] * (instances * rounds)
    return _serve(_lone(profile, instances), arrivals).egress_gbps


def _lone(profile: Profile, instances: int) -> Scenario:
    """Return an offload pool behind a link without a limit, and a hub without work."""
    system = System(
        links=(LinkCapacity(name="link", capacity_mbps=1e9),),
        offload=(OffloadPool(name="pool", profile=profile, instances=instances, link="link"),),
        hub=(HubPool(name="hub", profile=NO_WORK, instances=1, max_batch=1_000_000, step_seconds=1e-9),),
        output_tokens=1,
    )
    threshold = Threshold(mode="Fixed", tokens=0, min_tokens=0, max_tokens=WHOLE)
    return Scenario(system=system, prefill_instances={}, policy=Policy(threshold=threshold), step_tokens=WHOLE)


def _with_hub(system: System, **changes: object) -> System:
    hub = tuple(msgspec.structs.replace(pool, **changes) for pool in system.hub)
    return msgspec.structs.replace(system, hub=hub)


def _requests(system: System, workload: Workload, rate: float, seed: int, count: int) -> Iterable[Arrival]:
    rng = random.Random(seed)
    return islice(poisson(workload, round(system.output_tokens), rate, rng), count)


def _serve(scenario: Scenario, arrivals: Iterable[Arrival]) -> Result:
    return simulate(scenario, arrivals, Tally())
