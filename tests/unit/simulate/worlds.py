"""Small systems, whose answers can be worked out by hand."""

import random
from collections.abc import Iterable
from itertools import islice

import msgspec

from prfaas.capacity.system import HubPool, LinkCapacity, OffloadPool, System
from prfaas.capacity.workload import Workload
from prfaas.simulate.arrivals import poisson
from prfaas.simulate.outcome import Result, Tally
from prfaas.simulate.request import Arrival
from prfaas.simulate.run import simulate
from prfaas.simulate.scenario import Policy, Scenario
from prfaas.wire.profile import Profile
from prfaas.wire.routes import Threshold

# A quadratic fit of the paper's Table 5, and a slower kind that is solved from its Table 6.
FAST = Profile(
    state_bytes=180_400_000, token_bytes=17_143, fixed_seconds=0.3891, token_seconds=4.107e-5, squared_seconds=9.476e-11
)
SLOW = Profile(
    state_bytes=180_400_000, token_bytes=17_143, fixed_seconds=0.9, token_seconds=8.5e-5, squared_seconds=4.2e-10
)
PAPER = Workload.lognormal(9.9, 1.0, 128, 131_072)
OUTPUT_TOKENS = 1024


def linear(token_seconds: float, token_bytes: int = 1000, state_bytes: int = 0, fixed_seconds: float = 0.0) -> Profile:
    return Profile(
        state_bytes=state_bytes, token_bytes=token_bytes, fixed_seconds=fixed_seconds, token_seconds=token_seconds
    )


def threshold(tokens: int, mode: str = "Fixed") -> Policy:
    return Policy(threshold=Threshold(mode=mode, tokens=tokens, min_tokens=64, max_tokens=131_072))


def world(
    policy: Policy | None = None,
    *,
    link_mbps: float = 100_000,
    offload: int = 4,
    hub: tuple[int, int] = (3, 5),
    profiles: tuple[Profile, Profile] = (FAST, SLOW),
    **more,
) -> Scenario:
    """Return the paper's system, or one like it. `hub`: how many prefill and decode; `profiles`: far, and at home."""
    decode_rate, max_batch = 0.782, 20
    system = System(
        links=(LinkCapacity(name="member", capacity_mbps=link_mbps),) if offload else (),
        offload=(OffloadPool(name="far", profile=profiles[0], instances=offload, link="member"),) if offload else (),
        hub=(
            HubPool(
                name="home",
                profile=profiles[1],
                instances=sum(hub),
                max_batch=max_batch,
                step_seconds=max_batch / (decode_rate * OUTPUT_TOKENS),
            ),
        ),
        output_tokens=OUTPUT_TOKENS,
    )
    return Scenario(system=system, prefill_instances={"home": hub[0]}, policy=policy or threshold(19_400), **more)


def quick_decode(scenario: Scenario) -> Scenario:
    """Return the scenario with a decode that takes hardly any time, and never makes a request wait."""
    pools = tuple(msgspec.structs.replace(pool, max_batch=1_000_000, step_seconds=1e-9) for pool in scenario.system.hub)
    return msgspec.structs.replace(scenario, system=msgspec.structs.replace(scenario.system, hub=pools))


def requests(count: int, rate: float, seed: int = 1, workload: Workload = PAPER) -> Iterable[Arrival]:
    return islice(poisson(workload, OUTPUT_TOKENS, rate, random.Random(seed)), count)


def run(scenario: Scenario, arrivals: Iterable[Arrival], **tally) -> Result:
    return simulate(scenario, arrivals, Tally(**tally))
