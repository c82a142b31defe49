"""What each engine is: one frozen record an engine. No other file of the product tests an engine's name.

Every part reads from the record what it needs: the operator what a pool may set and what its instances get, the routing
which instances serve together, the gateway which APIs, events and hand-offs an engine has, the scheduler which metrics.
The rules of the custom resources (`make crds`), the ports that the charts open (`make charts`) and tables of the
documents (`make reference`) are made of the records.

Another engine is a record here, a protocol in `prfaas_gateway.engines`, a start in `prfaas_operator.render.engines` and
a table of queries in `prfaas_scheduler.engines`. What a record leaves out, the engine does not have.
"""

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from prfaas import names
from prfaas.memory import WORKER_LIMIT_GIB
from prfaas.wire.streams import STREAM_FIELD

MAX_GPUS: Final = 32
"""Most GPUs of an instance: an instance is one pod, and so on one node."""
MAX_RANKS: Final = 16
"""Most data-parallel ranks of an instance; vLLM's handshake ports follow the ports of their events and logs."""
ResumedBy = Literal["Nothing", "TokenIds", "DrawnTokens"]
"""How another instance continues a stream. TokenIds: as a completion of prompt and answer. DrawnTokens: as the same
request, with the tokens that were drawn."""


ADMIN_PORT: Final = "admin"
"""Name of our worker's port for probes and metrics."""


class PortRange(NamedTuple):
    """Ports that the largest instance of an engine opens beside 8000 and 8001.

    Args:
        is_called: gateways call them.
        has_metrics: Prometheus reads them.
    """

    first: int
    last: int
    what: str
    is_called: bool = False
    has_metrics: bool = False


