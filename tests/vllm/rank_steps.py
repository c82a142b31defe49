"""Runs in vLLM's own environment: the transfers of one rank, with a mover that only records its calls.

Prints JSON: of each test below how it failed, empty if it did not.
"""

import json
import multiprocessing
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from kda_caches import DESTINATION_BLOCKS, GOAL, SOURCE_BLOCKS, Side
from rank_caches import Rank, refuse_exchange

from prfaas.errors import PeerError
from prfaas.wire.prefill import LegParams
from prfaas_transfer.mover.messages import CopyPart, EndedFetch
from prfaas_vllm import blocks, connector, device, transfers
from prfaas_vllm import destination as destination_side
from prfaas_vllm import source as source_side
from prfaas_vllm.ranks import RankOf
from prfaas_vllm.scheduling import DeclineFetch, Fetching, SourceStart, SourceStep, StepPlan
from prfaas_vllm.transfers import RankTransfers

KEY, OTHER = "0" * 32, "1" * 32
LEG = {"transfer_id": KEY, "epoch": 7, "token": "secret", "host": "127.0.0.1", "port": 9000}
HALVES = [f"{KEY}/0", f"{KEY}/1"]
LINEAR, ATTENTION = 0, 1
BLOCKS = tuple(SOURCE_BLOCKS.values())
STATES = [CopyPart(LINEAR, layer) for layer in (0, 1, 2, 4)]
NOTHING = (set(), set(), set())
LOST = "the request has lost its memory"


class Recorder:
    """A mover that records its calls, with the values."""

    def __init__(self, _options: object, _memory: object, on_offer_end: Callable, on_fetch_end: Callable):
        self.calls: list[tuple[Any, ...]] = []
        self.on_offer_end, self.on_fetch_end = on_offer_end, on_fetch_end

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *values: self.calls.append((name, *values))

    def begin_step(self) -> None: ...

    def end_step(self) -> None: ...

    def take(self, name: str) -> list[tuple[Any, ...]]:
        """The values of all calls of one name; they are forgotten."""
        found = [call[1:] for call in self.calls if call[0] == name]
        self.calls = [call for call in self.calls if call[0] != name]
        return found


transfers.MoverClient = Recorder  # type: ignore[misc]


def source(goal: int = GOAL, request_id: str = "s", **leg: Any) -> SourceStart:
    return SourceStart(request_id, LegParams(role="source", **(LEG | leg)), goal)


def destination(goal: int = GOAL, request_id: str = "d", **leg: Any) -> Fetching:
    blocks = tuple(DESTINATION_BLOCKS.values())
    return Fetching(request_id, LegParams(role="destination", **(LEG | leg)), 64, goal, blocks)


def begun(goal: int = GOAL) -> Side:
    """A source whose request has come."""
    side = Side("eu")
    side.step(StepPlan(starts=[source(goal)]))
    assert len(side.transfers.mover.take("announce")) == 1
    return side


def put(side: Side, before: int, computed: int) -> tuple[list[CopyPart], bool]:
    """The parts that a step hands on, and whether they were the last ones."""
    side.step(StepPlan(steps=[SourceStep("s", before, computed, BLOCKS)]))
    puts = side.transfers.mover.take("put")
    assert {key for key, _ in puts} <= {KEY}
    return [part for _, parts in puts for part in parts], bool(side.transfers.mover.take("finish"))


def rows(start_token: int, end_token: int) -> list[CopyPart]:
    return [CopyPart(ATTENTION, layer, start_token, end_token - start_token) for layer in (3, 5)]


def loaded(side: Side, part: CopyPart) -> bytes:
    group = side.groups[part.group].layout
    room = bytearray(group.rows_bytes(part.tokens) if part.tokens else group.nbytes)
    side.transfers.load(KEY, part, memoryview(room))
    return bytes(room)


def fails(call: Callable[[], object]) -> str:
    try:
        call()
    except PeerError as error:
        return str(error)
    return ""


def assert_nothing_is_kept(found: RankTransfers) -> None:
    assert (len(found._sources), len(found._fetches), found.take_failed()) == (0, 0, set())


