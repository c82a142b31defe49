"""Runs in vLLM's own environment: workers' connectors, called as vLLM's model runners do it, and numbered as its ranks.

The calls are made by vLLM's own classes: the mixin of its first runner, and Model Runner V2's `ActiveKVConnector`. The
model is a function that writes random bytes into the source's blocks, and a draft model's one that does so later.
"""

import copy
import time
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from kda_caches import DESTINATION_BLOCKS, GOAL, LAYERS, PAGE_TOKENS, SOURCE_BLOCKS, caches_of, config
from scheduler_steps import config_of
from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.engine import core
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from prfaas.ports import free_ports
from prfaas.wire.prefill import LegParams
from prfaas_transfer.mover.messages import MoverOptions
from prfaas_vllm import connector as connector_module
from prfaas_vllm.connector import PrfaasConnector, PrfaasMetadata
from prfaas_vllm.scheduling import Fetching, SourceStart, SourceStep, StepPlan

HOOKS = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)
SECONDS = 30
Kernels = Callable[[], None]


class Worker:
    """A connector of one rank with random caches; `calls` are those of its last step."""

    def __init__(self, found: VllmConfig, rank: int = 0):
        self.config = found
        self.calls: list[str] = []
        connector_module.get_tensor_model_parallel_rank = lambda: rank
        caches = config()
        self.connector = PrfaasConnector(found, KVConnectorRole.WORKER, caches)
        self.caches = caches_of(caches)
        for name in HOOKS:
            setattr(self.connector, name, self._noted(name, getattr(self.connector, name)))
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector

    def register(self) -> "Worker":
        self.connector.register_kv_caches(self.caches)
        return self

    def step(self, output: SimpleNamespace, kernels: Kernels, drafts: Kernels | None) -> KVConnectorOutput:
        """As GPUModelRunner.execute_model and sample_tokens of the first runner."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        self.connector.handle_preemptions(output.kv_connector_metadata)
        mixin = KVConnectorModelRunnerMixin
        with (
            set_forward_context(None, self.config),
            mixin.maybe_get_kv_connector_output(output, defer_finalize=drafts is not None) as found,
        ):
            kernels()
        if drafts is not None:
            drafts()
            mixin.finalize_kv_connector()
        return found

    def bytes_of(self, kind: str, block: int) -> list[bytes]:
        group = self.connector._transfers.rank.groups[list(LAYERS).index(kind)]
        return [bytes(part[block].numpy()) for layer in LAYERS[kind] for part in group.tensors[layer]]

    def write(self) -> None:
        """Write all blocks, as kernels do."""
        for group in self.connector._transfers.rank.groups:
            for tensors in group.tensors.values():
                for tensor in tensors:
                    tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8))

    def _noted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **more: Any) -> Any:
            self.calls.append(name)
            return call(*arguments, **more)

        return noted


class WorkerOfV2(Worker):
    """The same under Model Runner V2."""

    def register(self) -> "WorkerOfV2":
        self.runner = ActiveKVConnector(self.config, self.caches)
        return self

    def step(self, output: SimpleNamespace, kernels: Kernels, drafts: Kernels | None) -> KVConnectorOutput:
        batch = SimpleNamespace(idx_mapping=torch.zeros(1), req_ids=["s"], num_tokens=1)
        self.runner.pre_forward(output, batch)
        kernels()
        self.runner.finish_forward()
        if drafts is None or not hasattr(self.runner, "finalize_step"):  # 0.32 runs the drafts first
            if drafts is not None:
                drafts()
            return self.runner.post_forward(output.finished_req_ids)
        found = self.runner.post_forward(output.finished_req_ids, defer_finalize=True)
        drafts()
        self.runner.finalize_step()
        return found


def config_with(**settings: Any) -> VllmConfig:
    """A configuration with a port of its own."""
    found = copy.copy(config_of("", caches_prefixes=True))
    found.kv_transfer_config = copy.copy(found.kv_transfer_config)
    found.kv_transfer_config.kv_port = free_ports(1)[0]
    found.kv_transfer_config.kv_connector_extra_config = settings
    return found


def step(
    worker: Worker, plan: StepPlan, over: str = "", kernels: Kernels | None = None, *, drafts: bool = False
) -> Any:
    worker.calls.clear()
    output = SimpleNamespace(
        kv_connector_metadata=PrfaasMetadata(plan), has_sync_kv_loads=False, finished_req_ids={over} - {""}
    )
    return worker.step(output, kernels or (lambda: None), worker.write if drafts else None)


def crossing(source: Worker, destination: Worker, *, drafts: bool) -> dict[str, Any]:
    """What comes from one worker to another, and what was called in the source's last step."""
    leg = {"transfer_id": f"{drafts:032x}", "epoch": 7, "token": "secret", "host": "127.0.0.1"}
    to = LegParams(role="destination", port=source.config.kv_transfer_config.kv_port, **leg)
    fetching = Fetching("d", to, PAGE_TOKENS, GOAL, tuple(DESTINATION_BLOCKS.values()))
    step(destination, StepPlan(fetches=[fetching]))
    blocks = tuple(SOURCE_BLOCKS.values())
    starts = [SourceStart("s", LegParams(role="source", **leg), GOAL)]
    step(source, StepPlan(starts=starts), kernels=lambda: None)
    last = StepPlan(steps=[SourceStep("s", 0, GOAL, blocks)])
    step(source, last, kernels=source.write, drafts=drafts)
    calls = list(source.calls)
    received, sent = set[str](), set[str]()
    deadline, over = time.monotonic() + SECONDS, "s"
    while not (received and sent) and time.monotonic() < deadline:
        time.sleep(0.001)  # as vLLM does where it has nothing to compute
        received |= step(destination, StepPlan()).finished_recving or set()
        sent |= step(source, StepPlan(), over).finished_sending or set()
        over = ""
    pages = list(zip(SOURCE_BLOCKS["mla"], DESTINATION_BLOCKS["mla"], strict=True))[1:]
    same = [source.bytes_of("mla", here) == destination.bytes_of("mla", there) for here, there in pages]
    same.append(source.bytes_of("kda", SOURCE_BLOCKS["kda"][-1]) == destination.bytes_of("kda", 9))
    return {"received": list(received), "sent": list(sent), "same": all(same), "calls": calls}