EVENT_PORTS: Final = PortRange(
    names.KV_EVENTS_PORT,
    names.kv_log_port(MAX_RANKS) + MAX_RANKS - 1,
    "cache events, one port a data-parallel rank; then as many for their log",
)


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine is."""

    name: str
    """Its name in routing tables, in the label `prfaas.io/engine` and in messages."""
    type: str
    """`engine.type` of its pools."""
    connector: str = ""
    """`engine.transfer.connector` of its pools, of a type with several; the first record of a type is its default."""
    title: str
    """The subject of sentences about it."""
    run: str = ""
    """With what it was run, for the documents."""
    experimental: str = ""
    """What was not run yet, for the condition `EngineProven`; empty if it is proven."""

    is_emulated: bool = False
    """Whether it computes nothing, and takes the time that the profile of the flag `--emulate` says."""

    is_ours: bool = False
    """Whether it is our own worker: a pool that names no `engine.image` gets that of the operator's settings."""
    has_builtin_models: bool = False
    """Whether `model.source` may be `builtin:NAME`."""
    flags: tuple[str, ...]
    """Flags that the operator sets, which `engine.args` may not have: regular expressions without the dashes."""
    transfer_fields: frozenset[str] = frozenset()
    """Fields of `engine.transfer` that a pool may set; without `protocol` it may only be Tcp."""
    config_keys: tuple[str, ...] = ()
    """Keys of `transfer.extraConfig` that the operator sets."""
    protocol_key: str = ""
    """The key of `transfer.extraConfig` that would say what `transfer.protocol` says."""
    has_parallelism: bool = False
    """Whether an instance may use several GPUs, by `parallelism`."""
    lacks_parallelism: Mapping[str, str] = {}
    """Sizes of `parallelism` that must be 1, each with the sentence for a pool that sets more."""

    roles: Literal["DecodeOnly", "Fixed", "Both", "Assigned"]
    """DecodeOnly: for DecodePools. Fixed: an instance starts with one role. Both: it serves each leg that comes, so
    pools may share instances. Assigned: likewise, and the gateway sends it its role (`PUT /v1/role`).
    """
    ports: tuple[PortRange, ...] = ()
    """Ports beside 8000, 8001 and those of cache events."""
    chosen_ports: str = ""
    """What crosses at ports that instances choose and announce with their pod's address; empty if nothing does."""
    memory_gib: int = 128
    """The default limit of the host's memory, for each GPU: weights pass through it, and caches may wait there."""
    uses_shared_memory: bool = False
    """Whether processes of an instance share memory, in `/dev/shm`."""
    caps_egress: bool = False
    """Whether an instance reads its part of `egressMbps` again while it runs."""

    apis: frozenset[str]
    """Paths of the APIs that it serves."""
    hand_offs: frozenset[str] = frozenset()
    """Those of them whose requests may be prefilled by another instance."""
    calls: str
    """The order of the two calls, for the documents."""
    is_one_sequence: bool = False
    """Whether a hand-off takes one prompt and one answer only."""
    is_one_prompt: bool = False
    """Whether a hand-off takes one prompt only, and several answers to it."""
    tensor_sizes_divide: bool = False
    """Whether caches cross only where one pool's `parallelism.tensor` is a multiple of the other's."""
    draft_flag: str = ""
    """The flag with what drafts tokens, of an engine whose caches include those of layers that draft."""
    takes_rank: bool = False
    """Whether a request can name the data-parallel rank that serves it."""
    fetches_prefixes: bool = False
    """Whether it fetches a longer cached prefix from another instance."""
    resumed_by: ResumedBy = "Nothing"
    """How another instance continues a broken stream."""

    events: Literal["Nothing", "Zmq", "Mover"] = "Nothing"
    """What publishes its cache events: itself over ZMQ, which is plain, or our mover at its data port."""
    maps_bytes: bool = False
    """Whether its cache events say which bytes of a prompt are which tokens."""
    tokenizes: bool = False
    """Whether `POST /tokenize` gives the token ids that its cache events name."""
    names_salts: bool = False
    """Whether its cache events name the salts of prompts. Under a salt those of others prove nothing."""
    has_profile: bool = False
    """Whether it measures its own prefill times and cache sizes (`GET /v1/profile`)."""
    metrics: str
    """Its table of queries in `prfaas_scheduler.engines`."""
    metrics_path: str = "/metrics"
    """The path of its metrics."""
    running_limit_flag: str = ""
    """The flag with the most requests that run together, of an engine that does not publish it."""
    link_port: str = ""
    """Name of the port whose metrics count the bytes of a link; empty if none does."""

    checked: Literal["Nothing", "Request", "Frame"] = "Nothing"
    """What of an arriving cache has a checksum."""
    is_encrypted: bool = False
    """Whether API and caches use the certificates of both clusters."""
    checks_callers: bool = False
    """Whether its API, inside TLS, serves nobody but those who `prfaas.rights` allows."""
    steering_fields: frozenset[str] = frozenset()
    """Fields of a body by which a client could say where a cache lies or where a request runs: the gateway refuses
    them, whichever engine serves.
    """
    steering_objects: Mapping[str, frozenset[str]] = {}
    """Objects in a body that may hold neither those fields nor these."""
    salt_object: str = ""
    """An object in a body whose `cache_salt` wins over the body's own: there the gateway writes it, too."""
    unsalted_apis: frozenset[str] = frozenset()
    """Paths of the APIs whose requests have no `cache_salt`: never handed off, and not served while each client has a
    cache of its own."""
    knows_origins: bool = False
    """Whether it knows of each cached block whose bytes it stands on. For others the salt says whose these may be."""

    @property
    def needs_pod_ip(self) -> bool:
        """Whether a node's ports cannot lead to an instance."""
        return bool(self.chosen_ports)

    @property
    def probed_port(self) -> str:
        """Name of the port with its probes and metrics. Where that is its API's, who calls it can keep probes out."""
        return ADMIN_PORT if self.is_ours else "api"

    @property
    def serves_both_roles(self) -> bool:
        """Whether pools of both roles may share its instances."""
        return self.roles in {"Both", "Assigned"}

    @property
    def needs_place_salt(self) -> bool:
        """Whether it would serve what another cluster gave it to every request with the same salt."""
        return bool(self.hand_offs) and not self.knows_origins

    @property
    def needs_every_field(self) -> bool:
        """Whether the gateway reads every field of a body: some are refused, written anew, or decide whether a hand-off
        takes it."""
        is_one = self.is_one_sequence or self.is_one_prompt
        return bool(self.steering_fields or self.steering_objects or is_one or self.needs_place_salt)

    @property
    def all_ports(self) -> tuple[PortRange, ...]:
        """Its ports with those of its cache events."""
        return (*self.ports, EVENT_PORTS) if self.events == "Zmq" else self.ports


