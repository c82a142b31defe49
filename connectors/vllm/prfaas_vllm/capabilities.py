"""What the connector needs of vLLM, looked for in the sources of the vLLM that is there.

No version number is compared: a version that nobody has tested starts if it has all of this, and says so. Nothing of
vLLM is imported. So what is missing is named before an import fails of it, and a container that has no GPU looks, too:

    python3 -c 'from prfaas_vllm.capabilities import tell; tell()'
"""

import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

from prfaas.errors import ConfigError
from prfaas_vllm.definitions import Definition, Signature, SourceFolder
from prfaas_vllm.settings import say_in_status

TESTED: Final = {"0.30": "type-checked", "0.31": "type-checked", "0.32": "run on CPUs", "0.33": "type-checked"}
"""Minor versions of vLLM by what was done with them; its connector interface calls itself experimental."""
_BASE: Final = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_USED: Final[Mapping[str, str]] = {
    "vllm.config:VllmConfig": (
        "cache_config kv_events_config kv_transfer_config load_config model_config parallel_config speculative_config"
    ),
    "vllm.config:CacheConfig": "block_size cache_dtype use_replayssm",
    "vllm.config:KVEventsConfig": "enable_kv_cache_events endpoint publisher",
    "vllm.config:KVTransferConfig": "engine_id kv_connector_extra_config kv_load_failure_policy kv_port kv_role",
    "vllm.config:LoadConfig": "download_dir",
    "vllm.config:ModelConfig": "dtype get_total_num_kv_heads() hf_config max_model_len model quantization revision",
    "vllm.config:ParallelConfig": (
        "data_parallel_index data_parallel_size decode_context_parallel_size pipeline_parallel_size "
        "prefill_context_parallel_size tensor_parallel_size world_size"
    ),
    "vllm.config:SpeculativeConfig": "draft_model_config method num_speculative_tokens uses_draft_kv_cache()",
    "vllm.distributed.kv_events:EventBatch": "data_parallel_rank",
    "vllm.distributed.kv_events:EventPublisher": "_data_parallel_rank __init__(data_parallel_rank)",
    "vllm.distributed.kv_events:EventPublisherFactory": "register_publisher(name,ctor)",
    f"{_BASE}:KVConnectorBase_V1": "_kv_cache_config _kv_transfer_config _vllm_config",
    f"{_BASE}:KVConnectorMetadata": "",
    f"{_BASE}:KVConnectorRole": "SCHEDULER",
    f"{_BASE}:KVConnectorTransferResults": "failed_recving finished_recving finished_sending",
    "vllm.distributed.parallel_state:GroupCoordinator": "device_group world_size",
    "vllm.distributed.parallel_state:get_tensor_model_parallel_rank()": "",
    "vllm.distributed.parallel_state:get_tp_group()": "",
    "vllm.model_executor.models.utils:extract_layer_index(layer_name)": "",
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": "get_block_ids()",
    "vllm.v1.core.sched.output:KVConnectorBlockState": "resolve_block_ids",
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "kv_connector_block_state num_scheduled_tokens preempted_req_ids scheduled_spec_decode_tokens"
    ),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": "block_size dtype head_size num_kv_heads",
    "vllm.v1.kv_cache_interface:KVCacheConfig": "kv_cache_groups num_blocks transfer_group_ids",
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": "kv_cache_spec layer_names",
    "vllm.v1.kv_cache_interface:KVCacheSpec": "block_size",
    "vllm.v1.kv_cache_interface:MLAAttentionSpec": "",
    "vllm.v1.kv_cache_interface:MambaSpec": "block_size dtypes mamba_type shapes tp_replicated",
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": "",
    "vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs": "kv_cache_specs",
    "vllm.v1.outputs:KVConnectorOutput": "failed_recving finished_recving finished_sending kv_connector_worker_meta",
    "vllm.v1.request:Request": (
        "_all_token_ids kv_transfer_params max_tokens num_computed_tokens num_prompt_tokens prompt_token_ids "
        "request_id status"
    ),
    "vllm.v1.request:RequestStatus": "FINISHED_LENGTH_CAPPED FINISHED_STOPPED",
}
"""Names, by their class; a function with the arguments that it gets."""
_OVERRIDDEN: Final[Mapping[str, str]] = {
    f"{_BASE}:KVConnectorBase_V1": (
        "__init__(vllm_config,role,kv_cache_config) bind_connector_metadata(connector_metadata) "
        "build_connector_meta(scheduler_output) build_connector_worker_meta() "
        "get_num_new_matched_tokens(request,num_computed_tokens) get_transfer_results(finished_req_ids) "
        "handle_preemptions(kv_connector_metadata) on_new_request(request) register_kv_caches(kv_caches) "
        "request_finished(request,block_ids) save_kv_layer(layer_name,kv_layer,attn_metadata) shutdown() "
        "start_load_kv(forward_context) supports_divergent_local_hybrid_hits update_connector_output(connector_output) "
        "update_state_after_alloc(request,blocks,num_external_tokens) wait_for_layer_load(layer_name) wait_for_save()"
    ),
    f"{_BASE}:KVConnectorWorkerMetadata": "aggregate(other)",
    f"{_BASE}:SupportsHMA": "request_finished_all_groups(request,block_ids)",
    "vllm.distributed.kv_events:EventPublisher": "publish(events) shutdown()",
}
"""Methods that vLLM calls: it may give them no more than what the connector's own take."""


