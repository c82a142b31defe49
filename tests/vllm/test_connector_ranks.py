"""prfaas's connector between engines of several tensor-parallel ranks: all parts of a cache are used, or none.

Each rank is a process with a mover and a data port of its own. What one rank misses, no rank may compute on.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from ..unit.worker.transfer_proxy import Change, CutError, Proxy, Seen, as_it_is
from .connected import (
    WHOLE_PAGES_FROM,
    Pair,
    alone,
    first_of_free_ports,
    on_ranks,
    parallel,
    prompt_of,
    reference,
    started,
)
from .engines import Answer, Engine, EngineHost, wait_until

RANKS = 2


@pytest.fixture(scope="module")
def two_ranks(engine_host: EngineHost) -> Engine:
    """An engine of two ranks without a connector."""
    return engine_host.start("reference of two ranks", **parallel(RANKS)).wait_ready()


@pytest.fixture(scope="module")
def pair(engine_host: EngineHost, two_ranks: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with started(engine_host, tmp_path_factory.mktemp("ranks"), ranks=(RANKS, RANKS)) as found:
        yield found


def forget(pair: Pair) -> tuple[int, int]:
    """Empty both prefix caches; return the free pages of both sides."""
    pair.source.forget_prefixes()
    pair.destination.forget_prefixes()
    return pair.source.free_pages(), pair.destination.free_pages()


@pytest.mark.parametrize("length", [6, 700])
def test_an_offloaded_prompt_is_answered_to_the_last_bit_fresh_and_after_hits_on_either_side(
    two_ranks: Engine, pair: Pair, length: int
):
    ids, tokens, logprobs = reference(two_ranks, pair, length)
    free = forget(pair)
    page = pair.destination.page_tokens
    pages = (length - 1) // page
    goal = pages * page if pages >= WHOLE_PAGES_FROM else length - 1
    for forgets in ((), (pair.source,), (pair.destination,)):
        for engine in forgets:
            engine.forget_prefixes()
        source, destination = pair.offload(ids)
        answer = destination.result()
        source.result()
        assert (answer.tokens, answer.logprobs) == (tokens, logprobs)
        assert answer.cached_tokens == goal, "the rest came, or was here"
    pair.assert_nothing_is_held(free)


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("part", ["not part.tokens", "part.tokens and part.start_token == 0"], ids=["state", "page"])
def test_a_zeroed_state_or_page_of_one_rank_is_seen(two_ranks: Engine, pair: Pair, part: str, rank: int):
    """The control of the test above: it would fail if one rank's part did not come."""
    ids, tokens, logprobs = reference(two_ranks, pair, 700)
    forget(pair)
    zeros = "room.__setitem__(slice(None), bytes(len(room)))"
    spoilt = f"lambda key, part, room: {zeros} if {part} else type(transfers).load(transfers, key, part, room)"
    on_ranks(pair.source, f"worker.rank == {rank} and setattr(transfers, 'load', {spoilt})")
    answer = pair.offload(ids)[1].result()
    on_ranks(pair.source, f"worker.rank == {rank} and delattr(transfers, 'load')")
    assert answer.cached_tokens == 640
    assert (answer.tokens, answer.logprobs) != (tokens, logprobs)


def test_a_killed_mover_of_one_rank_has_all_ranks_compute_the_prompt(two_ranks: Engine, pair: Pair):
    ids = prompt_of(1500, 4)
    wanted = alone(two_ranks, ids)
    free = forget(pair)
    for side in (pair.source, pair.destination):
        pair.slow(1)
        source, destination = pair.offload(ids)
        source.result()
        began = time.monotonic()
        on_ranks(side, "worker.rank == 1 and transfers.mover._process.kill()")
        answer = destination.result()
        assert (answer.tokens, answer.logprobs, answer.cached_tokens) == (wanted.tokens, wanted.logprobs, 0)
        assert time.monotonic() - began < 6, "the other rank's megabyte would take longer at 1 Mbit/s"
        pair.slow(None)
        pair.destination.forget_prefixes()
        pair.assert_nothing_is_held(free)

    def crosses() -> bool:
        pair.destination.forget_prefixes()
        return pair.offload(ids)[1].result().cached_tokens > 0

    wait_until(crosses, 30)
    pair.destination.forget_prefixes()
    pair.assert_nothing_is_held(free)


def test_a_request_that_is_aborted_in_the_middle_gives_the_pages_of_all_ranks_back(two_ranks: Engine, pair: Pair):
    ids = prompt_of(3000, 2)
    wanted = alone(two_ranks, ids)
    free = forget(pair)
    pair.slow(1)
    source, destination = pair.offload(ids)
    source.result()
    assert pair.destination.free_pages() < free[1]
    destination.abort()
    pair.assert_nothing_is_held(free)
    pair.slow(None)
    pair.source.forget_prefixes()
    source, destination = pair.offload(ids)
    wait_until(lambda: pair.source.free_pages() < free[0])
    source.abort()
    answer = destination.result()
    assert (answer.tokens, answer.logprobs) == (wanted.tokens, wanted.logprobs)
    pair.assert_nothing_is_held(free)


def cut_always(_frame: Seen) -> list[bytes]:
    raise CutError


def cut_once() -> Change:
    seen: list[Seen] = []

    def change(frame: Seen) -> list[bytes]:
        seen.append(frame)
        if len(seen) == 3:
            raise CutError
        return [frame.raw]

    return change


def offload_through(pair: Pair, ids: list[int], rank: int, change: Change) -> Answer:
    """Offload with a proxy in front of each rank of the source; one of them changes what its rank says."""
    port = first_of_free_ports(RANKS)
    with ExitStack() as held:
        proxies = [
            held.enter_context(Proxy(("127.0.0.1", pair.port + at), change if at == rank else as_it_is, port=port + at))
            for at in range(RANKS)
        ]
        answer = pair.offload(ids, port=port)[1].result()
        assert proxies[rank].connections >= 2
    return answer


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_cut_connection_of_one_rank_goes_on_where_it_was(two_ranks: Engine, pair: Pair, rank: int):
    ids, tokens, logprobs = reference(two_ranks, pair, 1500)
    free = forget(pair)

    def goes_on() -> bool:
        pair.destination.forget_prefixes()
        answer = offload_through(pair, ids, rank, cut_once())
        assert (answer.tokens, answer.logprobs) == (tokens, logprobs)
        return answer.cached_tokens > 0

    wait_until(goes_on, 30)  # a machine that is busy for a second has the destination give up
    pair.destination.forget_prefixes()
    pair.assert_nothing_is_held(free)


@pytest.mark.parametrize("rank", range(RANKS))
def test_without_the_connection_of_one_rank_all_ranks_compute_the_prompt(two_ranks: Engine, pair: Pair, rank: int):
    ids = prompt_of(1500, 6)
    wanted = alone(two_ranks, ids)
    free = forget(pair)
    answer = offload_through(pair, ids, rank, cut_always)
    assert (answer.tokens, answer.logprobs, answer.cached_tokens) == (wanted.tokens, wanted.logprobs, 0)
    pair.destination.forget_prefixes()
    pair.assert_nothing_is_held(free)