_COMPLETIONS: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
_RESPONSES: Final = frozenset({"/v1/responses"})
_MESSAGES: Final = frozenset({"/v1/messages"})
_COUNT_TOKENS: Final = frozenset({"/v1/messages/count_tokens"})
_TOKENIZE: Final = frozenset({"/tokenize", "/detokenize"})
_EVENT_FLAGS: Final = "kv-ev[a-z-]*"
_BOOTSTRAP: Final = PortRange(names.BOOTSTRAP_PORT, names.BOOTSTRAP_PORT, "bootstrap", is_called=True)
_BY_UCX: Final = "caches at ports that UCX chooses"
_BY_ENGINE: Final = "caches at ports that the engine chooses"

_PRFAAS: Final = EngineRecord(
    name="prfaas",
    type="prfaas",
    title="the worker",
    run="every test run, two clusters; not on GPUs",
    is_ours=True,
    has_builtin_models=True,
    flags=(
        *("model-source", "model-name", "host", "api-port", "data-port", "admin-port", "instance", "cluster", "pool"),
        *("role", "drain-seconds", "egress-file", "tls-dir"),
    ),
    roles="Assigned",
    memory_gib=WORKER_LIMIT_GIB,
    caps_egress=True,
    apis=_COMPLETIONS | _TOKENIZE,
    hand_offs=_COMPLETIONS,
    calls="both calls at once, under one transfer id",
    is_one_prompt=True,
    fetches_prefixes=True,
    resumed_by="DrawnTokens",
    events="Mover",
    maps_bytes=True,
    has_profile=True,
    metrics="prfaas",
    link_port=ADMIN_PORT,
    checked="Frame",
    is_encrypted=True,
    checks_callers=True,
    steering_fields=frozenset({"kv_transfer_params", STREAM_FIELD}),
    knows_origins=True,
)
_EMULATED: Final = replace(
    _PRFAAS,
    name="emulated",
    type="emulated",
    title="the emulated worker",
    run="every test run, two clusters",
    is_emulated=True,
)
_VLLM: Final = EngineRecord(
    name="vllm-prfaas",
    type="vllm",
    connector="Prfaas",
    title="connector Prfaas",
    run=(
        "vLLM 0.32.0 on CPUs in two clusters (`make demo ENGINE=vllm`, `make test-vllm`) and in containers "
        "(`make test-kind`); not on GPUs"
    ),
    flags=(
        # vLLM takes the beginning of a flag for it.
        *("model", "served-model-name", "port", "kv-tr[a-z-]*", _EVENT_FLAGS),
        *("ssl-keyfile", "ssl-certfile", "ssl-ca-certs"),
    ),
    transfer_fields=frozenset({"connector", "failurePolicy", "extraConfig"}),
    config_keys=("host", "tls_dir", "cluster", "egress_file", "metrics_port", "movers"),
    has_parallelism=True,
    lacks_parallelism={
        "pipeline": (
            "connector Prfaas carries no caches that are split by layers: leave pipeline out, or choose connector Nixl"
        )
    },
    roles="Both",
    uses_shared_memory=True,
    ports=(
        PortRange(
            names.WORKER_DATA_PORT + 1,
            names.WORKER_DATA_PORT + MAX_GPUS,
            "caches and events, one port a GPU from 8001 on; the next one: the connector's metrics (8002 with one GPU)",
            has_metrics=True,
        ),
    ),
    caps_egress=True,
    apis=_COMPLETIONS | _RESPONSES | _MESSAGES | _COUNT_TOKENS | _TOKENIZE,
    hand_offs=_COMPLETIONS | _RESPONSES | _MESSAGES | _COUNT_TOKENS,
    calls="both calls at once, under one transfer id",
    is_one_sequence=True,
    fetches_prefixes=True,
    tensor_sizes_divide=True,
    draft_flag="--speculative-config",
    takes_rank=True,
    resumed_by="TokenIds",
    events="Mover",
    tokenizes=True,
    names_salts=True,
    metrics="vllm",
    running_limit_flag="--max-num-seqs",
    link_port="link-metrics",
    checked="Frame",
    is_encrypted=True,
    steering_fields=frozenset({"kv_transfer_params", "ec_transfer_params"}),
    # vLLM's own way into the same fields.
    steering_objects={"vllm_xargs": frozenset()},
)
_VLLM_NIXL: Final = replace(
    _VLLM,
    name="vllm-nixl",
    connector="Nixl",
    title="connector Nixl",
    run="vLLM 0.32.0 on CPUs with NIXL over TCP (`make release-checks`); not on GPUs",
    transfer_fields=_VLLM.transfer_fields | {"protocol"},
    config_keys=(),
    lacks_parallelism={},
    ports=(PortRange(names.SIDE_CHANNEL_PORT, names.SIDE_CHANNEL_PORT + MAX_RANKS - 1, "handshakes"),),
    chosen_ports=_BY_UCX,
    caps_egress=False,
    calls="prefill first; decode pulls",
    fetches_prefixes=False,
    tensor_sizes_divide=False,
    draft_flag="",
    events="Zmq",
    link_port="",
    checked="Nothing",
    is_encrypted=False,
)
_VLLM_MOONCAKE: Final = replace(
    _VLLM_NIXL,
    name="vllm-mooncake",
    connector="Mooncake",
    title="connector Mooncake",
    run="",
    experimental="was not run against vllm with connector Mooncake yet",
    protocol_key="mooncake_protocol",
    roles="Fixed",
    ports=(_BOOTSTRAP,),
    chosen_ports=_BY_ENGINE,
    calls="both calls at once, under one transfer id",
)
_SGLANG: Final = EngineRecord(
    name="sglang",
    type="sglang",
    title="SGLang",
    experimental="was not run against sglang yet",
    flags=(
        *("model-path", "served-model-name", "port", _EVENT_FLAGS),
        *("disaggregation-mode", "disaggregation-bootstrap-port"),
    ),
    transfer_fields=frozenset({"protocol"}),
    has_parallelism=True,
    roles="Fixed",
    uses_shared_memory=True,
    ports=(_BOOTSTRAP,),
    chosen_ports=_BY_ENGINE,
    # Its two instances of a request meet by fields that its Messages and Responses APIs lack.
    apis=_COMPLETIONS | _COUNT_TOKENS,
    hand_offs=_COMPLETIONS,
    calls="both calls at once, in one room",
    events="Zmq",
    metrics="sglang",
    running_limit_flag="--max-running-requests",
    checked="Request",
    steering_fields=frozenset(
        (
            *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
            *("routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank"),
        )
    ),
)
_TENSORRT_LLM: Final = EngineRecord(
    name="tensorrt-llm",
    type="tensorrt-llm",
    title="TensorRT-LLM",
    experimental="was not run against tensorrt-llm yet",
    flags=("port",),
    transfer_fields=frozenset({"protocol", "extraConfig"}),
    protocol_key="backend",
    has_parallelism=True,
    lacks_parallelism={
        "data": "TensorRT-LLM has no data parallelism between copies: leave data out, and raise replicas"
    },
    roles="Fixed",
    uses_shared_memory=True,
    chosen_ports=_BY_UCX,
    apis=_COMPLETIONS | _RESPONSES,
    hand_offs=frozenset({"/v1/chat/completions"}),
    calls="context first, then generation",
    is_one_sequence=True,
    metrics="tensorrt-llm",
    metrics_path="/prometheus/metrics",
    steering_fields=frozenset({"disaggregated_params"}),
    # The type of the first ignores fields that it does not know, that of the second refuses them.
    unsalted_apis=_RESPONSES | {"/v1/completions"},
)
_DYNAMO: Final = EngineRecord(
    name="dynamo",
    type="dynamo",
    title="Dynamo",
    run="two frontends of 1.4.2 (`make release-checks`)",
    experimental="was run against frontends of dynamo with a mocker only, not with a model",
    flags=("http-host", "http-port"),
    roles="DecodeOnly",
    uses_shared_memory=True,
    apis=_COMPLETIONS | _RESPONSES | _MESSAGES | _COUNT_TOKENS,
    calls="none: Dynamo prefills and decodes",
    metrics="dynamo",
    # They name its workers, a prompt other than the one that is matched here, and the salt of its caches.
    steering_objects={
        "nvext": frozenset(
            (
                *("backend_instance_id", "prefill_worker_id", "decode_worker_id"),
                *("dp_rank", "prefill_dp_rank", "token_data", "cache_salt"),
            )
        )
    },
    salt_object="nvext",
)

ENGINES: Final[Mapping[str, EngineRecord]] = {
    one.name: one for one in (_PRFAAS, _EMULATED, _VLLM, _VLLM_NIXL, _VLLM_MOONCAKE, _SGLANG, _TENSORRT_LLM, _DYNAMO)
}
"""All engines by name. The first one is the project's own worker, the default of a pool."""


def find_engine(type_: str, connector: str | None) -> EngineRecord:
    """Return the engine of a type with this connector, the type's first one without it."""
    of_type = [one for one in ENGINES.values() if one.type == type_]
    return next((one for one in of_type if one.connector == connector), of_type[0])
