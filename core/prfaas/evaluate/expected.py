"""What the plan and the simulator expect of a run: the figures that a measurement stands beside.

The plan takes waits from equations (`prfaas.capacity.ttft`). The simulator serves the run's own requests one by one in
virtual time, and is summed up as a live run is: what differs is then neither luck nor the way of counting.
"""

from collections.abc import Callable
from itertools import pairwise

import msgspec

from prfaas.capacity import equations, ttft
from prfaas.capacity.planfile import PlanFile
from prfaas.capacity.workload import Randomness
from prfaas.evaluate.case import Case, arrivals_of, rate_per_second, scenario_of
from prfaas.evaluate.record import AnsweredRequest, MachineTiming, Reading, Run, RunKey
from prfaas.simulate import setup as setups
from prfaas.simulate.outcome import Outcome, Tally
from prfaas.simulate.request import Request
from prfaas.simulate.run import simulate
from prfaas.simulate.scenario import PolicyName
from prfaas.wire.trace import UNKNOWN


class PlanFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan says of one policy at one rate."""

    ttft_mean_seconds: float
    ttft_p90_seconds: float
    ttft_p99_seconds: float
    requests_per_second: float
    offloaded_share: float
    egress_gbps: float
    link_percent: float
    """See `link_percent`."""


def plan_figures(file: PlanFile, policy: PolicyName, arrivals_per_second: float) -> PlanFigures | None:
    """Return what the plan says; None where it does not carry this rate."""
    system, plan = setups.planned(file, policy)
    if arrivals_per_second >= plan.lambda_max:
        return None
    first = ttft.queued(system, file.workload, plan, arrivals_per_second)
    above = file.workload.above(ttft.threshold(file.workload, plan))
    egress_mbps = equations.egress_mbps(equations.offload_shares(system, above), above, arrivals_per_second)
    egress = sum(egress_mbps.values())
    return PlanFigures(
        ttft_mean_seconds=first.mean_seconds,
        ttft_p90_seconds=first.p90_seconds,
        ttft_p99_seconds=first.p99_seconds,
        requests_per_second=arrivals_per_second,
        offloaded_share=plan.offloaded_fraction,
        egress_gbps=egress / 1000,
        link_percent=link_percent(egress, sum(link.capacity_mbps for link in system.links)),
    )


def link_percent(egress_mbps: float, capacity_mbps: float) -> float:
    """Return how much of the links is used: the bits that crossed, of what the case declares that they carry.

    Plan, simulation and measurement are compared by it. What the scheduler calls utilisation is another thing: of the
    capacity that it believes in, and the time in which data waited.
    """
    return 100 * egress_mbps / capacity_mbps if capacity_mbps > 0 else 0.0


def simulated_run(case: Case, key: RunKey, new_rng: Callable[[str], Randomness]) -> Run:
    """Return the record that the run would have, were it simulated: of the same requests.

    Of the parts of a first token it has the prefill and what waits for it.
    """
    scenario, tally = scenario_of(case, key), _Answers()
    result = simulate(scenario, arrivals_of(case, key, new_rng), tally)
    return Run(
        key=key,
        case=case.digest,
        rate_per_second=rate_per_second(case, key),
        instances={},
        stretch=1.0,
        cache_scale=1,
        link_mbps=0,
        answers=tuple(sorted(tally.answers, key=lambda one: one.at_seconds)),
        readings=tuple(
            Reading(
                at_seconds=now.at_seconds,
                threshold_tokens=now.threshold_tokens,
                link_mbps=sum(link.capacity_mbps for link in scenario.system.links),
                egress_mbps=(now.sent_bytes - before.sent_bytes) * 8e-6 / (now.at_seconds - before.at_seconds),
                hub_prefills=now.hub_prefills,
                offload_instances=now.offload_instances,
            )
            for before, now in pairwise(result.timeline)
        ),
        machine=MachineTiming(mean_late=0.0, p99_late=0.0, busy_share=0.0),
        began_at="",
        software="simulator",
    )


class _Answers(Tally):
    """Keeps each request beside the sums."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[AnsweredRequest] = []

    def end(self, request: Request, outcome: Outcome, now_seconds: float) -> None:
        super().end(request, outcome, now_seconds)
        at_seconds, first = request.arrival.at_seconds, request.first_token_seconds
        is_served = outcome == "completed" and first is not None
        route = request.route or request.began
        self.answers.append(
            AnsweredRequest(
                at_seconds=at_seconds,
                prompt_tokens=request.arrival.input_tokens,
                ttft_seconds=first - at_seconds if is_served and first is not None else None,
                seconds=now_seconds - at_seconds if is_served else None,
                offloaded=route is not None and route.kind == "offload",
                fallback=request.attempts > 1,
                parts=_parts(request),
                lost=None if is_served else "refused",
                error="" if is_served else outcome,
            )
        )


def _parts(request: Request) -> dict[str, float]:
    """Return the parts that are known; {} for a request that was resumed, whose prefill came after its first token."""
    first, ended = request.first_token_seconds, request.prefill_ended_seconds
    if first is None or ended is None or ended > first:
        return {}
    waited = ended - request.prefill_seconds - request.arrival.at_seconds
    return {"prefill_queue": waited, "prefill": request.prefill_seconds, UNKNOWN: first - ended}