def between_runners() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for source, destination in ((Worker, WorkerOfV2), (WorkerOfV2, Worker)):
        pair = [kind(config_with()).register() for kind in (source, destination)]
        for drafts in (False, True):
            name = f"{'V2' if source is WorkerOfV2 else 'V1'}{' with drafts' * drafts}"
            found[name] = crossing(*pair, drafts=drafts)
        for worker in pair:
            worker.connector.shutdown()
    return found


class Started(SystemExit):
    """vLLM would start an engine now."""


class Engine:
    def __init__(self, *_arguments: Any, **_more: Any):
        raise Started


def data_parallel(*, is_moe: bool) -> dict[str, Any]:
    """What the connector makes of two data-parallel ranks of two tensor-parallel ones each, as vLLM starts them.

    Of each rank: the number of its mover, of how many, how far its port is from the first one's, and its place in its
    instance.
    """
    made: list[MoverOptions] = []
    ranks, run = [(index, rank) for index in range(2) for rank in range(2)], core.EngineCoreProc.run_engine_core
    with (
        patch.object(ModelConfig, "is_moe", is_moe),
        patch.multiple(core, EngineCoreProc=Engine, DPEngineCoreProc=Engine, decorate_logs=lambda: None),
        patch.object(connector_module, "RankTransfers", lambda _groups, options, _all_ranks: made.append(options)),
    ):
        for index, rank in ranks:
            found = config_with(movers=4)
            found.kv_transfer_config.kv_port = 8001
            found.parallel_config = ParallelConfig(
                tensor_parallel_size=2, data_parallel_size=2, distributed_executor_backend="mp"
            )
            with suppress(Started):
                run(vllm_config=found, dp_rank=index, local_dp_rank=index)
            Worker(found, rank).register()
    return {
        "ranks": [[one.mover, one.movers, one.data_port - 8001, one.rank, one.ranks] for one in made],
        "models": len({one.fingerprint for one in made}),
    }
