"""The routing table: the one document with a gateway's instances and its policy's rules.

The operator renders it into a ConfigMap (gzip JSON). The gateway watches it or reads it from a file. The scheduler
sidecar reads it from its gateway. It holds no load figures: these change too fast for an API server.
"""

import gzip
import re
import zlib
from functools import cached_property
from typing import Annotated, Literal

import msgspec

from prfaas.engines import ENGINES, MAX_RANKS, EngineRecord
from prfaas.errors import ProtocolError
from prfaas.names import WORKER_DATA_PORT
from prfaas.wire.preferences import forbids, unknown_places
from prfaas.wire.profile import PoolProfile

PoolRole = Literal["prefill", "decode"]
EngineName = Annotated[str, msgspec.Meta(pattern=rf"^(?:{'|'.join(map(re.escape, ENGINES))})\Z")]
"""A name of `prfaas.engines.ENGINES`; a message with another one is refused."""
InstanceState = Literal["Ready", "Draining"]
ThresholdMode = Literal["Auto", "Priced", "Fixed", "Disabled"]
OnOffloadFailure = Literal["PrefillLocally", "Reject"]


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One worker pod. `url` is its API address.

    Engines with our mover give caches and cache events at `data_port`. The others publish their events at the same
    host, at the ports in `prfaas.names`.

    A `convertible` one changes its role while it runs. Our worker hears of it from the gateway; vLLM serves both roles.
    All others know theirs from their start. `engine` selects its protocol; only instances of the same engine serve a
    request together.
    """

    name: str
    pool: str
    cluster: str
    role: PoolRole
    url: str
    state: InstanceState = "Ready"
    convertible: bool = False
    engine: EngineName = "prfaas"
    data_port: int = WORKER_DATA_PORT
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1
    """Data-parallel ranks of the engine; each has a cache and cache events of its own."""
    rank_ports: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Data ports of each of these ranks, one a GPU, from `data_port` on."""
    draft_layers: str = ""
    """The method whose layers draft tokens, `none`, or empty if that is not known."""

    @property
    def record(self) -> EngineRecord:
        """What its engine is."""
        return ENGINES[self.engine]


def rank_name(instance: str, rank: int) -> str:
    """Return a name for one rank of an instance; no pod has such a name."""
    return f"{instance}#{rank}"


def ranks_divide(one: int, other: int) -> bool:
    """Return whether so many tensor-parallel ranks can hand a cache to so many others: in whole shares of one side."""
    return max(one, other) % min(one, other) == 0


def takes_rank(instance: Instance) -> bool:
    """Return whether a request can name the rank that serves it, by `prfaas.wire.headers.DATA_RANK`."""
    return instance.ranks > 1 and instance.record.takes_rank


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """A member cluster that holds an offload pool of this policy, with its link to the hub."""

    name: str
    namespace: str = ""
    """Of its instances there; empty: not known."""
    place: str = ""
    """The name of its cached bytes; empty: its own. It gets another one each time that it is admitted, so that no bytes
    from before a revocation serve again."""
    datacenter: str = ""
    reachable: bool = True
    capacity_mbps: int
    utilisation_query: str
    """PromQL whose single value is the link's present traffic toward the hub in Mbit/s."""
    round_trip_millis: int = 0

    @property
    def known_by(self) -> str:
        """What its cached bytes are known by."""
        return self.place or self.name


class Threshold(msgspec.Struct, frozen=True, kw_only=True):
    """Threshold of incremental length: `tokens` is the fixed value, or Auto's start value and fallback.

    Priced is Auto, in which prices decide each request while they are known.
    """

    mode: ThresholdMode
    tokens: int
    min_tokens: int
    max_tokens: int


class LinkWatermarks(msgspec.Struct, frozen=True, kw_only=True):
    """Utilisation above `high` is scarce bandwidth, below `low` abundant, in percent of effective capacity."""

    high_percent: int
    low_percent: int


class RoutingTable(msgspec.Struct, frozen=True, kw_only=True, dict=True):  # the dict holds what is computed once
    """Everything that a gateway and its scheduler need of one policy. `generation` is the policy's own."""

    format: Literal[1] = 1
    policy: str
    namespace: str
    generation: int
    model: str
    on_offload_failure: OnOffloadFailure
    threshold: Threshold
    watermarks: LinkWatermarks
    short_interval_seconds: int
    stretch: float = 1.0
    """Factor of the instances' times, where these are emulated. The scheduler then decides as slowly as they live."""
    ttft_slo_millis: int | None = None
    """Longest wait of a request for its prefill; a longer one is refused."""
    gateways: int = 1
    """Gateways that share the policy's requests; each counts only its own."""
    prometheus_url: str = ""
    stale_after_seconds: int = 10
    prefer_datacenters: tuple[str, ...] = ()
    forbid_datacenters: tuple[str, ...] = ()
    clusters: tuple[Cluster, ...] = ()
    instances: tuple[Instance, ...] = ()
    profiles: tuple[PoolProfile, ...] = ()
    """What pools say of themselves, until it was measured."""
    datacenters: tuple[str, ...] = ()
    """Those of all the hub's MemberClusters, also of ones that this policy does not use or that are revoked."""

    @cached_property
    def known_places(self) -> frozenset[str]:
        """The datacenters that policies and requests may name."""
        return frozenset(self.datacenters) | {one.datacenter for one in self.clusters if one.datacenter}

    @cached_property
    def permitted_clusters(self) -> tuple[Cluster, ...]:
        """The clusters that the policy lets prompts go to.

        None while it forbids a place where no cluster is: a misspelt name may mean any of them.
        """
        if unknown_places(self.forbid_datacenters, self.known_places):
            return ()
        return tuple(one for one in self.clusters if not forbids(self.forbid_datacenters, one.datacenter))

    def place_of(self, cluster: str) -> str:
        """Return what the cached bytes of a cluster are known by; the hub's by its name."""
        return next((one.known_by for one in self.clusters if one.name == cluster), cluster)


def measured_as(table: RoutingTable, instance: Instance) -> tuple[str, str]:
    """Return the cluster and pool of an instance's measurements; shared instances are the decode pool's, always."""
    shared = (one.pool for one in table.instances if one.convertible and one.role == "decode")
    return instance.cluster, (next(shared, instance.pool) if instance.convertible else instance.pool)


def encode(table: RoutingTable) -> bytes:
    """Return the table as gzip JSON. Equal tables give equal bytes, so that a no-op apply is recognised."""
    return gzip.compress(msgspec.json.encode(table), compresslevel=6, mtime=0)


def decode(document: bytes) -> RoutingTable:
    """Read a table from gzip or plain JSON; raises ProtocolError for a damaged one or another format."""
    try:
        raw = gzip.decompress(document) if document[:2] == b"\x1f\x8b" else document
        return msgspec.json.decode(raw, type=RoutingTable)
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise ProtocolError(f"routing table cannot be read: {error}; this version reads format 1") from error
