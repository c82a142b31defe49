"""Messages between an engine and its mover: msgpack with its length before it, over a stream.

    engine   AnnounceCache                   a cache for a destination that says what it lacks
             ComputedParts FinishCache       it begins to be computed or parts of it are there, or all
             FailedCache                     the rest will not come, or is not wanted
             FetchCache                      a cache from a source
             AwaitCache                      say when a source begins to compute one
             CancelFetch DeclineCache        it is not wanted, any more or at all
             CopyDone                        a copy is done, or why it is not
             AskStats SetEgress              questions of the engine's front, answered as it answers them
    mover    MoverReady, or MoverRefused     the data port is open, or why it is not
             CopyRequest                     move a part between the engine's memory and a slot
             AskAnnounce                     say `CopyDone` once all that was said before is on its way
             BegunCache                      a source begins to compute what was awaited, or cannot be awaited
             EndedOffer EndedFetch           nothing of it touches the engine's memory any more
             TransferEnded                   a transfer's record, before either of these

The memory between the two is one of these:

- *Slots*, where the mover alone can not reach the engine's memory. It asks for a part when it can send it. So an engine
  keeps its pages until the offer is over, and nothing is copied that waits behind a slow link.
- The engine's cache itself, described by a `CacheMap`. Nothing is copied, and no thread of the engine is asked.
"""

from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from prfaas.routing.compression import WireCodec
from prfaas.telemetry.logs import LogFormat
from prfaas.wire.engine import AskStats, EgressSet, SetEgress, Stats, TransferEnded
from prfaas.wire.trace import NO_TRACE, TraceContext
from prfaas.wire.transfer import Done, LayerGroup
from prfaas_transfer.cache import CacheMap, SharedPlace

MAX_REASON: Final = 4096
"""Characters of a reason; a peer may have chosen them, and as many as it likes."""


NO_MEMORY_STATUS: Final = 12
"""A mover ends so (ENOMEM) that had no memory left for what everything else waits for."""


class MoverOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a mover, as JSON in its arguments: no secrets. `groups` describe the engine's cache.

    The cache is that of one tensor-parallel `rank` of `ranks`. An instance has `movers`, one for each of its ranks of
    any kind, and this is number `mover`. Of each group so many ranks hold the same as `copies` says; without it no two
    do. With a `map` the shared memory is the engine's cache, else it has slots. A destination may come
    `patience_seconds` before the engine speaks of its transfer: the request has a home, too, and is served there in
    time. The engine's end copies on its own thread, or on `copy_threads` where a copy may wait.
    """

    host: str
    data_port: int
    fingerprint: str
    groups: tuple[LayerGroup, ...]
    slot_bytes: int
    cluster: str = ""
    rank: int = 0
    ranks: int = 1
    copies: tuple[int, ...] = ()
    mover: int = 0
    movers: int = 1
    metrics_port: int = 0
    tls_dir: str = ""
    egress_mbps: int = 0
    egress_file: str = ""
    transfer_memory_mib: int = 256
    wire_codec: WireCodec = "auto"
    map: CacheMap | None = None
    has_events: bool = True
    """Whether the engine publishes its cache events by this mover."""
    events_path: str = ""
    """Where the engine's scheduler says its cache events, if it runs in another process; see engine_socket.py."""
    patience_seconds: float = 1.5
    max_offers: int = 1024
    copy_threads: int = 0
    log_place: str = "mover"
    log_format: LogFormat = "text"

    @property
    def memory_bytes(self) -> int:
        return self.map.nbytes if self.map is not None else self.slots * self.slot_bytes

    @property
    def slots(self) -> int:
        return max(2, (self.transfer_memory_mib << 20) // self.slot_bytes)


class CopyPart(NamedTuple):
    """Rows of a layer, of whole rows, or without tokens its state."""

    group: int
    layer: int
    start_token: int = 0
    tokens: int = 0


class CacheSlice(msgspec.Struct, frozen=True, array_like=True):
    """What crosses between two ranks, where that is not what a mover's options describe: slice `rank` of `ranks`."""

    rank: int
    ranks: int
    groups: tuple[LayerGroup, ...]


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class AnnounceCache(_Message, frozen=True, array_like=True, tag=True):
    """A cache of `end_token` tokens, of which `prompt` is a digest, will be computed for whoever has the token; or a
    slice of it."""

    transfer_id: str
    epoch: int
    token: str
    request_id: str
    end_token: int
    prompt: str = ""
    slice: CacheSlice | None = None
    trace: TraceContext = NO_TRACE

    @property
    def key(self) -> str:
        """The offer's name between an engine and its mover."""
        return keyed(self.transfer_id, self.slice)


class ComputedParts(_Message, frozen=True, array_like=True, tag=True):
    """These parts are computed, and stay as they are until the offer is over. In a mapped cache they are at `place`.
    Without a part: the first ones begin to be computed."""

    key: str
    parts: list[CopyPart]
    place: SharedPlace | None = None


class FinishCache(_Message, frozen=True, array_like=True, tag=True):
    """Every part was put; computing them took so long, on a cache that `is_exact`, with bytes of clusters `origins`;
    None: nobody knows of which."""

    key: str
    prefill_seconds: float
    is_exact: bool = True
    origins: tuple[str, ...] | None = None


class FailedCache(_Message, frozen=True, array_like=True, tag=True):
    """The rest will not be computed. Without `at_once` the offer goes on until its destination has heard the reason."""

    key: str
    reason: str
    at_once: bool = True


class _AtSource(_Message, frozen=True, array_like=True, tag=True):
    """An announced cache at a data port, for one request; its certificate must name this cluster, empty for any."""

    request_id: str
    transfer_id: str
    epoch: int
    token: str
    host: str
    port: int
    cluster: str


class FetchCache(_AtSource, frozen=True, array_like=True, tag=True):
    """Get the cache of this `prompt`, or a slice of it, from `start_token` on; in a mapped cache into this place."""

    start_token: int
    end_token: int
    prompt: str = ""
    slice: CacheSlice | None = None
    place: SharedPlace | None = None
    trace: TraceContext = NO_TRACE

    @property
    def key(self) -> str:
        """The fetch's name between an engine and its mover."""
        return keyed(self.transfer_id, self.slice)


class AwaitCache(_AtSource, frozen=True, array_like=True, tag=True):
    """Wait until this source begins to compute the cache."""


class CancelFetch(_Message, frozen=True, array_like=True, tag=True):
    key: str


class DeclineCache(_AtSource, frozen=True, array_like=True, tag=True):
    """The engine has of itself what this source offers to its rank."""

    rank: int = 0


class CopyDone(_Message, frozen=True, array_like=True, tag=True):
    """The copy with this number is done, or failed for this reason."""

    number: int
    reason: str = ""


class MoverReady(_Message, frozen=True, array_like=True, tag=True):
    """The data port is open, at this number."""

    data_port: int


class MoverRefused(_Message, frozen=True, array_like=True, tag=True):
    """The mover cannot start."""

    reason: str


class CopyRequest(_Message, frozen=True, array_like=True, tag=True):
    """Load a part of an offered transfer into the shared memory at `offset`, or land it from there for a request."""

    number: int
    direction: Literal["load", "land"]
    key: str
    part: CopyPart
    offset: int
    count_bytes: int


class EndedOffer(_Message, frozen=True, array_like=True, tag=True):
    """An offer ended, well or not, and nothing loads parts of it any more."""

    key: str


class BegunCache(_Message, frozen=True, array_like=True, tag=True):
    """The source of an awaited transfer begins to compute, or does not say when it will: the cache is to be fetched."""

    transfer_id: str


class AskAnnounce(_Message, frozen=True, array_like=True, tag=True):
    """A destination came for a transfer that is not known here. Answered by CopyDone, behind what tells of it."""

    number: int


class Fetched(NamedTuple):
    """What a fetch brought: cached tokens, the source's figures, cache bytes, seconds from first to last data byte, and
    if it is bit by bit the result of a prefill."""

    tokens: int
    done: Done
    received_bytes: int
    transfer_seconds: float
    is_exact: bool = True
    transfer_id: str = ""


class EndedFetch(_Message, frozen=True, array_like=True, tag=True):
    """A fetch ended: everything landed, and was `fetched`, or the reason why not. `is_unreachable` if the source or the
    link to it died."""

    key: str
    reason: str = ""
    fetched: Fetched | None = None
    is_unreachable: bool = False


MoverCommand: TypeAlias = (
    AnnounceCache
    | ComputedParts
    | FinishCache
    | FailedCache
    | FetchCache
    | AwaitCache
    | CancelFetch
    | DeclineCache
    | CopyDone
    | AskStats
    | SetEgress
)
MoverAnswer: TypeAlias = Stats | EgressSet
MoverReport: TypeAlias = (
    MoverReady
    | MoverRefused
    | CopyRequest
    | AskAnnounce
    | BegunCache
    | EndedOffer
    | EndedFetch
    | TransferEnded
    | Stats
    | EgressSet
)


def keyed(transfer_id: str, part: CacheSlice | None) -> str:
    """Return a name for one slice of a transfer; of all of it the transfer's."""
    return transfer_id if part is None else f"{transfer_id}/{part.rank}"


def transfer_of(key: str) -> str:
    """Return the transfer of which this is a slice, or all."""
    return key.partition("/")[0]


encode = msgspec.msgpack.Encoder().encode
decode_for_mover = msgspec.msgpack.Decoder(MoverCommand).decode
decode_from_mover = msgspec.msgpack.Decoder(MoverReport).decode