def test_a_step_hands_on_the_blocks_that_it_filled_and_the_last_one_the_states():
    side = begun()
    assert put(side, 0, 63) == ([], False)
    assert put(side, 63, 127) == (rows(0, 64), False)
    assert put(side, 127, 128) == (rows(64, 128), False)
    assert put(side, 128, GOAL) == (rows(128, GOAL) + STATES, True)


def test_a_goal_within_a_block_brings_that_block_whole_when_the_goal_is_computed():
    side = begun(goal=200)
    assert put(side, 0, 199) == (rows(0, 192), False)
    assert put(side, 199, 200) == (rows(192, 256) + STATES, True)
    assert loaded(side, CopyPart(LINEAR, 0)) == b"".join(side.bytes_of("kda", 4)[:2]), "its state is in the same block"


def test_a_source_hands_on_what_it_has_cached_in_its_first_step():
    side = begun(goal=192)
    assert put(side, 128, 192) == (rows(0, 192) + STATES, True)


def test_a_state_whose_block_vllm_took_back_ends_the_offer():
    side = begun()
    blocks = ([*SOURCE_BLOCKS["kda"][:-1], 0], SOURCE_BLOCKS["mla"])
    side.step(StepPlan(steps=[SourceStep("s", 0, GOAL, blocks)]))
    assert side.transfers.mover.take("fail") == [(KEY, "no state at token 256: vLLM took its block between 0 and 256")]
    assert side.transfers.mover.take("finish") == []
    assert fails(lambda: loaded(side, CopyPart(ATTENTION, 3, 0, 64))) == LOST


def test_many_blocks_leave_in_frames_of_a_bounded_size():
    side = begun(goal=192)
    with patch.object(blocks, "FRAME_BYTES", 2 * side.groups[ATTENTION].layout.nbytes):
        assert put(side, 0, 192) == (rows(0, 128) + rows(128, 192) + STATES, True)
    side = begun(goal=128)
    with patch.object(blocks, "FRAME_BYTES", 1):
        assert put(side, 0, 128) == (rows(0, 64) + rows(64, 128) + STATES, True)


def test_a_part_is_read_from_the_blocks_of_its_tokens_and_a_state_from_that_of_the_goal():
    side = begun()
    put(side, 0, GOAL)
    assert loaded(side, CopyPart(LINEAR, 0)) == b"".join(side.bytes_of("kda", 4)[:2])
    assert len(side.groups[LINEAR].tensors[0]) == 2
    assert loaded(side, CopyPart(ATTENTION, 5, 64, 128)) == b"".join(side.bytes_of("mla", at)[1] for at in (6, 7))
    assert fails(lambda: loaded(side, CopyPart(ATTENTION, 5, 192, 128))) == (
        "the request has 1 of 2 blocks from token 192 on"
    )


def test_the_last_step_copies_nothing_and_what_leaves_is_copied_once():
    side = begun()
    copies: list[int] = []
    with patch.object(source_side, "read_blocks", lambda _tensors, blocks, _room: copies.append(len(blocks))):
        put(side, 0, GOAL)
        assert copies == [], "the engine's step waited for a copy"
        loaded(side, CopyPart(LINEAR, 0))
        assert copies == [1]


def test_a_part_lands_in_the_blocks_of_its_tokens_and_nowhere_else():
    side = Side("hub")
    side.step(StepPlan(fetches=[destination()]))
    assert [(one.key, one.start_token, one.end_token) for (one,) in side.transfers.mover.take("fetch")] == [
        (KEY, 64, GOAL)
    ]
    before = {kind: [side.bytes_of(kind, block) for block in range(12)] for kind in ("kda", "mla")}
    page, state = (side.groups[at].layout.nbytes for at in (ATTENTION, LINEAR))
    side.transfers.land(KEY, CopyPart(ATTENTION, 3, 128, 128), memoryview(bytearray(b"a" * page + b"b" * page)))
    side.transfers.land(KEY, CopyPart(LINEAR, 4), memoryview(bytearray(b"c" * state)))
    before["mla"][11][0], before["mla"][7][0] = b"a" * page, b"b" * page
    for at in (-2, -1):
        before["kda"][9][at] = b"c" * len(before["kda"][9][at])
    assert {kind: [side.bytes_of(kind, block) for block in range(12)] for kind in before} == before


