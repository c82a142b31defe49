"""Runs in vLLM's own environment: vLLM's own scheduler with two batches in flight, and our connector's scheduler side.

A batch is scheduled before it is known what the one before has brought, as vLLM's EngineCore does it where scheduling
is asynchronous: on GPUs. No model runs. Prints JSON: what was seen of sources whose prompts end, which are aborted or
preempted in between, and of destinations. The controls are what the connector changes of a request, and vLLM's other
role.
"""

import copy
import json
from collections import deque
from itertools import pairwise
from typing import Any

import runner_calls
from scheduler_steps import BUDGET, LENGTHS, MODES, PAGE, Mode, caches_of, config_of
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from prfaas_vllm import connector
from prfaas_vllm.connector import PrfaasConnector
from prfaas_vllm.scheduling import SourceStep, StepPlan, goal_of

IN_FLIGHT = 2
LONG = 5 * PAGE + 66
TRIED = ("plain", "checkpoints", "MTP, checkpoints", "n-gram, checkpoints", "n-gram, finer hits")


class InFlight:
    """An instance without a model: what it schedules, and what it hears of the oldest batch in flight."""

    def __init__(self, mode: Mode, role: str = "kv_both"):
        config = copy.copy(config_of(mode.drafts, caches_prefixes=mode.caches_prefixes))
        config.scheduler_config = copy.copy(config.scheduler_config)
        config.scheduler_config.async_scheduling = True
        config.kv_transfer_config = copy.copy(config.kv_transfer_config)
        config.kv_transfer_config.kv_role = role
        assert config.max_concurrent_batches == IN_FLIGHT
        hash_of = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_of)
        self._hasher = get_request_block_hasher(mode.unit, hash_of)
        caches, manager = caches_of(config, mode, PAGE), StructuredOutputManager(config)
        self.scheduler = AsyncScheduler(config, caches, manager, PAGE, hash_block_size=mode.unit)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self._batches: deque[tuple[SchedulerOutput, dict[str, bool]]] = deque()

    def add(self, name: str, ids: list[int], role: str = "", max_tokens: int = 50) -> Request:
        leg = {"role": role, "transfer_id": f"{len(name):02x}{name.encode().hex():0>30}", "epoch": 1, "token": "t"}
        extra = {"kv_transfer_params": {"prfaas": leg}} if role else None
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        request = Request(name, list(ids), sampling, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request

    @property
    def in_flight(self) -> int:
        return len(self._batches)

    def schedule(self, room: int = BUDGET) -> SchedulerOutput:
        """Schedule a batch while others are in flight."""
        assert self.in_flight < IN_FLIGHT
        self.scheduler.max_num_scheduled_tokens = room
        output = self.scheduler.schedule()
        requests = [self.scheduler.requests[name] for name in output.num_scheduled_tokens]
        has_token = {one.request_id: not one.is_prefill_chunk for one in requests}
        self._batches.append((output, has_token))
        return output

    def hear(self, **transfers: set[str]) -> None:
        """Hear of the oldest batch: one token of each prompt that ended there, and of transfers."""
        output, has_token = self._batches.popleft()
        tokens = [[7] if found else [] for found in has_token.values()]
        numbers = {name: at for at, name in enumerate(has_token)}
        found = ModelRunnerOutput(list(has_token), numbers, tokens, kv_connector_output=KVConnectorOutput(**transfers))
        self.scheduler.update_from_output(output, found)

    def hear_all(self) -> None:
        while self._batches:
            self.hear()

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def run(self, name: str, room: int = BUDGET) -> list[StepPlan]:
        """Run until a request is over, always with two batches in flight; return what workers were told."""
        plans: list[StepPlan] = []
        request = self.scheduler.requests[name]
        while not request.is_finished():
            plans.append(plan_of(self.schedule(room)))
            if self.in_flight == IN_FLIGHT:
                self.hear()
        self.hear_all()
        return plans

    def forget(self, name: str) -> StepPlan:
        """Have the workers report a request as sent; return what they were told before."""
        plan = plan_of(self.schedule())
        self.hear(finished_sending={name} & self.scheduler.requests.keys())
        return plan

    def blocks(self, name: str) -> set[int]:
        groups = self.scheduler.kv_cache_manager.get_blocks(name).get_block_ids()
        return {block for group in groups for block in group if block}

    def holds(self, blocks: set[int]) -> bool:
        """Whether none of them is free."""
        return all(self.pool.blocks[block].ref_cnt for block in blocks)

    def free(self) -> int:
        return self.pool.get_num_free_blocks()

    def fill(self) -> None:
        """Leave no block free."""
        self.pool.get_new_blocks(self.free())


def plan_of(output: SchedulerOutput) -> StepPlan:
    return output.kv_connector_metadata.plan


def steps_of(plans: list[StepPlan]) -> list[SourceStep]:
    return [step for plan in plans for step in plan.steps]


def sources(mode: Mode) -> dict[str, Any]:
    """What a source does with prompts of all lengths, each of which comes twice."""
    instance, wrong = InFlight(mode), list[str]()
    withdrawn = lost = 0
    for number, (length, room) in enumerate((length, room) for length in LENGTHS for room in (BUDGET, 300)):
        goal = goal_of(length, PAGE)
        for again in range(2):
            name = f"{number}-{again}"
            instance.add(name, [100 + number, *[7] * (length - 1)], "source", max_tokens=3)
            plans = instance.run(name, room)
            steps = steps_of(plans)
            withdrawn += any(name in plan.revoked for plan in plans)
            gaps = [(one.computed, after.before) for one, after in pairwise(steps) if one.computed != after.before]
            if gaps or steps[-1].computed != goal:
                wrong.append(f"{length} tokens: {[(step.before, step.computed) for step in steps]}, the goal is {goal}")
            lost += not instance.holds({state_of(steps[-1])})
            instance.forget(name)
    return {"wrong": wrong, "withdrawn": withdrawn, "lost": lost, "tried": 2 * len(LENGTHS) * 2}


def state_of(step: SourceStep) -> int:
    """The block of the state at a step's end."""
    return step.block_ids[0][-(-step.computed // PAGE) - 1]


def aborted(heard: int) -> dict[str, Any]:
    """What comes of a source that is aborted while two batches of it are in flight: of five, so many were heard of."""
    instance = InFlight(MODES["plain"])
    free = instance.free()
    instance.add("s", list(range(LONG)), "source")
    plans = [plan_of(instance.schedule(300))]
    for _ in range(heard):
        plans.append(plan_of(instance.schedule(300)))
        instance.hear()
    plans.append(plan_of(instance.schedule(300)))
    last = steps_of(plans)[-1]
    instance.abort("s")
    instance.hear_all()
    is_held = instance.holds({state_of(last), *last.block_ids[-1]})
    told = instance.forget("s")
    instance.hear_all()
    return {
        "computed": last.computed,
        "revoked": list(told.revoked),
        "steps": len(told.steps),
        "held": is_held,
        "freed": instance.free() == free,
    }


def preempted(role: str, *, in_flight: bool) -> dict[str, Any]:
    """What comes of a source when memory is short for an older request. Its last step is in flight, or only its first
    is scheduled, and nothing is in flight any more."""
    instance = InFlight(MODES["plain"], role)
    ends = len(steps_of(measured(LONG)))
    steps = ends if in_flight else 1
    older = instance.add("older", [1] * (PAGE - steps))  # It needs its next block when these are scheduled.
    instance.schedule()
    source = instance.add("s", list(range(LONG)), "source")
    plans = list[StepPlan]()
    for _ in range(steps):
        if instance.in_flight == IN_FLIGHT:
            instance.hear()
        plans.append(plan_of(instance.schedule()))
    while instance.in_flight > in_flight:
        instance.hear()
    assert older.num_computed_tokens == PAGE, older.num_computed_tokens
    last = steps_of(plans)[-1]
    instance.fill()
    output = instance.schedule()
    found = {
        "computed": last.computed,
        "preempted": "s" in (output.preempted_req_ids or ()),
        "revoked": list(plan_of(output).revoked),
        "older goes on": "older" in output.num_scheduled_tokens,
        "held": state_of(last) in instance.blocks("s"),
    }
    instance.hear_all()
    return found | {"finished": source.is_finished()}


def measured(length: int) -> list[StepPlan]:
    """How a source is told of a prompt that nothing disturbs."""
    instance = InFlight(MODES["plain"])
    instance.add("s", list(range(length)), "source")
    return instance.run("s")


def landing(role: str) -> dict[str, Any]:
    """Whether a cache may land in blocks of an aborted request while a batch in flight still writes them."""
    instance = InFlight(MODES["plain"], role)
    instance.add("older", [1] * LONG)
    while instance.schedule().num_scheduled_tokens["older"] > 1:  # until it decodes
        instance.hear()
    written = instance.blocks("older")
    instance.fill()
    instance.abort("older")
    instance.add("d", list(range(2 * PAGE)), "destination")
    fetches = plan_of(instance.schedule()).fetches
    early = written & instance.blocks("d") if fetches else set()
    instance.hear_all()
    later = plan_of(instance.schedule()).fetches
    return {"early": bool(early), "later": bool(later)}


def fetched(*, is_aborted: bool) -> dict[str, Any]:
    """What comes of a destination whose cache comes while batches are in flight, or which is aborted meanwhile."""
    instance = InFlight(MODES["plain"])
    free, ids = instance.free(), list(range(LONG))
    request = instance.add("d", ids, "destination")
    first = plan_of(instance.schedule())
    held = instance.blocks("d")
    second = plan_of(instance.schedule())
    instance.hear()
    if is_aborted:
        instance.abort("d")
    is_held = instance.holds(held)
    instance.hear(finished_recving={"d"})
    output = instance.schedule()
    plan = plan_of(output)
    return {
        "fetched": [[each.start, each.goal] for each in (*first.fetches, *second.fetches)],
        "held": is_held,
        "completed": [each.request_id for each in plan.fetched],
        "computed": dict(output.num_scheduled_tokens),
        "goal": goal_of(len(ids), PAGE),
        "freed": instance.free() == free,
        "finished": request.is_finished(),
    }


def main() -> None:
    found: dict[str, Any] = {"runners": runner_calls.between_runners()}
    found |= {f"data-parallel, {is_moe=}": runner_calls.data_parallel(is_moe=is_moe) for is_moe in (False, True)}
    found |= {f"sources: {name}": sources(MODES[name]) for name in TRIED}
    found |= {f"aborted after {heard}": aborted(heard) for heard in range(5)}
    found["preempted in flight"] = preempted("kv_both", in_flight=True)
    found["preempted"] = preempted("kv_both", in_flight=False)
    found["landing"] = landing("kv_both")
    found["fetched"] = fetched(is_aborted=False)
    found["fetch aborted"] = fetched(is_aborted=True)
    connector.require_role = lambda _role: None
    found["control: preempted in flight"] = preempted("kv_producer", in_flight=True)
    found["control: landing"] = landing("kv_producer")
    add = PrfaasConnector.on_new_request

    def keep_max_tokens(self: PrfaasConnector, request: Request) -> None:
        wanted = request.max_tokens
        add(self, request)
        request.max_tokens = wanted

    PrfaasConnector.on_new_request = keep_max_tokens
    found["control: sources"] = sources(MODES["plain"])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
