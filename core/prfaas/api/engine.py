"""The engine of a pool: the software that runs the model, how it transfers caches, and its GPUs."""

from functools import cached_property
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from prfaas.api.base import ApiModel, Image, LongText, OneOf, Rule
from prfaas.api.engine_rules import CONNECTORS, DEFAULT, TYPES, describe_connector, describe_type, engine_rules
from prfaas.engines import MAX_GPUS, MAX_RANKS, EngineRecord, find_engine

Argument = Annotated[str, StringConstraints(max_length=1024)]
CONFIG_KEYS = Rule(
    "self.all(key, key.matches('^[A-Za-z_][A-Za-z0-9_.-]{0,62}$'))",
    "keys must be at most 63 letters, digits, '_', '.' and '-', and start with a letter or '_'",
)
ConfigKey = Annotated[str, StringConstraints(max_length=63)]
Connector = Annotated[str, OneOf(CONNECTORS)]


class Transfer(ApiModel):
    """How a foreign engine transfers caches between its instances."""

    connector: Annotated[Connector | None, Field(description=describe_connector())] = None
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
    data: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1
    """Copies of the model, each with its own requests and cache."""

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.data


class Engine(ApiModel):
    """The software that runs the model."""

    rules: ClassVar = tuple(engine_rules())

    type: Annotated[str, OneOf(TYPES), Field(description=describe_type())] = DEFAULT.type
    transfer: Transfer | None = None
    image: Image | None = None
    """Container image of the engine. If unset, our own worker has that of the operator's settings; others need one."""
    args: Annotated[list[Argument], Field(max_length=64)] = []
    """Flags after those that the operator sets, such as --threads or --max-context."""

    @cached_property
    def record(self) -> EngineRecord:
        """What this engine is; looked up once an object."""
        return find_engine(self.type, self.transfer.connector if self.transfer else None)