def test_parts_are_copied_on_the_stream_of_copies_on_both_sides():
    """On an accelerator it waits for no kernel of a step, and no kernel waits for it."""
    used: list[str] = []

    class Stream:
        @contextmanager
        def used(self) -> Iterator[None]:
            used.append("begins")
            yield
            used.append("ends")

    def note(*_: object) -> None:
        used.append("copy")

    source_of, destination_of = begun(), Side("hub")
    destination_of.step(StepPlan(fetches=[destination()]))
    put(source_of, 0, GOAL)
    for side in (source_of.transfers.source, destination_of.transfers.destination):
        side._rank = side._rank._replace(copies=Stream())
    with patch.object(source_side, "read_blocks", note), patch.object(destination_side, "write_blocks", note):
        loaded(source_of, CopyPart(LINEAR, 0))
        state = memoryview(bytearray(destination_of.groups[LINEAR].layout.nbytes))
        destination_of.transfers.land(KEY, CopyPart(LINEAR, 4), state)
    assert used == ["begins", "copy", "ends"] * 2


def test_nothing_lands_where_a_request_has_no_block():
    side = Side("hub")
    side.step(StepPlan(fetches=[destination(goal=192)]))  # its state's block is 0, which is of no request
    state = memoryview(bytearray(side.groups[LINEAR].layout.nbytes))
    assert fails(lambda: side.transfers.land(KEY, CopyPart(LINEAR, 4), state)) == (
        "rows from token 192 have no block here"
    )


@contextmanager
def slow_copies() -> Iterator[tuple[threading.Event, threading.Event]]:
    """Have copies of rows wait: whether one runs, and whether it may end."""
    runs, may_end = threading.Event(), threading.Event()

    def read(*_: object) -> None:
        runs.set()
        assert may_end.wait(10)

    with patch.object(source_side, "read_blocks", read):
        try:
            yield runs, may_end
        finally:
            may_end.set()


def test_only_a_request_that_is_revoked_waits_for_its_copy_and_gives_nothing_afterwards():
    side = begun()
    put(side, 0, GOAL)
    with ThreadPoolExecutor(2) as pool, slow_copies() as (runs, may_end):
        copy = pool.submit(loaded, side, CopyPart(ATTENTION, 3, 0, 64))
        assert runs.wait(10)
        others = pool.submit(lambda: (side.transfers.results({"other"}), side.step(StepPlan(revoked={"other": "why"}))))
        wait([others], 5)
        assert others.done(), "a step of other requests waited for the copy"
        revoking = pool.submit(side.step, StepPlan(revoked={"s": "its memory is needed"}))
        wait([revoking], 0.3)
        assert not revoking.done(), "vLLM would write blocks that are read"
        may_end.set()
        revoking.result(10)
        copy.result(10)
    assert side.transfers.mover.take("fail") == [(KEY, "its memory is needed")]
    for part in (CopyPart(ATTENTION, 3, 0, 64), CopyPart(LINEAR, 0)):
        assert fails(lambda part=part: loaded(side, part)) == LOST


def test_a_copy_that_fails_delays_no_other():
    side = begun()
    put(side, 0, GOAL)
    assert fails(lambda: loaded(side, CopyPart(ATTENTION, 3, 192, 128)))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(side.step, StepPlan(revoked={"s": "why"})).result(10)


def test_a_sources_blocks_are_free_when_its_request_and_its_offer_have_ended_and_not_before():
    for is_request_first in (True, False):
        side = begun()
        put(side, 0, GOAL)
        found = side.transfers
        if is_request_first:
            assert found.results({"s", "no source"}) == NOTHING
            found.mover.on_offer_end(KEY)
            assert found.results(set()) == ({"s"}, set(), set())
        else:
            found.mover.on_offer_end(KEY)
            assert found.results(set()) == NOTHING
            assert found.results({"s", "no source"}) == ({"s"}, set(), set())
        assert found.results({"s"}) == NOTHING, "once"
        assert_nothing_is_kept(found)


