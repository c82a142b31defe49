"""PrfaasConnector: vLLM's interface for KV connectors, passed on to scheduling.py and transfers.py.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "PrfaasConnector", "kv_role": "kv_both", "kv_port": 8001,
    "kv_connector_module_path": "prfaas_vllm.connector", "kv_load_failure_policy": "recompute"}'
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tp_group
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from prfaas_transfer.mover.messages import MoverOptions
from prfaas_vllm.capabilities import untested
from prfaas_vllm.device import device_kind
from prfaas_vllm.events import events_path, publish_by_mover
from prfaas_vllm.fingerprint import DraftLayers, fingerprint_of
from prfaas_vllm.layout import groups_of, slot_bytes
from prfaas_vllm.ranks import RankOf, copies_of
from prfaas_vllm.scheduling import NOTHING, StepPlan, TransferPlanner
from prfaas_vllm.settings import (
    data_port,
    read_settings,
    refusals_in_status,
    require_parallelism,
    require_role,
    require_states,
    require_transfer_memory,
)
from prfaas_vllm.transfers import RankTransfers

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput

log = logging.getLogger("vllm.prfaas")

WHOLE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass
class PrfaasMetadata(KVConnectorMetadata):
    """One step's plan, from the scheduler's side to each worker's."""

    plan: StepPlan = field(default_factory=StepPlan)


@dataclass
class PrfaasWorkerMetadata(KVConnectorWorkerMetadata):
    """The requests whose fetch has failed at a rank, to the scheduler's side, which tells the other ranks."""

    failed: set[str]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, PrfaasWorkerMetadata)  # noqa: S101  # each rank made its own
        return PrfaasWorkerMetadata(self.failed | other.failed)


class PrfaasConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM makes one in its scheduler and one in each worker."""

    @refusals_in_status()
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        require_parallelism(vllm_config.parallel_config)
        require_role(self._kv_transfer_config.kv_role)
        require_states(use_replayssm=vllm_config.cache_config.use_replayssm)
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            log.warning(
                "prfaas: kv_load_failure_policy is %s: a cache that does not come fails its request; set recompute",
                self._kv_transfer_config.kv_load_failure_policy,
            )
        if role is KVConnectorRole.SCHEDULER:
            if words := untested(vllm.__version__):
                log.warning("prfaas: %s", words)
            publish_by_mover(vllm_config)
        # Of attention: a state's block is another one on a side that caches no prefixes, and both must agree on goals.
        self._planner = TransferPlanner(vllm_config.cache_config.block_size)
        self._requests: dict[str, Request] = {}  # Sources, by id.
        self._transfers: RankTransfers | None = None
        self._plan = NOTHING  # Of this step.

    # The scheduler's side.

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        # The state comes with every transfer, so the destination's own pages count wherever their state is gone.
        return True

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return self._kv_cache_config.transfer_group_ids

    def on_new_request(self, request: Request) -> None:
        # vLLM's only call before it plans a request. It keeps a prompt's tokens in three places, and none may lag
        # behind.
        dropped = self._planner.add(request)
        if dropped and request.prompt_token_ids is not None:
            del request.prompt_token_ids[-dropped:]
            del request._all_token_ids[-dropped:]
            request.num_prompt_tokens -= dropped
        if self._planner.is_source(request.request_id):
            # What would follow is of no use: the prompt was cut, and its answer is read by nobody.
            request.max_tokens = 1
            self._requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        external = self._planner.matched(request, num_computed_tokens)
        # True has vLLM park the request until its fetch is reported, instead of waiting for it within a step.
        return external, external > 0

    def update_state_after_alloc(self, request: Request, blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        self._planner.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        # First: a source that loses its blocks in this step is none any more, and gives nothing of it.
        if scheduler_output.preempted_req_ids:
            self._planner.preempted(scheduler_output.preempted_req_ids)
        if self._requests:
            self._note_sources(scheduler_output)
        return PrfaasMetadata(self._planner.take())

    def _note_sources(self, scheduler_output: "SchedulerOutput") -> None:
        state = scheduler_output.kv_connector_block_state
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            if state is not None and self._planner.is_source(request_id):  # vLLM fills it in for every connector
                # vLLM pads the last token of a prompt whose other tokens are cached with drafts, as an answer's token.
                drafts = len(scheduler_output.scheduled_spec_decode_tokens.get(request_id, ()))
                blocks = state.resolve_block_ids(request_id)
                self._planner.scheduled(self._requests[request_id], tokens - drafts, blocks)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        found = connector_output.kv_connector_worker_meta
        if isinstance(found, PrfaasWorkerMetadata):
            self._planner.fetches_failed(found.failed)
        if connector_output.finished_sending:
            self._planner.end_offers(connector_output.finished_sending)
        if connector_output.finished_recving:
            self._planner.end_fetches(connector_output.finished_recving, connector_output.failed_recving)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._finish(request)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._finish(request)

    def _finish(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        # True delays the release of the blocks until `get_transfer_results` names the request as sent.
        return self._planner.finish(request, is_whole=request.status in WHOLE), None

    # The worker's side.

    @refusals_in_status()
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        first = next(iter(kv_caches.values()))
        first = first[0] if isinstance(first, (list, tuple)) else first
        if first.device.type == "cpu":
            # vLLM 0.32 dies of SIGILL if a process's first step has four tokens or fewer, on a processor with AMX. A
            # destination's first step may have one.
            torch.cpu._init_amx()
        parallel, settings = self._vllm_config.parallel_config, self._settings
        own = RankOf(get_tensor_model_parallel_rank(), parallel.tensor_parallel_size)
        kv_heads, drafting = kv_heads_of(self._vllm_config), self._vllm_config.speculative_config
        drafts = drafting.num_speculative_tokens if drafting is not None else 0
        groups = groups_of(self._kv_cache_config, kv_caches, device_kind(first), own, kv_heads, drafts)
        mover = parallel.data_parallel_index * parallel.world_size + own.rank
        require_transfer_memory(part_bytes := slot_bytes(groups), settings.transfer_memory_mib)
        path = "" if own.rank else events_path(self._vllm_config)
        options = MoverOptions(
            host=settings.host,
            data_port=data_port(self._kv_transfer_config.kv_port, mover),
            fingerprint=_fingerprint(self._vllm_config),
            groups=tuple(group.layout for group in groups),
            slot_bytes=part_bytes,
            cluster=settings.cluster,
            rank=own.rank,
            ranks=own.ranks,
            copies=tuple(copies_of(group.heads, own.ranks) for group in groups),
            mover=mover,
            movers=settings.movers or parallel.data_parallel_size * parallel.world_size,
            metrics_port=settings.metrics_port,
            has_events=bool(path),
            events_path=path,
            tls_dir=settings.tls_dir,
            egress_mbps=settings.egress_mbps,
            egress_file=settings.egress_file,
            transfer_memory_mib=settings.transfer_memory_mib,
            wire_codec=settings.compression,
        )
        self._transfers = RankTransfers(groups, options, _all_ranks)
        log.info(
            "prfaas: data port %s:%d, %s", settings.host, options.data_port, [group.spec for group in options.groups]
        )

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self._transfers is not None:
            self._transfers.revoke(_plan_of(kv_connector_metadata))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._plan = _plan_of(connector_metadata)
        if self._transfers is not None:
            self._transfers.begin(self._plan)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        if self._transfers is not None:
            self._transfers.fetch(self._plan)

    # A request is in no step before its whole cache has come, so no layer has to be waited for.
    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        if self._transfers is not None:
            self._transfers.end_step(self._plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._transfers is None:
            return KVConnectorTransferResults()
        sent, received, failed = self._transfers.results(finished_req_ids)
        # A whole request as failed: vLLM's reports of single blocks end an engine with several cache groups.
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        failed = self._transfers.take_failed() if self._transfers is not None else set[str]()
        return PrfaasWorkerMetadata(failed) if failed else None

    def shutdown(self) -> None:
        if self._transfers is not None:
            self._transfers.mover.close()


def _plan_of(metadata: KVConnectorMetadata) -> StepPlan:
    assert isinstance(metadata, PrfaasMetadata)  # noqa: S101  # vLLM passes on what build_connector_meta made
    return metadata.plan


def _all_ranks(of_rank: torch.Tensor) -> Sequence[torch.Tensor]:
    """Give a tensor to all tensor-parallel ranks; return those of all of them. Every rank must call it."""
    ranks = get_tp_group()
    found = of_rank.new_empty((ranks.world_size * of_rank.shape[0], *of_rank.shape[1:]))
    torch.distributed.all_gather_into_tensor(found, of_rank, group=ranks.device_group)
    return found.chunk(ranks.world_size)


def kv_heads_of(config: VllmConfig) -> int:
    """Return the key-value heads of the model, or of a draft model that has more: ranks that share a head of the one
    may have heads of their own of the other, in a layer of the same form."""
    drafts = config.speculative_config
    draft = drafts.draft_model_config if drafts is not None else None
    return max(model.get_total_num_kv_heads() for model in (config.model_config, draft) if model is not None)


def _fingerprint(config: VllmConfig) -> str:
    cache_dtype = str(config.cache_config.cache_dtype)
    return fingerprint_of(
        config.model_config, cache_dtype, config.load_config.download_dir, _draft_layers(config.speculative_config)
    )


def _draft_layers(drafts: SpeculativeConfig | None) -> DraftLayers | None:
    if drafts is None or drafts.draft_model_config is None or not drafts.uses_draft_kv_cache():
        return None
    return DraftLayers(str(drafts.method), drafts.draft_model_config)
