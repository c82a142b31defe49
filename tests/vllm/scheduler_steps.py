"""Runs in vLLM's own environment: sources' requests in vLLM's own scheduler and cache manager, with our connector's
scheduler side. No model runs.

The groups are those of a hybrid model, with the blocks that drafts and checkpoints within a step need. Prints JSON: of
each mode what was wrong at a goal, and what a source finds in its own cache afterwards. With CONTROL in the environment
a source keeps one token more.
"""

import itertools
import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from prfaas_vllm.scheduling import TransferPlanner, goal_of

PAGE, BLOCKS, BUDGET = 256, 4000, 2048
CONNECTOR = {
    "kv_connector": "PrfaasConnector",
    "kv_connector_module_path": "prfaas_vllm.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
MTP = {"method": "mtp", "num_speculative_tokens": 2}


class Mode(NamedTuple):
    drafts: dict[str, Any] | None = None
    has_checkpoints: bool = False
    unit: int = PAGE
    caches_prefixes: bool = True


MODES = {
    "plain": Mode(),
    "checkpoints": Mode(has_checkpoints=True),
    "MTP": Mode(MTP),
    "MTP, checkpoints": Mode(MTP, has_checkpoints=True),
    "n-gram": Mode(NGRAM),
    "n-gram, checkpoints": Mode(NGRAM, has_checkpoints=True),
    "checkpoints, finer hits": Mode(has_checkpoints=True, unit=64),
    "MTP, checkpoints, finer hits": Mode(MTP, has_checkpoints=True, unit=64),
    "n-gram, finer hits": Mode(NGRAM, unit=64),
    "no prefix cache": Mode(caches_prefixes=False),
    "MTP, no prefix cache": Mode(MTP, caches_prefixes=False),
}


def config_of(mode: Mode) -> VllmConfig:
    config = EngineArgs(
        model=os.environ["MODEL_FOLDER"],
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=32_768,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=8,
        enable_prefix_caching=mode.caches_prefixes,
        speculative_config=mode.drafts,
        kv_transfer_config=CONNECTOR,
    ).create_engine_config()
    config.cache_config.block_size = PAGE
    config.cache_config.num_gpu_blocks = BLOCKS
    return config


def caches_of(config: VllmConfig, mode: Mode) -> KVCacheConfig:
    states = MambaSpec(
        block_size=PAGE if mode.caches_prefixes else config.model_config.max_model_len,
        shapes=((3, 64), (2, 16, 16)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
        mamba_cache_mode=config.cache_config.mamba_cache_mode,
        num_speculative_blocks=config.num_speculative_tokens,
        num_prefill_checkpoint_blocks=int(mode.has_checkpoints),
        prefill_checkpoint_alignment=16 if mode.has_checkpoints else None,
    )
    attention = FullAttentionSpec(block_size=PAGE, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)
    groups = [KVCacheGroupSpec(["layers.0"], states), KVCacheGroupSpec(["layers.1"], attention)]
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


class Instance:
    """A source without a model: all its tokens are 7."""

    def __init__(self, mode: Mode):
        config = config_of(mode)
        self.drafts = config.num_speculative_tokens
        unit = mode.unit if mode.caches_prefixes else config.model_config.max_model_len
        hash_of = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_of)
        self._hasher = get_request_block_hasher(unit, hash_of)
        block = PAGE if mode.caches_prefixes else config.model_config.max_model_len
        self.scheduler = Scheduler(
            config, caches_of(config, mode), StructuredOutputManager(config), block, hash_block_size=unit
        )
        self._numbers = itertools.count()

    def offload(self, ids: list[int], room: int = BUDGET) -> Iterator[Any]:
        """Have a source's request computed, with so much of the budget; yield what the connector was told of it."""
        request_id = str(next(self._numbers))
        leg = {"role": "source", "transfer_id": f"{int(request_id):032x}", "epoch": 1, "token": "t"}
        sampling = SamplingParams(max_tokens=9, extra_args={"kv_transfer_params": {"prfaas": leg}})
        sampling.update_from_generation_config({}, eos_token_id=0)
        request = Request(request_id, ids, sampling, None, block_hasher=self._hasher)
        self.scheduler.max_num_scheduled_tokens = room
        self.scheduler.add_request(request)
        while not request.is_finished():
            output = self.scheduler.schedule()
            yield from output.kv_connector_metadata.plan.steps
            self._end(output, request)
        sent = KVConnectorOutput(finished_sending={request_id})
        output = self.scheduler.schedule()
        self.scheduler.update_from_output(output, ModelRunnerOutput([], {}, kv_connector_output=sent))

    def _end(self, output: Any, request: Request) -> None:
        assert output.num_scheduled_tokens, "the request gets no step"
        whole = request.num_computed_tokens >= request.num_tokens
        tokens = [[7]] if whole else [[]]
        self.scheduler.update_from_output(
            output, ModelRunnerOutput([request.request_id], {request.request_id: 0}, tokens)
        )


def wrong_at_goal(steps: list[Any], goal: int, instance: Instance, mode: Mode) -> str:
    """Return what is wrong with the last of a source's steps."""
    if not steps or steps[-1].computed != goal:
        return f"ends at {steps[-1].computed if steps else 0} instead of {goal}"
    page = PAGE if mode.caches_prefixes else 32_768
    blocks, column = steps[-1].block_ids[0], -(-goal // page) - 1
    if not blocks[column]:
        return f"no block of the state at {goal}"
    # The workers have it in the first of the columns that they write.
    if len(blocks) - 1 - instance.drafts != column:
        return f"the state at {goal} is written to another block of {blocks}"
    return ""


def report(mode: Mode) -> dict[str, Any]:
    instance = Instance(mode)
    wrong, hits, tried = [], [], 0
    lengths = {pages * PAGE + more for pages in (1, 2, 3, 4, 5, 9, 40) for more in (-1, 0, 1, 2, 3, 66, 130)}
    for number, length in enumerate(sorted(lengths)):
        goal = goal_of(length, PAGE)
        for room in (BUDGET, 300):
            ids = [100 + number, room, *[7] * (length - 2)]
            for _ in range(3):  # The second and the third find the first in the source's own cache.
                steps = list(instance.offload(list(ids), room))
                tried += 1
                if reason := wrong_at_goal(steps, goal, instance, mode):
                    wrong.append(f"{length} tokens in steps of {room}: {reason}")
            hits.append([goal, steps[0].before if steps else 0])
            longer = list(instance.offload([*ids[:goal], *[8] * 2 * PAGE], room))
            hits[-1].append(longer[0].before if longer else 0)
    return {"tried": tried, "wrong": wrong, "hits": hits}


def main() -> None:
    if "CONTROL" in os.environ:
        add = TransferPlanner.add
        TransferPlanner.add = lambda self, request: max(0, add(self, request) - 1)
    print(json.dumps({name: report(mode) for name, mode in MODES.items()}))


if __name__ == "__main__":
    main()
