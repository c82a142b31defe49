"""The other direction: a giver borrows a longer cache from its taker, over links that cut, damage and repeat, through
every codec, and from takers that lie. What can be mended ends with every bit in its place on both sides; whatever else
ends both directions at once, and nothing borrowed is used before it is whole.
"""

import itertools
import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import pytest
import torch

from prfaas.errors import PeerError
from prfaas.routing.compression import WireCodec
from prfaas.wire.codecs import Codec
from prfaas.wire.frames import DATA_KINDS, TO_GIVER, Kind
from prfaas.wire.receipt import Receipt
from prfaas.wire.transfer import Manifest
from prfaas_worker.transfer import sender
from prfaas_worker.transfer.codecs import DECODABLE
from prfaas_worker.transfer.intake import Intake
from prfaas_worker.transfer.layout import Place, block_frames, hidden_frame, prefix_frames, state_frames
from prfaas_worker.transfer.outgoing import Outgoing
from prfaas_worker.transfer.packing import Packer

from ..unit.worker.transfer_bench import (
    ATTENTION,
    HIDDEN,
    LINEAR,
    TRAFFIC,
    Model,
    Port,
    Taking,
    assert_same_bits,
    bits_of,
    eventually,
    fill,
    transfer_threads,
)
from ..unit.worker.transfer_proxy import (
    HEADER_FIELDS,
    Change,
    CutError,
    Proxy,
    Seen,
    as_it_is,
    flip_at_random,
    flip_once,
    flipped,
    forged,
    resealed,
)

LENT = Model((LINEAR, ATTENTION, LINEAR, ATTENTION), 320)
"""What the taker has: five pages, and the state at their end."""
WHOLE = Model(LENT.layers, 500)
FUZZED_LOANS = 60
FRAMES = (Kind.STATE, Kind.BLOCK, Kind.STATE, Kind.BLOCK)
TAKER_SAYS = (Kind.HELLO, *FRAMES, Kind.DONE, Kind.FREED)
GIVER_SAYS = (Kind.WELCOME, Kind.ACK, *FRAMES, Kind.HIDDEN, Kind.DONE)
"""Before the taker has everything."""


pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture(scope="module")
def one_port() -> Port:
    return Port(WHOLE)


@pytest.fixture
def port(one_port: Port) -> Iterator[Port]:
    one_port.renew()
    yield one_port
    one_port.settle()


def cache(seed: int) -> Place:
    place = WHOLE.reserved()
    fill(place, seed)
    return place


HELD, COMPUTED = cache(1), cache(2)


class Loan(NamedTuple):
    """A transfer whose giver borrows first, and where what it borrows lands."""

    taking: Taking
    intake: Intake
    borrowed: Place

    def assert_whole(self, held: Place | None = None) -> None:
        """What was lent is at the giver, and what was computed on it at the taker, bit by bit."""
        self.taking.whole()
        assert_same_bits(LENT, self.borrowed, held or HELD)
        assert_same_bits(WHOLE, self.taking.place, COMPUTED, LENT.tokens)


def lend(
    port: Port, at: tuple[str, int], handle: int = 1, codec: WireCodec = "none", held: Place | None = None
) -> Loan:
    """Have a giver borrow all that the taker has, and then send the rest as an engine would that computes on it."""
    offer, grant = port.grant(handle, start_token=LENT.tokens, lend_tokens=LENT.tokens)
    wanted = msgspec.structs.replace(offer.manifest, start_token=0, end_token=LENT.tokens, hidden_size=0)
    place, borrowed = WHOLE.reserved(), WHOLE.reserved()
    held = held or HELD
    for ours, theirs in ((place.memory.pages, held.memory.pages), (place.memory.slots, held.memory.slots)):
        ours.copy_(theirs)
    receipt = Receipt(wanted, DECODABLE, TO_GIVER, threading.Lock())
    intake = Intake(receipt, borrowed, lambda _count: None, offer.silent_seconds, TRAFFIC.memory)
    computes = threading.Lock()

    def compute() -> None:
        if computes.acquire(blocking=False):  # each connection that finds it whole says so
            offer.computing()
            for layer in range(len(WHOLE.layers)):
                for frame in block_frames(offer.manifest, COMPUTED, layer, (LENT.tokens, WHOLE.tokens)):
                    offer.put(frame)
                for frame in state_frames(offer.manifest, COMPUTED, layer):
                    offer.put(frame)
            offer.put(hidden_frame(offer.manifest, HIDDEN))
            offer.computed(0.0)

    intake.on_whole = compute

    def outgoing(manifest: Manifest) -> Outgoing:
        assert manifest == wanted
        made = Outgoing(manifest.address, flags=TO_GIVER)
        for frame in prefix_frames(manifest, place):
            made.put(frame)
        made.finish(0.0)
        return made

    traffic = TRAFFIC._replace(packer=Packer(codec, TRAFFIC.monitor))
    taking = port.take(offer, grant, at=at, place=place, traffic=traffic, lend=outgoing)
    offer.borrow(intake)
    return Loan(taking, intake, borrowed)


