"""The data port between real sockets: a cache arrives bit for bit while it is still being filled, strangers learn
nothing, and every way a transfer can end frees the sender's side, once.
"""

import queue
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import NamedTuple

import pytest
import torch

from prfaas.errors import CapacityError, PeerError, UnreachableError
from prfaas.wire.prefill import PrefillGrant
from prfaas.wire.receipt import Receipt
from prfaas.wire.transfer import (
    HEADER_BYTES,
    Address,
    Failure,
    Hello,
    Kind,
    decode_message,
    message_frame,
    parse_header,
)
from prfaas_worker.cache.memory import CacheGeometry, CacheMemory
from prfaas_worker.models.base import LayerSpec, TensorSpec
from prfaas_worker.transfer import offers as offers_module
from prfaas_worker.transfer.counters import TransferCounters
from prfaas_worker.transfer.fetch import Fetched, Reception
from prfaas_worker.transfer.layout import Place, block_frames, hidden_frame, layer_groups, state_frames
from prfaas_worker.transfer.offers import Offer, Offers, Prompt
from prfaas_worker.transfer.sender import Sender, listen
from prfaas_worker.transfer.staging import Staging

TOKENS = 1000
LINEAR = LayerSpec(
    state=(
        TensorSpec("recurrent", ("head", "key", "value"), (2, 4, 4), "float32"),
        TensorSpec("conv", ("channel", "tap"), (8, 3), "float32"),
    ),
)
ATTENTION = LayerSpec(rows=(TensorSpec("latent", ("token", "row"), (24,), "float32"),))
LAYERS = (LINEAR, LINEAR, ATTENTION, LINEAR, ATTENTION)


class Port(NamedTuple):
    """A sender with its offers, and the handles of those that ended."""

    address: tuple[str, int]
    offers: Offers
    sender: Sender
    ended: queue.SimpleQueue[int]

    def outcomes(self) -> dict[str, int]:
        return {outcome: count for _, outcome, count in self.offers.counters.snapshot()[0]}


@pytest.fixture(scope="module")
def sender_port() -> Port:
    """One sender for all tests here: its threads live as long as the process."""
    listener = listen("127.0.0.1", 0)
    address = listener.getsockname()
    offers = Offers(("f" * 64, layer_groups(LAYERS), 16), address[1], capacity=4)
    return Port(address, offers, Sender(listener, offers), queue.SimpleQueue())


@pytest.fixture
def port(sender_port: Port) -> Port:
    """The sender with fresh counters and no history."""
    sender_port.offers.counters = TransferCounters()
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    sender_port.offers.on_end = ended.put
    return sender_port._replace(ended=ended)


