"""The engine of a pool: the software that runs the model, how it transfers caches, and its GPUs."""

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field, StringConstraints

from prfaas.api.base import ApiModel, Image, LongText, Rule

OWN_FLAGS: Final = (
    "model-source|model-name|host|api-port|data-port|instance|cluster|pool|role|drain-seconds|egress-file|tls-dir"
)
FOREIGN_FLAGS: Final = (
    "model|model-path|served-model-name|port|http-host|http-port|kv-tr[a-z-]*|kv-ev[a-z-]*|"
    "disaggregation-mode|disaggregation-bootstrap-port|ssl-keyfile|ssl-certfile|ssl-ca-certs"
)
"""vLLM takes the beginning of a flag for it, and `--flag.key value` for a key of its JSON."""
PARALLEL_FLAGS: Final = "(tensor|pipeline|data)-parallel-size|(tp|pp|dp)(-size)?"
OWN_CONFIG: Final = ("host", "tls_dir", "cluster", "egress_file", "metrics_port", "movers")
"""Keys of our connector's extra config that the operator sets."""
MAX_GPUS: Final = 32
"""Most GPUs of an instance: an instance is one pod, and so on one node."""
Argument = Annotated[str, StringConstraints(max_length=1024)]
CONFIG_KEYS = Rule(
    "self.all(key, key.matches('^[A-Za-z_][A-Za-z0-9_.-]{0,62}$'))",
    "keys must be at most 63 letters, digits, '_', '.' and '-', and start with a letter or '_'",
)
ConfigKey = Annotated[str, StringConstraints(max_length=63)]


class Transfer(ApiModel):
    """How a foreign engine transfers caches between its instances."""

    connector: Literal["Prfaas", "Nixl", "Mooncake"] | None = None
    """Connector of vLLM; Prfaas, the project's own, if unset. All instances of a policy need the same. Mooncake is
    experimental: its fields follow its documentation.
    """
    protocol: Literal["Tcp", "Rdma"] | None = None
    """Network protocol of caches; Tcp if unset. Rdma needs one RDMA fabric for all instances of the policy, which does
    not exist between datacenters. The container gets IPC_LOCK.
    """
    failure_policy: Literal["Recompute", "Fail"] | None = None
    """What vLLM does with a request whose cache did not arrive; Recompute if unset."""
    extra_config: Annotated[dict[ConfigKey, LongText], Field(max_length=32), CONFIG_KEYS] = {}
    """Further entries of vLLM's kv_connector_extra_config, or of TensorRT-LLM's cache_transceiver_config. A value that
    is JSON, such as true or 4, is passed as such.
    """


class Parallelism(ApiModel):
    """How an instance of a foreign engine spreads over GPUs; their number is the product of these."""

    tensor: Annotated[int, Field(ge=1, le=MAX_GPUS)] = 1
    """GPUs that compute each layer together."""
    pipeline: Annotated[int, Field(ge=1, le=MAX_GPUS)] = 1
    """Groups of layers, each on its own GPUs."""
    data: Annotated[int, Field(ge=1, le=16)] = 1
    """Copies of the model, each with its own requests and cache."""

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.data


def _asks_prfaas_connector(transfer: str) -> str:
    """Return CEL for: an engine with this `transfer` uses our connector."""
    return f"self.type == 'vllm' && (!has({transfer}.connector) || {transfer}.connector == 'Prfaas')"


