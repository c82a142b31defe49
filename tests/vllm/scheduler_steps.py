"""Runs in vLLM's own environment: sources' requests in vLLM's own scheduler and cache manager, with our connector's
scheduler side. No model runs.

The groups are those that vLLM makes of a hybrid model's layers, and of a draft's, with the blocks that drafts and
checkpoints within a step need. Each prompt comes twice, so the second finds the first in the source's own cache. Prints
JSON: of each mode what was wrong at a goal, and what a source finds of a prompt that comes again, or goes on. The
controls keep a token more.
"""

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MambaSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from prfaas_vllm.scheduling import SourceStep, TransferPlanner, goal_of

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups
except ImportError:  # vLLM 0.32
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

PAGE, BLOCKS, BUDGET = 256, 4000, 2048
CONNECTOR = {
    "kv_connector": "PrfaasConnector",
    "kv_connector_module_path": "prfaas_vllm.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
DRAFTS: dict[str, dict[str, Any] | None] = {
    "": None,
    "n-gram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
    "MTP": {"method": "mtp", "num_speculative_tokens": 2},
}


class Mode(NamedTuple):
    drafts: str = ""
    has_checkpoints: bool = False
    unit: int = PAGE
    caches_prefixes: bool = True
    draft_heads: int = 2  # As many as the model's, or fewer: then the draft's blocks have more tokens.


MODES = {
    "plain": Mode(),
    "checkpoints": Mode(has_checkpoints=True),
    "MTP": Mode("MTP"),
    "MTP, checkpoints": Mode("MTP", has_checkpoints=True),
    "n-gram, checkpoints": Mode("n-gram", has_checkpoints=True),
    "MTP, checkpoints, finer hits": Mode("MTP", has_checkpoints=True, unit=64),
    "n-gram, finer hits": Mode("n-gram", unit=64),
    "MTP, no prefix cache": Mode("MTP", caches_prefixes=False),
    "a draft of larger blocks": Mode("MTP", draft_heads=1),
}
CONTROLS = ("plain", "checkpoints", "MTP", "MTP, checkpoints")
LENGTHS = [pages * PAGE + more for pages in (1, 3, 4, 5, 20) for more in (-1, 0, 1, 2, 66)]


class Offload(NamedTuple):
    """What vLLM did with a source's request: the ends of its steps, from what it had cached on, what the connector
    noted of them, and whether vLLM keeps the last noted state when the request is over."""

    ends: list[int]
    steps: list[SourceStep]
    keeps_state: bool = True


@cache  # A second each.
def config_of(drafts: str, *, caches_prefixes: bool) -> VllmConfig:
    config = EngineArgs(
        model=os.environ["MODEL_FOLDER"],
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=32_768,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=8,
        enable_prefix_caching=caches_prefixes,
        speculative_config=DRAFTS[drafts],
        kv_transfer_config=CONNECTOR,
    ).create_engine_config()
    config.cache_config.block_size = PAGE
    config.cache_config.num_gpu_blocks = BLOCKS
    config.cache_config.kv_cache_layout = "LBNHC"  # Each layer's blocks by themselves.
    return config


def caches_of(config: VllmConfig, mode: Mode, state_block: int) -> KVCacheConfig:
    attention = FullAttentionSpec(block_size=PAGE, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)
    states = MambaSpec(
        block_size=state_block,
        shapes=((3 + config.num_speculative_tokens, 64), (2, 16, 16)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=attention.page_size_bytes,
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
        mamba_cache_mode=config.cache_config.mamba_cache_mode,
        num_speculative_blocks=config.num_speculative_tokens,
        num_prefill_checkpoint_blocks=int(mode.has_checkpoints),
        prefill_checkpoint_alignment=16 if mode.has_checkpoints else None,
    )
    layers = {f"model.layers.{number}": attention if number == 3 else states for number in range(4)}
    if mode.drafts == "MTP":
        layers["mtp.layers.0"] = replace(attention, num_kv_heads=mode.draft_heads)
    groups = get_kv_cache_groups(config, layers)
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


class Instance:
    """An instance without a model."""

    def __init__(self, mode: Mode):
        config = config_of(mode.drafts, caches_prefixes=mode.caches_prefixes)
        config.cache_config.prefix_match_unit = mode.unit if mode.unit < PAGE else None
        self.drafts = config.num_speculative_tokens
        self.block = PAGE if mode.caches_prefixes else config.model_config.max_model_len
        caches, manager = caches_of(config, mode, self.block), StructuredOutputManager(config)
        self.groups = caches.kv_cache_groups
        self.states = [n for n, group in enumerate(self.groups) if isinstance(group.kv_cache_spec, MambaSpec)]
        block, unit = resolve_kv_cache_block_sizes(caches, config)
        hash_of = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_of)
        self._hasher = get_request_block_hasher(unit, hash_of)
        self.scheduler = Scheduler(config, caches, manager, block, hash_block_size=unit)
        self._numbers = itertools.count()

    def add(self, role: str, ids: list[int], room: int) -> Request:
        """Add a leg's request, which has so much of the budget in each step."""
        number = next(self._numbers)
        leg = {"role": role, "transfer_id": f"{number:032x}", "epoch": 1, "token": "t"}
        sampling = SamplingParams(max_tokens=9, extra_args={"kv_transfer_params": {"prfaas": leg}})
        request = Request(str(number), ids, sampling, None, block_hasher=self._hasher)
        self.scheduler.max_num_scheduled_tokens = room
        self.scheduler.add_request(request)
        return request

    def offload(self, ids: list[int], room: int) -> Offload:
        """Have a source's request computed, with so much of the budget in each step."""
        request, found = self.add("source", ids, room), Offload([], [])
        while not request.is_finished():
            output = self.scheduler.schedule()
            found.steps.extend(output.kv_connector_metadata.plan.steps)
            tokens = output.num_scheduled_tokens[request.request_id]
            tokens -= len(output.scheduled_spec_decode_tokens.get(request.request_id, ()))
            before = found.ends[-1] if found.ends else output.scheduled_new_reqs[0].num_computed_tokens
            found.ends.extend([before, before + tokens][bool(found.ends) :])
            self.end(output, request.request_id, [7] if before + tokens >= request.num_prompt_tokens else [])
        keeps_state = not found.steps or self._keeps_state(found.steps[-1])
        # Its blocks stay until the worker's side reports it, unless that side never heard of it.
        sent = KVConnectorOutput(finished_sending={request.request_id} & self.scheduler.requests.keys())
        output = self.scheduler.schedule()
        self.scheduler.update_from_output(output, ModelRunnerOutput([], {}, kv_connector_output=sent))
        return found._replace(keeps_state=keeps_state)

    def _keeps_state(self, step: SourceStep) -> bool:
        column, blocks = -(-step.computed // self.block) - 1, self.scheduler.kv_cache_manager.block_pool.blocks
        return all(blocks[step.block_ids[group][column]].ref_cnt > 0 for group in self.states)

    def end(self, output: SchedulerOutput, request_id: str, sampled: list[int]) -> None:
        self.scheduler.update_from_output(output, ModelRunnerOutput([request_id], {request_id: 0}, [sampled]))


def wrong_at_goal(found: Offload, goal: int, instance: Instance) -> str:
    """Return what is wrong with the last of a source's steps."""
    if found.ends[-1] != goal or not found.steps or found.steps[-1].computed != goal:
        return f"steps end at {found.ends}, the goal is {goal}"
    column = -(-goal // instance.block) - 1
    for blocks in (found.steps[-1].block_ids[group] for group in instance.states):
        if not blocks[column]:
            return f"no block of the state at {goal}"
        # vLLM's workers write it to the first of the columns behind which drafts have theirs.
        if len(blocks) - 1 - instance.drafts != column:
            return f"the state at {goal} is written to another block of {blocks}"
    return ""


def report(mode: Mode) -> dict[str, Any]:
    instance = Instance(mode)
    wrong: list[str] = []
    missed: list[int] = []
    freed: list[int] = []
    hits: list[list[int]] = []
    for number, (length, room) in enumerate(itertools.product(LENGTHS, (BUDGET, 300))):
        goal, ids = goal_of(length, PAGE), [100 + number, *[7] * (length - 1)]
        twice = [instance.offload(list(ids), room) for _ in range(2)]
        wrong += [f"{length} tokens: {reason}" for one in twice if (reason := wrong_at_goal(one, goal, instance))]
        missed += [length for one in twice if goal not in one.ends]
        freed += [length for one in twice if one.steps and one.steps[-1].computed == goal and not one.keeps_state]
        longer = instance.offload([*ids[:goal], *[8] * 2 * PAGE], room)
        hits.append([goal, twice[1].ends[0], longer.ends[0]])
    return {"tried": 2 * len(hits), "wrong": wrong, "missed": len(missed), "freed": len(freed), "hits": hits}


def one_token_more(add: Callable[[TransferPlanner, Request], int]) -> Callable[[TransferPlanner, Request], int]:
    """Have a source keep a token behind the goal, where its prompt has one to spare."""

    def added(planner: TransferPlanner, request: Request) -> int:
        dropped = add(planner, request)
        return dropped and max(1, dropped - 1)

    return added


def main() -> None:
    found = {name: report(mode) for name, mode in MODES.items()}
    TransferPlanner.add = one_token_more(TransferPlanner.add)
    found |= {f"control: {name}": report(MODES[name]) for name in CONTROLS}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
