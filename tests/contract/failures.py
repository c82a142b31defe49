"""What may break between two engines, and what stays true: the answer is that of one engine, a cache is used whole or
not at all, one sentence says why it did not come, and both hold nothing afterwards.

Each is a function of a bench, named as its claim, so that every kind of engine is held to it. A proxy before the
source's data port finds the moment: it sees the frames.
"""

import threading
from collections.abc import Sequence
from contextlib import suppress

import pytest
from msgspec.structs import replace

from prfaas.cli.contract.calls import Running
from prfaas.cli.contract.checks import EnginePair, text_of
from prfaas.errors import UnreachableError
from prfaas.wire.frames import DATA_KINDS, Kind
from prfaas_transfer.leases import ANNOUNCED_SECONDS

from ..unit.worker.transfer_proxy import Change, CutError, Proxy, Seen, at_frame, cut
from ..waiting import PATIENCE_SECONDS, assert_freed, eventually
from .bench import Bench, Instance, listener

LENGTH = 6000


def damaged(frame: Seen) -> Sequence[bytes]:
    return [frame.raw[:-1] + bytes([frame.raw[-1] ^ 1])]


def legs(pair: EnginePair, proxy: Proxy, prompt: str) -> tuple[Running, Running]:
    """Send both legs; the destination reaches the source through a proxy."""
    return pair.hand_off(prompt, replace(pair.name_transfer(), host=proxy.address[0], port=proxy.address[1]))


def hand_off(bench: Bench, down: Change, source: Instance | None = None, *, is_fetched: bool) -> None:
    """Hand a prompt off over such a link: the answer is right, and a sentence says if the cache did not come."""
    prompt, before, pair = text_of(LENGTH), bench.destination.sentences(), bench.pair(source)
    with Proxy((source or bench.source).address, down) as proxy:
        given, answered = legs(pair, proxy, prompt)
        pair.require_same(answered.answer(), prompt, is_fetched=is_fetched)
        with suppress(UnreachableError):  # a source that died
            given.answer()
        wanted = before + (not is_fetched)
        eventually(lambda: bench.destination.sentences() == wanted, "one sentence says that it was computed")
        pair.destination.wait_idle()
        if source is None:
            pair.source.wait_idle()


def a_connection_that_is_cut_continues_where_it_was(bench: Bench) -> None:
    hand_off(bench, at_frame(3, cut), is_fetched=True)


def a_frame_that_is_damaged_is_sent_again(bench: Bench) -> None:
    hand_off(bench, at_frame(2, damaged), is_fetched=True)


def a_link_that_damages_everything_costs_time_only(bench: Bench) -> None:
    hand_off(bench, lambda one: damaged(one) if one.header.kind in DATA_KINDS else [one.raw], is_fetched=False)


def a_source_that_falls_silent_is_given_up(bench: Bench) -> None:
    silent, over = threading.Event(), threading.Event()

    def fall_silent(frame: Seen) -> Sequence[bytes]:
        if frame.header.kind in DATA_KINDS and frame.frame > 2:
            silent.set()
        if silent.is_set():  # on every connection from then on
            over.wait()
        return [frame.raw]

    prompt, before, pair = text_of(LENGTH), bench.destination.sentences(), bench.pair()
    with Proxy(bench.source.address, fall_silent) as proxy:
        try:
            pair.require_same(legs(pair, proxy, prompt)[1].answer(), prompt, is_fetched=False)
        finally:
            over.set()
    assert bench.destination.sentences() == before + 1
    pair.wait_idle()


def a_source_that_dies_while_it_sends_costs_time_only(bench: Bench, frame: int = 2, kinds=DATA_KINDS) -> None:
    victim = bench.start()

    def die(_frame: Seen) -> Sequence[bytes]:
        victim.kill_mover()  # it would send the rest before it notices the engine's end
        victim.kill()
        raise CutError

    hand_off(bench, at_frame(frame, die, kinds), victim, is_fetched=False)


def a_source_that_dies_before_it_says_that_all_was_sent_costs_time_only(bench: Bench) -> None:
    a_source_that_dies_while_it_sends_costs_time_only(bench, 1, frozenset({Kind.DONE}))


def a_mover_that_dies_costs_time_only_and_another_starts(bench: Bench) -> None:
    pair = bench.pair()
    for side in (bench.source, bench.destination):

        def kill(_frame: Seen, side: Instance = side) -> Sequence[bytes]:
            side.kill_mover()
            raise CutError

        hand_off(bench, at_frame(2, kill), is_fetched=False)
        eventually(lambda at=side.address: listener(*at), "another mover listens")
        eventually(lambda: pair.hand_off(text_of(300))[1].answer().has_fetched, "a cache crosses again")
        # A source of which no mover told the destination's end keeps its cache for its lease.
        assert_freed(
            lambda: not pair.source.held() and not pair.destination.held(),
            "both hold nothing",
            ANNOUNCED_SECONDS + PATIENCE_SECONDS,
        )


def a_destination_that_dies_leaves_nothing_at_its_source(bench: Bench) -> None:
    victim = bench.start()

    def die(_frame: Seen) -> Sequence[bytes]:
        victim.kill()
        raise CutError

    with Proxy(bench.source.address, at_frame(2, die)) as proxy:
        given, answered = legs(bench.pair(destination=victim), proxy, text_of(LENGTH))
        with pytest.raises(UnreachableError):
            answered.answer()
        given.answer()
    bench.source.engine.wait_idle()


FAILURES = (
    a_connection_that_is_cut_continues_where_it_was,
    a_frame_that_is_damaged_is_sent_again,
    a_link_that_damages_everything_costs_time_only,
    a_source_that_falls_silent_is_given_up,
    a_source_that_dies_while_it_sends_costs_time_only,
    a_source_that_dies_before_it_says_that_all_was_sent_costs_time_only,
    a_mover_that_dies_costs_time_only_and_another_starts,
    a_destination_that_dies_leaves_nothing_at_its_source,
)