class Engine(ApiModel):
    """The software that runs the model."""

    rules: ClassVar = (
        Rule(
            f"!has(self.args) || !self.args.exists(a, a.matches('^--({OWN_FLAGS})(=|$)'))",
            "args cannot set what the operator sets from the pool (--model-source, --model-name, --host, --api-port, "
            "--data-port, --instance, --cluster, --pool, --role, --drain-seconds, --egress-file, --tls-dir): change "
            "the pool's own fields",
            field="args",
            reason="FieldValueForbidden",
        ),
        Rule(
            f"self.type == 'prfaas' || !has(self.args) || !self.args.exists(a, a.replace('_', '-').matches("
            f"'^--({FOREIGN_FLAGS})([=.]|$)'))",
            "args cannot set what the operator sets for other engines (the model, its name, the address, certificates, "
            "--kv-transfer-config, --kv-events-config, --disaggregation-mode, --disaggregation-bootstrap-port): change "
            "the pool's own fields",
            field="args",
            reason="FieldValueForbidden",
        ),
        Rule(
            f"!(self.type in ['vllm', 'sglang', 'tensorrt-llm']) || !has(self.args) || !self.args.exists(a, "
            f"a.replace('_', '-').matches('^--?({PARALLEL_FLAGS})(=|$)'))",
            "sizes of parallelism stand in spec.parallelism {tensor, pipeline, data}: remove the flag",
            field="args",
            reason="FieldValueForbidden",
        ),
        Rule(
            "self.type == 'prfaas' || !self.image.startsWith('prfaas/worker:')",
            "name an image of that engine, such as vllm/vllm-openai:v0.33.0",
            field="image",
            reason="FieldValueRequired",
        ),
        Rule(
            "!has(self.transfer) || self.type in ['vllm', 'sglang', 'tensorrt-llm']",
            "transfer belongs to types vllm, sglang and tensorrt-llm: leave it out, or change the type",
            field="transfer",
            reason="FieldValueForbidden",
        ),
        Rule(
            "!has(self.transfer) || self.type == 'vllm' "
            "|| !(has(self.transfer.connector) || has(self.transfer.failurePolicy))",
            "connector and failurePolicy belong to type vllm: leave them out, or change the type",
            field="transfer",
            reason="FieldValueForbidden",
        ),
        Rule(
            "!has(self.transfer) || self.type != 'sglang' || !has(self.transfer.extraConfig)",
            "SGLang has no such table: give its flags in args",
            field="transfer.extraConfig",
            reason="FieldValueForbidden",
        ),
        Rule(
            "!has(self.transfer) || !has(self.transfer.protocol) || self.transfer.protocol == 'Tcp' "
            f"|| !({_asks_prfaas_connector('self.transfer')})",
            "connector Prfaas transfers over TCP: leave protocol out, or choose connector Nixl or Mooncake",
            field="transfer.protocol",
        ),
        Rule(
            "!has(self.transfer) || !has(self.transfer.extraConfig) "
            f"|| !({_asks_prfaas_connector('self.transfer')}) "
            f"|| !self.transfer.extraConfig.exists(k, k in {list(OWN_CONFIG)})",
            f"extraConfig cannot set what the operator sets for connector Prfaas ({', '.join(OWN_CONFIG)})",
            field="transfer.extraConfig",
            reason="FieldValueForbidden",
        ),
        Rule(
            "!has(self.transfer) || !has(self.transfer.extraConfig) || !('mooncake_protocol' in "
            "self.transfer.extraConfig || 'backend' in self.transfer.extraConfig && self.type == 'tensorrt-llm')",
            "the protocol stands in transfer.protocol: remove mooncake_protocol, or backend",
            field="transfer.extraConfig",
            reason="FieldValueForbidden",
        ),
    )

    type: Literal["prfaas", "vllm", "sglang", "tensorrt-llm", "dynamo"] = "prfaas"
    """Kind of engine: prfaas is the project's own worker. The pools of a policy have one kind. dynamo is the frontend
    of a Dynamo deployment, for a DecodePool only. sglang, tensorrt-llm and dynamo are experimental: their
    fields follow their documentation.
    """
    transfer: Transfer | None = None
    image: Image = "prfaas/worker:0.1.0"
    """Container image of the engine."""
    args: Annotated[list[Argument], Field(max_length=64)] = []
    """Flags after those that the operator sets, such as --threads or --max-context."""


ON_GPUS: Final = "has(self.engine) && self.engine.type in ['vllm', 'sglang', 'tensorrt-llm']"
GPUS: Final = (
    "(has(self.parallelism) ? self.parallelism.tensor * self.parallelism.pipeline * self.parallelism.data : 1)"
)
PARALLELISM_RULES: Final = (
    Rule(
        f"{ON_GPUS} || {GPUS} == 1",
        "an instance of this engine runs on one device: leave parallelism out, or choose vllm, sglang or tensorrt-llm",
        field="parallelism",
        reason="FieldValueForbidden",
    ),
    Rule(
        f"{GPUS} <= {MAX_GPUS}",
        f"an instance is one pod: tensor * pipeline * data must be at most {MAX_GPUS}",
        field="parallelism",
    ),
    Rule(
        "!has(self.engine) || self.engine.type != 'tensorrt-llm' || !has(self.parallelism) "
        "|| self.parallelism.data == 1",
        "TensorRT-LLM has no data parallelism between copies: leave data out, and raise replicas",
        field="parallelism.data",
        reason="FieldValueForbidden",
    ),
    Rule(
        "!has(self.engine) || self.engine.type != 'vllm' || !has(self.parallelism) || self.parallelism.pipeline == 1 "
        "|| (has(self.engine.transfer) && has(self.engine.transfer.connector) "
        "&& self.engine.transfer.connector != 'Prfaas')",
        "connector Prfaas carries no caches that are split by layers: leave pipeline out, or choose connector Nixl",
        field="parallelism.pipeline",
        reason="FieldValueForbidden",
    ),
    Rule(
        f"!({ON_GPUS}) || !has(self.template) || !has(self.template.resources) "
        "|| !has(self.template.resources.limits) || self.template.resources.limits.all(k, !k.endsWith('/gpu') "
        "|| !isQuantity(string(self.template.resources.limits[k])) "
        f"|| quantity(string(self.template.resources.limits[k])).isInteger() "
        f"&& quantity(string(self.template.resources.limits[k])).asInteger() == {GPUS})",
        "resources.limits must ask for tensor * pipeline * data GPUs (spec.parallelism, each 1 if unset)",
        field="template.resources.limits",
    ),
)
"""Rules of a pool's spec. GPUs under other names than VENDOR/gpu are not checked."""
