"""Both ends of a transfer over real sockets, without engines: caches with random content, a data port, destinations."""

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from prfaas.errors import PrfaasError
from prfaas.wire.engine import TransferSubject
from prfaas.wire.frames import HEADER_BYTES, Address, FrameHeader, Kind, parse_header
from prfaas.wire.prefill import LegParams, new_transfer
from prfaas.wire.receive_ledger import ReceiveLedger
from prfaas.wire.transfer import Done, Hello, Manifest, message_frame
from prfaas_transfer import pull
from prfaas_transfer.cache import CacheLayout
from prfaas_transfer.compression import DECODABLE
from prfaas_transfer.data_port import DataPort, listen
from prfaas_transfer.leases import UNWANTED, Offer, Offers
from prfaas_transfer.limits import Traffic, unlimited
from prfaas_transfer.pull import Connections, FetchContext, Pull, SourceAddress
from prfaas_transfer.receive import ReceiveState
from prfaas_transfer.tls import PeerAuth
from prfaas_transfer.transfer_log import TransferCounters
from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.cache.staging import Staging
from prfaas_worker.cache.transfer_frames import CachePlace, block_frames, layer_groups, state_frames
from prfaas_worker.cache_spec import CacheGeometry, LayerSpec, TensorSpec

from ...waiting import PATIENCE_SECONDS, NotInTime, eventually, take_next

FINGERPRINT = "f" * 64
LINEAR = LayerSpec(
    state=(
        TensorSpec("recurrent", ("head", "key", "value"), (2, 4, 4), "float32"),
        TensorSpec("conv", ("channel", "tap"), (8, 3), "float32"),
    )
)
ATTENTION = LayerSpec(rows=(TensorSpec("latent", ("token", "row"), (24,), "float32"),))
WIDE = LayerSpec(rows=(TensorSpec("latent", ("token", "row"), (3072,), "float32"),))