def test_a_fetch_that_came_and_one_that_failed_are_reported_once_each_and_the_failure_to_all_ranks():
    side = Side("hub")
    for reason in ("", "the source died"):
        side.step(StepPlan(fetches=[destination()]))
        assert side.transfers.results(set()) == NOTHING
        side.transfers.mover.on_fetch_end(EndedFetch(KEY, reason))
        assert side.transfers.results(set()) == (set(), {"d"}, {"d"} if reason else set())
        assert side.transfers.take_failed() == ({"d"} if reason else set())
        assert side.transfers.take_failed() == set()
        assert side.transfers.results(set()) == NOTHING
        assert_nothing_is_kept(side.transfers)


def test_a_fetch_is_cancelled_when_its_request_has_ended_or_another_rank_has_failed():
    side = Side("hub")
    side.step(StepPlan(fetches=[destination(), destination(request_id="other", transfer_id=OTHER)]))
    side.transfers.results({"s"})
    assert side.transfers.mover.take("cancel_fetch") == []
    side.transfers.results({"d"})
    assert side.transfers.mover.take("cancel_fetch") == [(KEY,)]
    side.step(StepPlan(in_vain={"other"}))
    assert side.transfers.mover.take("cancel_fetch") == [(OTHER,)]


def test_a_cache_in_slices_is_sent_when_all_of_them_have_ended():
    rank = Rank(RankOf(0, 1), refuse_exchange, is_empty=False)
    rank.step(StepPlan(starts=[source(64, ranks=2)], steps=[SourceStep("s", 0, 64, ([1, 2, 3, 4],) * 4)]))
    found = rank.transfers
    assert [one.key for (one,) in found.mover.take("announce")] == HALVES
    assert [key for key, _ in found.mover.take("finish")] == HALVES
    found.mover.on_offer_end(HALVES[1])
    assert found.results({"s"}) == NOTHING
    rank.step(StepPlan(revoked={"s": "why"}))
    assert found.mover.take("fail") == [(key, "why") for key in HALVES], "the mover knows which of them is over"
    found.mover.on_offer_end(HALVES[0])
    assert found.results(set()) == ({"s"}, set(), set())
    assert_nothing_is_kept(found)


def test_slices_come_all_or_in_vain_and_the_first_that_fails_ends_the_others():
    rank = Rank(RankOf(0, 1), refuse_exchange, is_empty=True)
    found = rank.transfers
    for reasons in (("", ""), ("", "lost"), ("lost", ""), ("lost", "cancelled")):
        rank.step(StepPlan(fetches=[Fetching("d", destination(ranks=2).leg, 0, 64, ([1, 2, 3, 4],) * 4)]))
        messages = [one for (one,) in found.mover.take("fetch")]
        assert [(one.key, one.port) for one in messages] == [(HALVES[0], 9000), (HALVES[1], 9001)]
        found.mover.on_fetch_end(EndedFetch(HALVES[0], reasons[0]))
        assert found.mover.take("cancel_fetch") == ([(HALVES[1],)] if reasons[0] else [])
        assert found.results(set()) == NOTHING
        found.mover.on_fetch_end(EndedFetch(HALVES[1], reasons[1]))
        is_lost = any(reasons)
        assert found.results(set()) == (set(), {"d"}, {"d"} if is_lost else set())
        assert found.take_failed() == ({"d"} if is_lost else set())
        assert_nothing_is_kept(found)


def test_declines_an_unwanted_source_at_each_port_for_the_rank_that_it_offers():
    for own, ranks, expected in (
        (RankOf(0, 1), 0, [(9000, 0)]),
        (RankOf(1, 2), 2, [(9001, 1)]),
        (RankOf(1, 2), 4, [(9002, 2), (9003, 3)]),
        (RankOf(3, 4), 2, [(9001, 3)]),
        (RankOf(0, 2), 3, []),
    ):
        rank = Rank(own, refuse_exchange, is_empty=True)
        rank.step(StepPlan(declined=[DeclineFetch("d", destination(ranks=ranks).leg)]))
        assert [(one.port, one.rank) for (one,) in rank.transfers.mover.take("decline")] == expected, own