class Need(NamedTuple):
    """A name of a module, or of a class of it. With `parameters` it is a function that is called, or overridden."""

    module: str
    name: str
    member: str = ""
    parameters: tuple[str, ...] | None = None
    is_overridden: bool = False

    @property
    def text(self) -> str:
        called = "" if self.parameters is None else f"({', '.join(self.parameters)})"
        return f"{self.name}.{self.member}{called}" if self.member else f"{self.module}.{self.name}{called}"


def _needs(table: Mapping[str, str], *, is_overridden: bool) -> Iterator[Need]:
    for place, members in table.items():
        module, _, name = place.partition(":")
        name, parameters = _signature(name)
        yield Need(module, name, parameters=parameters)
        for member in members.split():
            yield Need(module, name, *_signature(member), is_overridden)


def _signature(text: str) -> tuple[str, tuple[str, ...] | None]:
    """Return a name, and the parameters that stand behind it; None if there are no brackets."""
    name, bracket, rest = text.partition("(")
    return name, tuple(filter(None, rest.rstrip(")").split(","))) if bracket else None


NEEDS: Final = (*_needs(_USED, is_overridden=False), *_needs(_OVERRIDDEN, is_overridden=True))


def missing(sources: SourceFolder) -> list[str]:
    """Return what the connector needs and this vLLM lacks, by name."""
    return list(dict.fromkeys(filter(None, (lacks(sources, need) for need in NEEDS))))


def lacks(sources: SourceFolder, need: Need) -> str:
    """Return the name of what is missing of one need; empty if nothing is."""
    found = sources.find(need.module, need.name)
    if found is None:
        return f"{need.module}.{need.name}"
    definition = found.definition
    if need.member:
        members = sources.members(found)
        if need.member not in members:
            return f"{need.name}.{need.member}"
        definition = members[need.member]
    return "" if need.parameters is None or _fits(definition, need) else need.text


def _fits(definition: Definition, need: Need) -> bool:
    wanted = need.parameters or ()
    if not isinstance(definition, Signature):
        return False
    if need.is_overridden:
        return definition.names == wanted
    return definition.names[: len(wanted)] == wanted and definition.required <= set(wanted)


def installed() -> SourceFolder | None:
    """Return the vLLM that an import would find; None if there is none."""
    spec = find_spec("vllm")
    return None if spec is None or spec.origin is None else SourceFolder(Path(spec.origin).parents[1])


def version_of(sources: SourceFolder) -> str:
    """Return the version that vLLM itself says."""
    found = re.search(r"^__version__ = .*'(.+)'$", sources.text("vllm._version"), re.MULTILINE)
    return found[1] if found else "of an unknown version"


def untested(version: str) -> str:
    """Return a sentence about a version that nobody has tested with the connector; empty for the others."""
    found = re.match(r"\d+\.\d+", version)
    if found is not None and found[0] in TESTED:
        return ""
    return f"vLLM {version} has all that PrfaasConnector needs, but was not tested with it; these were: {_tested()}"


def require_capabilities(sources: SourceFolder | None) -> None:
    """Raise ConfigError with the name of all that the connector needs and this vLLM, if there is one, lacks."""
    if sources is not None and (lacking := missing(sources)):
        raise ConfigError(
            f"vLLM {version_of(sources)} lacks what PrfaasConnector needs: {', '.join(lacking)}. Use an image with a "
            f"version that was tested ({_tested()}), or engine.transfer.connector Nixl"
        )


def tell() -> None:
    """Leave that sentence in the status of the container that runs this."""
    sources = installed()
    if sources is not None and (words := untested(version_of(sources))):
        print(words)
        say_in_status(words)


def _tested() -> str:
    return ", ".join(TESTED)