PAGES = -(-TOKENS // 64)


def reserved_cache(*pages: int) -> Place:
    """Memory of its own with room for one sequence in these pages, in order unless they are given."""
    memory = CacheMemory(CacheGeometry(LAYERS), num_pages=PAGES + 3, num_slots=2, max_context=TOKENS)
    return Place(memory, 1, pages or range(PAGES))


def filled_cache() -> Place:
    """A cache with random content everywhere, its pages in no order."""
    place = reserved_cache(*(n * 7 % (PAGES + 3) for n in range(PAGES)))
    place.memory.pages.random_(0, 256, generator=torch.Generator().manual_seed(3))
    place.memory.slots.random_(0, 256, generator=torch.Generator().manual_seed(4))
    return place


def through_staging(place: Place) -> Place:
    """The same cache, reached as an accelerator's is."""
    return place._replace(staging=Staging(place.memory))


def rows_of(place: Place, layer: int) -> torch.Tensor:
    """Rows of an attention layer, as bits: random floats may be no numbers."""
    rows = place.memory.rows(layer)["latent"][list(place.pages)].flatten(0, 1)[:TOKENS]
    return rows.contiguous().view(torch.int32)


def states_of(place: Place, layer: int) -> dict[str, torch.Tensor]:
    """States of a linear layer, as bits."""
    return {name: tensor[place.slot].view(torch.int32) for name, tensor in place.memory.states(layer).items()}


def put_chunk(offer: Offer, cache: Place, start: int, end: int) -> None:
    """Put what an engine puts for one chunk of the prompt."""
    mark = cache.staging.mark() if cache.staging else None
    for index in range(len(LAYERS)):
        for frame in block_frames(offer.manifest, cache, index, (start, end), mark):
            offer.mailbox.put(frame)
        if end == offer.manifest.end_token:
            for frame in state_frames(offer.manifest, cache, index, mark):
                offer.mailbox.put(frame)


def connect(port: Port, address: Address, token: str) -> socket.socket:
    sock = socket.create_connection(port.address, timeout=3)
    sock.sendall(message_frame(Kind.HELLO, address, Hello(token)))
    return sock


def address_of(grant: PrefillGrant) -> Address:
    return Address(grant.transfer_id, grant.epoch)


def frames(sock: socket.socket) -> Iterator[tuple[Kind, bytes]]:
    """Read frames until the sender closes."""
    while raw := sock.recv(HEADER_BYTES, socket.MSG_WAITALL):
        header = parse_header(raw)
        payload = sock.recv(header.payload_bytes, socket.MSG_WAITALL) if header.payload_bytes else b""
        yield header.kind, payload


def receive(
    port: Port, offer: Offer, grant: PrefillGrant, between: Callable[[], None], *, staged: bool = False
) -> tuple[Fetched, Place]:
    """Receive an offer; `between` runs once the connection stands."""
    cache = through_staging(reserved_cache()) if staged else reserved_cache()
    with closing(connect(port, address_of(grant), grant.token)) as sock:
        between()
        fetched = Reception(sock, Receipt(offer.manifest), cache, TransferCounters()).run()
        sock.sendall(message_frame(Kind.ACK, address_of(grant)))
        assert port.ended.get(timeout=3) == offer.prompt.handle
    return fetched, cache


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("connect_first", [True, False])
def test_a_cache_arrives_bit_for_bit_whether_the_receiver_comes_early_or_late(
    port: Port, connect_first: bool, staged: bool
):
    offer, grant = port.offers.grant(Prompt(1, "r", TOKENS, 0))
    cache, hidden = through_staging(filled_cache()) if staged else filled_cache(), torch.arange(16, dtype=torch.float32)

    def compute() -> None:
        offer.computing()
        for start in range(0, TOKENS, 300):
            put_chunk(offer, cache, start, min(TOKENS, start + 300))
        offer.mailbox.put(hidden_frame(offer.manifest, hidden))
        offer.computed(0.25)

    if not connect_first:
        compute()
    fetched, found = receive(port, offer, grant, compute if connect_first else lambda: None, staged=staged)
    assert torch.equal(fetched.hidden, hidden)
    for index, spec in enumerate(LAYERS):
        if spec.rows:
            assert torch.equal(rows_of(found, index), rows_of(cache, index))
        for name, tensor in states_of(cache, index).items():
            assert torch.equal(states_of(found, index)[name], tensor)
    assert fetched.done.prefill_seconds == 0.25
    assert fetched.received_bytes == fetched.done.payload_bytes == (2 * TOKENS * 24 + 3 * (32 + 24) + 16) * 4
    assert port.outcomes() == {"delivered": 1}
    assert port.offers.status(grant.transfer_id) is None


def test_rows_that_the_receiver_has_are_not_sent(port: Port):
    offer, grant = port.offers.grant(Prompt(1, "r", TOKENS, 800))
    cache = filled_cache()
    offer.computing()
    for start in range(0, TOKENS, 300):
        put_chunk(offer, cache, start, min(TOKENS, start + 300))
    offer.mailbox.put(hidden_frame(offer.manifest, torch.zeros(16)))
    offer.computed(0.0)
    fetched, found = receive(port, offer, grant, lambda: None)
    assert fetched.received_bytes == (2 * 200 * 24 + 3 * (32 + 24) + 16) * 4
    assert torch.equal(rows_of(found, 4)[800:], rows_of(cache, 4)[800:])


def test_frames_leave_while_later_ones_do_not_exist_yet(port: Port):
    offer, grant = port.offers.grant(Prompt(1, "r", TOKENS, 0))
    cache = filled_cache()
    with closing(connect(port, address_of(grant), grant.token)) as sock:
        found = frames(sock)
        assert next(found)[0] == Kind.MANIFEST
        offer.computing()
        put_chunk(offer, cache, 0, 300)
        kinds = [kind for kind, _ in (next(found), next(found))]
        assert kinds == [Kind.BLOCK, Kind.BLOCK]
    assert port.ended.get(timeout=3) == 1


def test_silence_is_filled_with_keep_alives(port: Port):
    _, grant = port.offers.grant(Prompt(1, "r", TOKENS, 0))
    with closing(connect(port, address_of(grant), grant.token)) as sock:
        sock.settimeout(0.9)  # a receiver gives up after 1.0 s
        found = frames(sock)
        began = time.monotonic()
        assert [next(found)[0] for _ in range(4)] == [Kind.MANIFEST, *[Kind.KEEP_ALIVE] * 3]
        assert time.monotonic() - began >= 0.5
    assert port.ended.get(timeout=3) == 1


@pytest.mark.parametrize("wrong", ["token", "epoch", "transfer"])
def test_a_stranger_gets_one_answer_whatever_is_wrong_and_harms_nothing(port: Port, wrong: str):
    offer, grant = port.offers.grant(Prompt(1, "r", TOKENS, 0))
    address = Address("0" * 32 if wrong == "transfer" else grant.transfer_id, grant.epoch + (wrong == "epoch"))
    with closing(connect(port, address, grant.token[:-1] if wrong == "token" else grant.token)) as sock:
        ((kind, payload),) = frames(sock)
    assert kind == Kind.ERROR
    message = payload.decode()
    assert "with this token and epoch: ended, expired or foreign" in message
    assert grant.token not in message
    status = port.offers.status(grant.transfer_id)
    assert status is not None
    assert not status.connected
    port.offers.end(offer, "cancelled")


def test_a_second_connection_is_turned_away_and_the_first_goes_on(port: Port):
    offer, grant = port.offers.grant(Prompt(1, "r", TOKENS, 0))
    with closing(connect(port, address_of(grant), grant.token)) as first:
        found = frames(first)
        assert next(found)[0] == Kind.MANIFEST
        with closing(connect(port, address_of(grant), grant.token)) as second:
            assert [kind for kind, _ in frames(second)] == [Kind.ERROR]
        offer.computing()
        put_chunk(offer, filled_cache(), 0, 10)
        assert next(kind for kind, _ in found if kind != Kind.KEEP_ALIVE) == Kind.BLOCK
    assert port.ended.get(timeout=3) == 1


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n" + bytes(200), bytes(HEADER_BYTES), b"\xff" * 500, b""])
def test_garbage_on_the_data_port_closes_that_connection_alone(port: Port, garbage: bytes):
    with socket.create_connection(port.address, timeout=4) as sock:
        sock.sendall(garbage)
        with suppress(OSError):  # unread garbage makes the close a reset
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(100) == b""
    assert port.outcomes() == {}


def test_a_receiver_that_leaves_while_p_still_computes_ends_the_offer_at_once(port: Port):
    offer, grant = port.offers.grant(Prompt(5, "r", TOKENS, 0))
    sock = connect(port, address_of(grant), grant.token)
    assert next(frames(sock))[0] == Kind.MANIFEST
    began = time.monotonic()
    sock.shutdown(socket.SHUT_RDWR)
    sock.close()
    assert port.ended.get(timeout=3) == 5
    assert time.monotonic() - began < 0.5
    assert port.outcomes() == {"failed": 1}
    put_chunk(offer, filled_cache(), 0, TOKENS)  # the engine has not heard yet: nothing is kept
    assert offer.mailbox.queued_bytes == 0


def test_a_cancelled_prefill_tells_its_receiver_why(port: Port):
    offer, grant = port.offers.grant(Prompt(1, "r", TOKENS, 0))
    with closing(connect(port, address_of(grant), grant.token)) as sock:
        reception = Reception(sock, Receipt(offer.manifest), reserved_cache(), TransferCounters())
        assert sock.recv(1, socket.MSG_PEEK)  # MANIFEST is there: the sender knows us
        port.offers.cancel(grant.transfer_id)
        with pytest.raises(PeerError, match="gave up: the prefill was cancelled"):
            reception.run()
    assert port.ended.get(timeout=3) == 1
    assert port.outcomes() == {"cancelled": 1}


def test_an_error_of_the_engine_reaches_the_receiver(port: Port):
    offer, grant = port.offers.grant(Prompt(1, "r", TOKENS, 0))
    offer.fail("out of room")
    with closing(connect(port, address_of(grant), grant.token)) as sock:
        errors = [payload for kind, payload in frames(sock) if kind == Kind.ERROR]
    header = parse_header(message_frame(Kind.ERROR, address_of(grant), Failure(""))[:HEADER_BYTES])
    assert [decode_message(header, payload, Failure).message for payload in errors] == ["out of room"]
    assert port.outcomes() == {"failed": 1}


def test_an_acknowledgement_of_another_epoch_is_none(port: Port):
    offer, grant = port.offers.grant(Prompt(1, "r", TOKENS, TOKENS - 1))
    offer.computing()
    offer.computed(0.0)
    with closing(connect(port, address_of(grant), grant.token)) as sock:
        assert next(kind for kind, _ in frames(sock) if kind == Kind.DONE)
        sock.sendall(message_frame(Kind.ACK, Address(grant.transfer_id, grant.epoch + 1)))
        assert port.ended.get(timeout=3) == 1
    assert port.outcomes() == {"failed": 1}


def test_an_offer_that_nobody_takes_expires(port: Port, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offers_module, "LEASE_SECONDS", 0)
    _, grant = port.offers.grant(Prompt(9, "r", TOKENS, 0))
    assert port.ended.get(timeout=3) == 9
    assert port.outcomes() == {"expired": 1}
    with closing(connect(port, address_of(grant), grant.token)) as sock:
        assert [kind for kind, _ in frames(sock)] == [Kind.ERROR]


def test_no_more_offers_are_open_than_there_is_room_for(port: Port):
    granted = [port.offers.grant(Prompt(n, "r", TOKENS, 0)) for n in range(4)]
    with pytest.raises(CapacityError, match="4 prefills"):
        port.offers.grant(Prompt(4, "r", TOKENS, 0))
    assert len({grant.token for _, grant in granted}) == len({grant.epoch for _, grant in granted}) == 4
    for offer, grant in granted:
        port.offers.cancel(grant.transfer_id)
        port.offers.cancel(grant.transfer_id)  # the second one counts for nothing
        assert offer.mailbox.queued_bytes == 0
    assert port.outcomes() == {"cancelled": 4}
    port.offers.end(port.offers.grant(Prompt(5, "r", TOKENS, 0))[0], "cancelled")


def test_a_sender_that_closes_early_is_an_error_for_the_receiver():
    offer, _ = Offers(("f" * 64, layer_groups(LAYERS), 16), 1, 1).grant(Prompt(1, "r", TOKENS, 0))
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        theirs.sendall(message_frame(Kind.MANIFEST, offer.manifest.address, offer.manifest)[:-1])
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(UnreachableError, match="before everything was sent"):
            Reception(ours, Receipt(offer.manifest), reserved_cache(), TransferCounters()).run()
    offer.mailbox.close()