def test_ranks_that_do_not_divide_keep_no_blocks_and_bring_nothing():
    rank = Rank(RankOf(0, 2), refuse_exchange, is_empty=False)
    fetching = Fetching("d", destination(ranks=3).leg, 0, 64, ([1, 2, 3, 4],) * 4)
    rank.step(StepPlan(starts=[source(64, ranks=3)], fetches=[fetching]))
    assert rank.transfers.mover.calls == []
    assert rank.transfers.results({"s"}) == ({"s"}, {"d"}, {"d"})
    assert rank.transfers.take_failed() == {"d"}
    assert_nothing_is_kept(rank.transfers)


def test_steps_of_an_accelerator_are_handed_on_one_after_another_when_their_kernels_are_done():
    done = [threading.Event(), threading.Event()]
    waiting = [SimpleNamespace(synchronize=lambda event=event: event.wait(10)) for event in done]
    finished = threading.Event()
    side = begun()
    side.transfers.mover.finish = lambda *_: finished.set()
    with patch.object(device, "started_kernels", lambda _: waiting.pop(0)):
        side.step(StepPlan(steps=[SourceStep("s", 0, 64, BLOCKS)]))
        side.step(StepPlan(steps=[SourceStep("s", 64, GOAL, BLOCKS)]))
    done[1].set()
    assert not finished.wait(0.3)
    assert side.transfers.mover.take("put") == []
    done[0].set()
    assert finished.wait(10)
    assert [parts for _, parts in side.transfers.mover.take("put")] == [rows(0, 64), rows(64, GOAL) + STATES]


def test_a_step_of_an_accelerator_that_fails_revokes_its_source_and_no_other():
    lost = SimpleNamespace(synchronize=lambda: 1 / 0)
    waiting, finished = [lost, SimpleNamespace(synchronize=lambda: None)], threading.Event()
    side = begun()
    side.step(StepPlan(starts=[source(request_id="other", transfer_id=OTHER)]))
    mover = side.transfers.mover
    mover.finish = lambda *_: finished.set()
    with patch.object(device, "started_kernels", lambda _: waiting.pop(0)):
        for request_id in ("s", "other"):
            side.step(StepPlan(steps=[SourceStep(request_id, 0, GOAL, BLOCKS)]))
    assert finished.wait(10)
    assert mover.take("fail") == [(KEY, "the step that computed it has failed: division by zero")]
    assert [key for key, _ in mover.take("put")] == [OTHER]


def test_an_end_that_is_computed_again_is_given_once_and_revoked():
    side = begun()
    assert put(side, 0, GOAL)[1]
    assert put(side, 128, GOAL) == ([], False)
    assert side.transfers.mover.take("fail") == [(KEY, "vLLM computes the end of the prompt again")]


def test_all_ranks_get_the_tensors_of_all_in_the_order_of_ranks():
    """By the library with which vLLM's ranks compute together on CPUs."""
    fork = multiprocessing.get_context("fork")
    with tempfile.NamedTemporaryFile() as store:
        ends = []
        for rank in range(2):
            ours, theirs = fork.Pipe()
            ends.append(ours)
            fork.Process(target=give, args=(rank, store.name, theirs), daemon=True).start()
        for end in ends:
            assert end.poll(60)
            assert end.recv() == [[[10, 11], [12, 13]], [[20, 21], [22, 23]]]


def give(rank: int, store: str, answer: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = SimpleNamespace(world_size=2, device_group=torch.distributed.group.WORLD)
    tensor = torch.arange(10 * (rank + 1), 10 * (rank + 1) + 4, dtype=torch.uint8).view(2, 2)
    with patch.object(connector, "get_tp_group", lambda: group):
        answer.send([part.tolist() for part in connector._all_ranks(tensor)])


def main() -> None:
    found = {}
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            try:
                test()
                found[name] = ""
            except Exception:
                found[name] = traceback.format_exc()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