class Model(NamedTuple):
    """Layers of a cache, and the tokens of a prompt."""

    layers: tuple[LayerSpec, ...] = (LINEAR, LINEAR, ATTENTION, LINEAR, ATTENTION)
    tokens: int = 1000

    @property
    def pages(self) -> int:
        return -(-self.tokens // 64)

    @property
    def nbytes(self) -> int:
        """Bytes of a prompt's cache."""
        groups = layer_groups(self.layers)
        rows = sum(len(group.layers) * group.nbytes for group in groups if group.kind == "attention")
        states = sum(len(group.layers) * group.nbytes for group in groups if group.kind == "linear")
        return rows * self.tokens + states

    def reserved(self, *pages: int) -> CachePlace:
        """Separate memory with room for one sequence, in these pages or in order."""
        memory = CacheMemory(CacheGeometry(self.layers), num_pages=self.pages + 3, num_slots=2, max_context=self.tokens)
        memory.pages.zero_()
        memory.slots.zero_()
        return CachePlace(memory, 1, pages or range(self.pages))

    def filled(self) -> CachePlace:
        """A cache with random content everywhere, its pages in no order."""
        place = self.reserved(*(n * 7 % (self.pages + 3) for n in range(self.pages)))
        place.memory.pages.random_(0, 256, generator=torch.Generator().manual_seed(3))
        place.memory.slots.random_(0, 256, generator=torch.Generator().manual_seed(4))
        return place


TRAFFIC = unlimited()
SMALL = Model()
pull.NEAR_STRIPES = pull.FAR_STRIPES  # loopback is near; these tests want what is far
LARGE = Model((LINEAR, WIDE, WIDE), 640)
"""Large enough for four connections: 15 MiB."""


def fill(place: CachePlace, seed: int) -> None:
    """Put random content into a sequence's pages and slot, always the same for a seed."""
    rng = torch.Generator().manual_seed(seed)
    for page in place.pages:
        place.memory.pages[page].random_(0, 256, generator=rng)
    place.memory.slots[place.slot].random_(0, 256, generator=rng)


def through_staging(place: CachePlace) -> CachePlace:
    """The same cache, reached as an accelerator's is."""
    return place._replace(staging=Staging(place.memory))


def bits_of(model: Model, place: CachePlace, start_token: int = 0) -> list[torch.Tensor]:
    """Rows from a token on and states of every layer, as bits: random floats may be no numbers."""
    found: list[torch.Tensor] = []
    for index, spec in enumerate(model.layers):
        if spec.rows:
            rows = place.memory.rows(index)["latent"][list(place.pages)].flatten(0, 1)[start_token : model.tokens]
            found.append(rows.contiguous().view(torch.int32))
        if spec.state:
            found += [tensor[place.slot].view(torch.int32) for tensor in place.memory.states(index).values()]
    return found


def assert_same_bits(model: Model, found: CachePlace, wanted: CachePlace, start_token: int = 0) -> None:
    mine, theirs = bits_of(model, found, start_token), bits_of(model, wanted, start_token)
    assert len(mine) == len(theirs) > 0
    for ours, other in zip(mine, theirs, strict=True):
        assert torch.equal(ours, other)


def layout_of(model: Model) -> CacheLayout:
    """What both ends of a transfer agree on."""
    return CacheLayout(FINGERPRINT, layer_groups(model.layers))


class Port:
    """A data port with its offers, and the handles of those that ended."""

    def __init__(self, model: Model = SMALL, capacity: int = 4, traffic: Traffic | None = None):
        listener = listen("127.0.0.1", 0)
        self.model = model
        self.layout = layout_of(model)
        self.address: tuple[str, int] = listener.getsockname()
        self.on_end: Callable[[int], None] = lambda _handle: None
        self.offers = Offers(capacity, self._ended)
        DataPort(listener, self.offers, traffic or TRAFFIC)
        self.takings: list[Taking] = []
        self.renew()

    def _ended(self, handle: int) -> None:
        self.on_end(handle)

    def renew(self) -> None:
        """Start with fresh counters and no history; threads of a port live as long as the process."""
        for offer in list(self.offers._offers.values()):  # a test that failed left them
            self.cancel(offer)
        self.offers.counters = TransferCounters()
        self.ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.on_end = self.ended.put

    def settle(self) -> None:
        """Close what destinations kept."""
        while self.takings:
            self.takings.pop().close()

    def cancel(self, offer: Offer) -> None:
        """End an offer that nobody wants."""
        self.offers.end(offer, "cancelled", UNWANTED)

    def take(self, leg: LegParams, **how: Any) -> "Taking":
        """Start a destination; see Taking."""
        self.takings.append(Taking(self, leg, **how))
        return self.takings[-1]

    def outcomes(self) -> dict[str, int]:
        return {outcome: count for _, outcome, count in self.offers.counters.snapshot()[0]}

    def announce(self, handle: int = 1) -> tuple[Offer, LegParams]:
        """Offer a prompt's cache, and return what its destination knows of the transfer."""
        leg = LegParams(role="destination", host="127.0.0.1", port=self.address[1], **new_transfer())
        manifest = manifest_of(self.model, leg)
        return self.offers.announce(TransferSubject(handle, "r"), manifest, leg.token), leg

    def ends(self, handle: int = 1) -> bool:
        """Whether the offer with this handle is the next that ends."""
        return take_next(self.ended, "an offer ends") == handle

    def assert_ended_once(self, **outcomes: int) -> None:
        """No offer is open, nothing ended that was not expected, and nothing twice."""
        assert self.outcomes() == outcomes
        assert self.ended.empty()


def put_chunk(model: Model, offer: Offer, cache: CachePlace, start: int, end: int) -> None:
    """Put what an engine puts for one chunk of the prompt."""
    mark = cache.staging.mark() if cache.staging else None
    for index in range(len(model.layers)):
        for frame in block_frames(offer.manifest, cache, index, (start, end), mark):
            offer.put(frame)
        if end == offer.manifest.end_token:
            for frame in state_frames(offer.manifest, cache, index, mark):
                offer.put(frame)


def compute(model: Model, offer: Offer, cache: CachePlace, step: int = 300) -> None:
    """Put what an engine puts for a whole prompt."""
    for start in range(0, model.tokens, step):
        put_chunk(model, offer, cache, start, min(model.tokens, start + step))
    offer.finish_computing(0.25)


class Taking:
    """A destination in its own thread. Its connections are its own too by default."""

    def __init__(
        self,
        port: Port,
        leg: LegParams,
        *,
        at: tuple[str, int] | None = None,
        connections: Connections | None = None,
        staged: bool = False,
        place: CachePlace | None = None,
        traffic: Traffic | None = None,
    ):
        traffic = traffic or TRAFFIC
        host, number = at or port.address
        self.source = SourceAddress(host, number)
        self.connections = connections or Connections(PeerAuth())
        place = place or port.model.reserved()
        self.place = through_staging(place) if staged else place
        self.counters = TransferCounters()
        self.ledger = ReceiveLedger(manifest_of(port.model, leg), DECODABLE, guard=threading.Lock())
        silent_seconds = partial(self.connections.silent_seconds, self.source)
        self.state = ReceiveState(self.ledger, self.place, self.counters.count_received, silent_seconds, traffic.memory)
        shared = FetchContext(port.layout, self.connections, self.counters, traffic)
        self.pull = Pull(shared, self.source, leg.token, self.state)
        self.error: PrfaasError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.pull.run()
        except PrfaasError as error:
            self.error = error

    def whole(self, seconds: float = PATIENCE_SECONDS) -> Done:
        """Wait for the end, which must be good."""
        self._join(seconds)
        if self.error is not None:
            raise self.error
        return self.ledger.require_whole()

    def failure(self, seconds: float = PATIENCE_SECONDS) -> PrfaasError:
        """Wait for the end, which must be an error."""
        self._join(seconds)
        assert self.error is not None
        return self.error

    def close(self) -> int:
        """Close the connections that were kept for the next transfer, and count them."""
        eventually(lambda: "fetch-data" not in transfer_threads(), "no destination receives")
        closed = 0
        while stream := self.connections.take(self.source):
            self.connections.drop(self.source, stream)
            closed += 1
        return closed

    def _join(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise NotInTime("the destination hangs")


def address_of(leg: LegParams) -> Address:
    return Address(leg.transfer_id, leg.epoch)


def manifest_of(model: Model, leg: LegParams) -> Manifest:
    """What both ends expect to cross."""
    return layout_of(model).manifest(address_of(leg), 0, model.tokens)


def hello(leg: LegParams, **fields: object) -> bytes:
    return message_frame(Kind.HELLO, address_of(leg), Hello(**({"token": leg.token} | fields)))  # type: ignore[arg-type]


def connect(port: Port, first: bytes) -> socket.socket:
    """A destination by hand: a connection on which something was sent."""
    sock = socket.create_connection(port.address, PATIENCE_SECONDS)
    sock.sendall(first)
    return sock


def frames(sock: socket.socket) -> Iterator[tuple[FrameHeader, bytes]]:
    """Read frames until the other side closes."""
    while raw := exactly(sock, HEADER_BYTES):
        header = parse_header(raw)
        yield header, exactly(sock, header.payload_bytes)


def exactly(sock: socket.socket, count: int) -> bytes:
    """Read so many bytes, or all until the end."""
    data = b""
    while len(data) < count and (piece := sock.recv(count - len(data))):
        data += piece
    return data


def kinds(sock: socket.socket, count: int | None = None) -> list[Kind]:
    """Kinds of the next frames, or of all until the end; KEEP_ALIVEs left out."""
    found: list[Kind] = []
    for header, _ in frames(sock):
        if header.kind != Kind.KEEP_ALIVE:
            found.append(header.kind)
        if len(found) == count:
            break
    return found


def descriptors() -> int:
    """Count what this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def transfer_threads() -> list[str]:
    """Names of the threads that serve or make transfers now."""
    names = ("data-send", "fetch", "fetch-data")
    return [thread.name for thread in threading.enumerate() if thread.name in names]
