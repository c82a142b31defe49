"""Messages between an engine and its mover, over a socket that keeps their boundaries.

    engine   ANNOUNCE PUT FINISH FAIL      a cache for a destination, part by part as it is computed
             FETCH CANCEL                  a cache from a source
             DECLINE                       a source's cache is not wanted
             COPIED                        a copy is done, or why it is not
    mover    READY, or REFUSED             the data port is open, or why it is not
             COPY                          move a part between the engine's memory and a slot of the shared memory
             OFFER_OVER FETCH_OVER         nothing of it touches the engine's memory any more

The mover owns the shared memory's slots. It asks for a part when it can send it, so an engine keeps its pages until the
offer is over, and nothing is copied that waits behind a slow link.
"""

from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from prfaas.routing.compression import WireCodec
from prfaas.wire.transfer import LayerGroup

MAX_MESSAGE_BYTES: Final = 128 << 10
"""More than any message has; a kernel's default buffer takes it whole."""
MAX_PARTS: Final = 512
"""Parts of one PUT."""
MAX_REASON: Final = 4096
"""Characters of a reason; a peer may have chosen them, and as many as it likes."""


class MoverOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a mover, as JSON in its arguments: no secrets. `groups` describe the engine's cache.

    The cache is that of one tensor-parallel `rank` of `ranks`. An instance has `movers`, one for each of its ranks of
    any kind, and this is number `mover`.
    """

    host: str
    data_port: int
    fingerprint: str
    groups: tuple[LayerGroup, ...]
    slot_bytes: int
    cluster: str = ""
    rank: int = 0
    ranks: int = 1
    mover: int = 0
    movers: int = 1
    metrics_port: int = 0
    tls_dir: str = ""
    egress_mbps: int = 0
    egress_file: str = ""
    transfer_memory_mib: int = 256
    wire_codec: WireCodec = "auto"

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

    @property
    def key(self) -> str:
        """The offer's name between an engine and its mover."""
        return keyed(self.transfer_id, self.slice)


class ComputedParts(_Message, frozen=True, array_like=True, tag=True):
    """These parts are computed, and stay as they are until the offer is over."""

    key: str
    parts: list[CopyPart]


class FinishCache(_Message, frozen=True, array_like=True, tag=True):
    """Every part was put; computing them took so long."""

    key: str
    prefill_seconds: float


class FailedCache(_Message, frozen=True, array_like=True, tag=True):
    """The rest will not be computed."""

    key: str
    reason: str


class FetchCache(_Message, frozen=True, array_like=True, tag=True):
    """Get the cache of this `prompt`, or a slice of it, from `start_token` on, from a data port; its certificate must
    name this cluster, empty for any."""

    request_id: str
    transfer_id: str
    epoch: int
    token: str
    host: str
    port: int
    cluster: str
    start_token: int
    end_token: int
    prompt: str = ""
    slice: CacheSlice | None = None

    @property
    def key(self) -> str:
        """The fetch's name between an engine and its mover."""
        return keyed(self.request_id, self.slice)


class CancelFetch(_Message, frozen=True, array_like=True, tag=True):
    key: str


class DeclineCache(_Message, frozen=True, array_like=True, tag=True):
    """The engine has of itself what this source offers to its rank; the fields are those of `FetchCache`."""

    request_id: str
    transfer_id: str
    epoch: int
    token: str
    host: str
    port: int
    cluster: str
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


class EndedFetch(_Message, frozen=True, array_like=True, tag=True):
    """A fetch ended: everything landed, or the reason why not."""

    key: str
    reason: str
    received_bytes: int = 0
    seconds: float = 0.0


MoverCommand: TypeAlias = (
    AnnounceCache | ComputedParts | FinishCache | FailedCache | FetchCache | CancelFetch | DeclineCache | CopyDone
)
MoverReport: TypeAlias = MoverReady | MoverRefused | CopyRequest | EndedOffer | EndedFetch


def keyed(name: str, part: CacheSlice | None) -> str:
    """Return a name for one slice of what is named; of all of it the name itself."""
    return name if part is None else f"{name}/{part.rank}"


encode = msgspec.msgpack.Encoder().encode
decode_for_mover = msgspec.msgpack.Decoder(MoverCommand).decode
decode_from_mover = msgspec.msgpack.Decoder(MoverReport).decode