def assert_mended(port: Port, up: Change = as_it_is, down: Change = as_it_is) -> int:
    """Both directions get through such a link. Returns how many connections it took."""
    with Proxy(port.address, down, up) as proxy:
        loan = lend(port, proxy.address)
        loan.assert_whole()
        assert port.ends()
        port.settle()
    port.assert_ended_once(delivered=1)
    return proxy.connections


def is_lent(seen: Seen) -> bool:
    return seen.header.kind in DATA_KINDS and bool(seen.header.flags & TO_GIVER)


def cut_at(at: int, *, inside: bool, cut: list[Kind]) -> Change:
    """Cut the first connection before or inside its word `at`; a KEEP_ALIVE comes when it comes, and is none."""
    words = itertools.count()

    def change(seen: Seen) -> list[bytes]:
        if seen.connection == 0 and seen.header.kind != Kind.KEEP_ALIVE and next(words) == at:
            cut.append(seen.header.kind)
            raise CutError(seen.raw[: len(seen.raw) // 2] if inside else b"")
        return [seen.raw]

    return change


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("at", range(len(TAKER_SAYS)))
def test_a_loan_that_is_cut_at_any_boundary_or_inside_any_frame_goes_on_where_it_was(port: Port, at: int, inside: bool):
    cut: list[Kind] = []
    assert assert_mended(port, cut_at(at, inside=inside, cut=cut)) == 2
    assert cut == [TAKER_SAYS[at]]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("at", range(len(GIVER_SAYS)))
def test_what_the_giver_says_meanwhile_may_be_cut_too(port: Port, at: int, inside: bool):
    cut: list[Kind] = []
    assert assert_mended(port, down=cut_at(at, inside=inside, cut=cut)) == 2
    assert cut == [GIVER_SAYS[at]]


@pytest.mark.parametrize("kind", [Kind.BLOCK, Kind.STATE, Kind.DONE, Kind.FREED])
@pytest.mark.parametrize("field", HEADER_FIELDS)
def test_a_flipped_bit_in_what_is_lent_costs_its_connection_alone(port: Port, field: str, kind: Kind):
    assert assert_mended(port, flip_once(kind, HEADER_FIELDS[field])) == 2


@pytest.mark.parametrize("seed", range(4))
def test_bits_flipped_at_random_in_both_directions_are_mended(port: Port, seed: int):
    either = flip_at_random(seed, times=6, chance=0.3, spared=(Kind.ACK, Kind.FREED))
    assert assert_mended(port, either, either) > 1


@pytest.mark.parametrize("at", range(1, 5))
def test_a_lent_frame_that_comes_twice_ends_the_transfer(port: Port, at: int):
    def up(seen: Seen) -> list[bytes]:
        return [seen.raw, seen.raw] if (seen.connection, seen.frame) == (0, at) else [seen.raw]

    assert "repeats sequence number" in assert_refused(port, up)


def assert_refused(port: Port, up: Change) -> str:
    """Such a loan is never whole, nothing is computed on it, and both sides hear why."""
    with Proxy(port.address, up=up) as proxy:
        loan = lend(port, proxy.address)
        error = loan.taking.failure()
        assert isinstance(error, PeerError)
        assert not loan.intake.is_whole
        assert not loan.taking.receipt.received
        assert port.ends()
    port.assert_ended_once(failed=1)
    eventually(lambda: not transfer_threads())
    return str(error)


def test_what_somebody_else_sealed_anew_is_found_by_the_digest_over_all(port: Port):
    def up(seen: Seen) -> list[bytes]:
        if (seen.connection, seen.frame) != (0, 2):
            return [seen.raw]
        return [resealed(seen._replace(raw=flipped(seen.raw, len(seen.raw) - 1)))]

    assert "digest over all" in assert_refused(port, up)


def test_cache_that_travels_the_wrong_way_is_refused(port: Port):
    def up(seen: Seen) -> list[bytes]:
        return [resealed(seen, flags=0) if is_lent(seen) else seen.raw]

    assert "wrong direction" in assert_refused(port, up)


def numbers() -> Place:
    """A cache of numbers as models compute them: random bits do not compress, nor have they bounds."""
    place, rng = WHOLE.reserved(), torch.Generator().manual_seed(5)
    for layer, spec in enumerate(WHOLE.layers):
        tensors = place.memory.rows(layer) if spec.rows else place.memory.states(layer)
        for tensor in tensors.values():
            tensor.normal_(generator=rng)
    return place


@pytest.mark.parametrize(("codec", "used"), [("none", set()), ("lossless", {1}), ("int8", {2})])
def test_a_loan_goes_through_the_codec_of_its_link(port: Port, codec: WireCodec, used: set[int]):
    held = numbers()
    loan = lend(port, port.address, codec=codec, held=held)
    if codec != "int8":
        loan.assert_whole(held)
    loan.taking.whole()
    assert port.ends()
    assert loan.intake.codecs - {Codec.NONE} == used, "small states do not shrink"
    assert loan.intake.receipt.is_exact == (codec != "int8"), "what is computed on it stays out of prefix caches"
    for found, wanted in zip(bits_of(LENT, loan.borrowed), bits_of(LENT, held), strict=True):
        assert torch.allclose(found.view(torch.float32), wanted.view(torch.float32), atol=0.05)


def test_a_giver_that_reads_no_codec_is_lent_none(port: Port, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sender, "DECODABLE", (Codec.NONE,))
    loan = lend(port, port.address, codec="lossless", held=numbers())
    loan.taking.whole()
    assert port.ends()
    assert loan.intake.codecs == {Codec.NONE}


def test_a_taker_that_forges_what_it_lends_never_makes_a_giver_compute_on_anything_else(port: Port):
    rng, ends, left_out = random.Random(13), Counter[str](), [False]

    def up(seen: Seen) -> list[bytes]:
        if rng.random() > 0.12 or not (is_lent(seen) or seen.header.kind in (Kind.DONE, Kind.FREED)):
            return [seen.raw]
        strange = forged(rng, seen)
        chosen = rng.choice([[strange], *[[strange, seen.raw], [seen.raw, strange]] * 2])
        left_out[0] |= len(chosen) == 1
        return chosen

    with Proxy(port.address, up=up) as proxy:
        for handle in range(FUZZED_LOANS):
            left_out[0] = False
            loan = lend(port, proxy.address, handle)
            try:
                # What was left out is waited for as long as the link is alive.
                loan.taking.whole(seconds=0.5 if left_out[0] else 20)
            except AssertionError:
                assert left_out[0], "it waits for nothing"
                loan.taking.pull.cancel()
                loan.taking.failure()
                ends["waited for what was left out"] += 1
            except PeerError:
                ends["refused"] += 1
            else:
                ends["whole"] += 1
                loan.assert_whole()
            if loan.intake.is_whole:
                assert_same_bits(LENT, loan.borrowed, HELD)
            port.offers.cancel(loan.intake.receipt.expected.transfer_id)
            assert port.ends(handle)
    print(ends)
    assert ends["whole"]
    assert ends["refused"]
    eventually(lambda: not [name for name in transfer_threads() if name == "fetch-data"])
