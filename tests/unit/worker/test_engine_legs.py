"""The two legs of a hand-off in the step loop: what a destination computes, with a cache and without, and what a source
owes its front; whatever ends first, nothing stays held.
"""

import time
from collections.abc import Callable

import msgspec
import pytest

from prfaas import schedule
from prfaas.errors import PeerError, UnreachableError
from prfaas.wire.engine import Cancel, Failed, Started
from prfaas.wire.frames import Kind
from prfaas.wire.prefill import LegParams
from prfaas.wire.trace import PARTS, UNKNOWN, split
from prfaas_worker.engine.sequences import Phase
from prfaas_worker.engine.steps import ComputedStep, StepWork
from prfaas_worker.models.base import Model

from .engine_bench import NAMED, Bench, generate, prefix_fetched

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("small_chunks")]
LEG = LegParams(role="destination", **NAMED, host="127.0.0.1", port=1)
PROMPT = b"def main(argument):\n    return argument\n" * 4


@pytest.fixture
def bench(model: Model) -> Bench:
    return Bench(model, max_running=1, slots=1)


def test_a_prefill_for_another_instance_waits_until_the_step_that_begins_it(model: Model):
    bench, seen = Bench(model, max_running=2, slots=2), list[tuple[int, int]]()
    compute = bench.engine.runner.run

    def watched(work: StepWork) -> ComputedStep:
        seen.append((bench.engine.stats.prefills_waiting, bench.engine.stats.prefills_running))
        return compute(work)

    bench.engine.runner.run = watched
    for handle in (500, 501, 502):
        bench.give(PROMPT, handle, transfer_id=f"{handle:032x}")
    bench.step()
    stats = bench.engine.stats
    assert (stats.prefills_waiting, stats.prefills_running) == (3, 0)
    assert bench.engine.cache.free_slots == 0, "or none of them waits with memory"
    bench.run()
    assert (seen[0], seen[-1]) == ((2, 1), (1, 2)), "those of a step are counted while it is computed"
    assert bench.engine.requests.counts() == {(True, False): 2, (True, True): 1}, "two are being sent"


def started(bench: Bench) -> list[Started]:
    return [one for one in bench.sent if isinstance(one, Started)]


def test_a_destination_computes_one_token_of_a_prompt_whose_cache_came(bench: Bench, model: Model):
    handle = bench.ask(PROMPT, leg=LEG)
    bench.step()
    (fetch,) = bench.fetches
    fetch.on_end(prefix_fetched(model, fetch.sequence, len(PROMPT) - 1))
    bench.run()
    assert bench.tokens(handle) == generate(model, PROMPT, 6)
    assert bench.engine.stats.prompt_tokens == 0
    (start,) = started(bench)
    assert (start.cached_tokens, start.kv_bytes, start.transfer_seconds) == (0, 7, 0.25)
    assert not bench.declined
    bench.assert_nothing_is_held()


def test_a_prompt_on_its_way_takes_no_slot_and_not_the_place_of_an_answer(bench: Bench, model: Model):
    fetching, local = bench.ask(PROMPT, leg=LEG), bench.ask(PROMPT[:70])
    bench.step()
    assert bench.engine.cache.free_slots == 0, "the prompt that is computed here has the only one"
    while not bench.tokens(local):
        assert bench.step()
    (fetch,) = bench.fetches
    fetch.on_end(prefix_fetched(model, fetch.sequence, len(PROMPT) - 1))
    while not bench.ends(local):
        assert not bench.tokens(fetching), "no answer is interrupted"
        bench.step()
    bench.run()
    assert bench.tokens(local) == generate(model, PROMPT[:70], 6)
    assert bench.tokens(fetching) == generate(model, PROMPT, 6)
    bench.assert_nothing_is_held()


def test_a_cache_that_has_come_waits_for_a_slot_of_those_that_leave(bench: Bench, model: Model):
    offer = bench.give(PROMPT[1:])
    bench.run()
    handle = bench.ask(PROMPT, leg=LEG)
    bench.step()
    (fetch,) = bench.fetches
    fetch.on_end(prefix_fetched(model, fetch.sequence, len(PROMPT) - 1))
    bench.run()
    assert not bench.tokens(handle)
    bench.offers.end(offer, "delivered")
    bench.run()
    assert bench.tokens(handle) == generate(model, PROMPT, 6)
    bench.assert_nothing_is_held()


def test_as_many_caches_as_slots_wait_in_pages_and_the_others_are_refused_in_the_end(model: Model):
    bench = Bench(model, max_running=1, max_waiting=2)  # two slots
    handles = [bench.ask(PROMPT[number:], leg=LEG) for number in range(4)]
    bench.step()
    assert [one.sequence.request.handle for one in bench.fetches] == handles[:2]
    assert bench.engine.requests.counts() == {(False, False): 2, (False, True): 2}
    refused = bench.ask(PROMPT[5:], leg=LEG)
    bench.step()
    assert [one.handle for one in bench.sent if isinstance(one, Failed)] == [refused]
    for number in range(4):
        fetch = bench.fetches[number]
        fetch.on_end(prefix_fetched(model, fetch.sequence, len(PROMPT) - number - 1))
        bench.run()
        assert bench.tokens(handles[number]) == generate(model, PROMPT[number:], 6)
    bench.assert_nothing_is_held()


def test_a_cache_that_has_come_gives_way_to_an_answer_that_needs_its_pages(model: Model):
    state_pages = Bench(model).memory.geometry.pages_per_state
    bench = Bench(model, max_running=1, num_pages=2 + 3 + state_pages)
    running = bench.ask(PROMPT[:40], max_tokens=100, ignore_eos=True)
    while not bench.tokens(running):
        bench.step()
    handle = bench.ask(PROMPT, leg=LEG)
    bench.step()
    (fetch,) = bench.fetches
    fetch.on_end(prefix_fetched(model, fetch.sequence, len(PROMPT) - 1))
    bench.run()
    assert len(bench.tokens(running)) == 100
    assert bench.engine.stats.preemptions == 1
    assert bench.tokens(handle) == generate(model, PROMPT, 6), "its prompt is computed here"
    bench.assert_nothing_is_held()


def test_an_answer_that_goes_on_elsewhere_computes_its_tokens_behind_the_cache_that_comes(bench: Bench, model: Model):
    said = generate(model, PROMPT, 6)
    handle = bench.ask(PROMPT, leg=LEG, generated=said[:3], max_tokens=6)
    bench.step()
    (fetch,) = bench.fetches
    fetch.on_end(prefix_fetched(model, fetch.sequence, len(PROMPT) - 1))
    bench.run()
    assert bench.tokens(handle) == said[3:]
    assert bench.engine.stats.prompt_tokens == 4
    bench.assert_nothing_is_held()


def test_prompts_that_are_computed_here_leave_the_other_slots_to_caches_that_leave(model: Model):
    bench = Bench(model, max_running=2, max_waiting=8)  # four slots
    for length in (70, 80, 90):
        bench.ask(PROMPT[:length])
    bench.step()
    assert bench.engine.cache.free_slots == 2
    assert bench.engine.requests.counts() == {(False, False): 2, (False, True): 1}


def test_what_has_come_begins_in_its_turn(model: Model):
    bench = Bench(model, max_running=1, slots=4)
    running = bench.ask(PROMPT[2:], max_tokens=20)
    while not bench.tokens(running):
        bench.step()
    first, local, last = bench.ask(PROMPT, leg=LEG), bench.ask(PROMPT[:70]), bench.ask(PROMPT[1:], leg=LEG)
    bench.step()
    for fetch, prompt in zip(bench.fetches[::-1], (PROMPT[1:], PROMPT), strict=True):
        fetch.on_end(prefix_fetched(model, fetch.sequence, len(prompt) - 1))
    began = list[int]()
    while bench.step():
        began += [one for one in (last, local, first) if bench.tokens(one) and one not in began]
        assert not began or bench.ends(running)
    assert began == [first, local, last]
    bench.assert_nothing_is_held()


@pytest.mark.parametrize("waits", [True, False])
def test_a_prompt_that_its_source_has_not_begun_takes_no_memory_of_one_that_it_has(model: Model, waits: bool):
    bench = Bench(model, max_running=1, num_pages=3 + Bench(model).memory.geometry.pages_per_state)
    bench.awaited = list[Callable[[], None]]() if waits else None
    first, second = bench.ask(PROMPT, leg=LEG), bench.ask(PROMPT[1:], leg=LEG)
    bench.step()
    if bench.awaited is None:  # control: both sources begin, and the pages are given by arrival
        assert [one.sequence.request.handle for one in bench.fetches] == [first]
        return
    assert bench.engine.cache.stats().used_pages == 0
    assert not bench.fetches
    assert bench.engine.requests.counts() == {(False, True): 2}
    bench.awaited[1]()
    bench.step()
    fetch = bench.fetches.pop()
    fetch.on_end(prefix_fetched(model, fetch.sequence, len(PROMPT) - 2))
    bench.run()
    assert bench.tokens(second) == generate(model, PROMPT[1:], 6)
    assert not bench.tokens(first)
    bench.awaited[0]()
    bench.step()
    fetch = bench.fetches.pop()
    fetch.on_end(prefix_fetched(model, fetch.sequence, len(PROMPT) - 1))
    bench.run()
    assert bench.tokens(first) == generate(model, PROMPT, 6)
    bench.assert_nothing_is_held()


def test_sources_that_have_begun_are_served_by_the_arrival_of_their_requests(model: Model):
    bench = Bench(model, max_running=1, slots=2)
    bench.awaited = []
    running = bench.ask(PROMPT[2:], max_tokens=9)
    bench.step()
    first, second = bench.ask(PROMPT, leg=LEG), bench.ask(PROMPT[1:], leg=LEG)
    bench.step()
    for begin in bench.awaited[::-1]:
        begin()
    bench.step()
    assert not bench.ends(running)
    assert [one.sequence.request.handle for one in bench.fetches] == [first, second]
    for handle in (first, second):
        bench.engine.inbox.put(Cancel(handle))
    bench.step()
    for fetch in bench.fetches:
        fetch.on_end(PeerError("cancelled"))
    bench.run()
    bench.assert_nothing_is_held()


def test_the_wait_for_a_source_is_no_wait_for_memory(bench: Bench, model: Model):
    bench.awaited = []
    bench.ask(PROMPT, leg=LEG)
    bench.step()
    (request,) = bench.engine.requests.values()
    request.arrived = request.queued_at = request.arrived - 50
    bench.awaited[0]()
    bench.step()
    (fetch,) = bench.fetches
    fetch.on_end(prefix_fetched(model, fetch.sequence, len(PROMPT) - 1))
    bench.run()
    (start,) = started(bench)
    assert 0 < start.queue_seconds < 50, "it waits for room since its source began"


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_cache_that_passed_a_lossy_codec_is_used_and_not_cached(bench: Bench, model: Model, is_exact: bool):
    handle = bench.ask(PROMPT, leg=LEG)
    bench.step()
    (fetch,) = bench.fetches
    fetch.on_end(prefix_fetched(model, fetch.sequence, len(PROMPT) - 1, is_exact=is_exact))
    bench.run()
    assert len(bench.tokens(handle)) == 6
    assert bool(bench.engine.cache.stats().cached_pages) == is_exact


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (PeerError("the link is down"), NAMED["transfer_id"]),
        (UnreachableError("the link is down"), f"{NAMED['transfer_id']} unreachable"),
    ],
)
def test_a_destination_whose_cache_does_not_come_computes_the_prompt_and_says_why(
    bench: Bench, model: Model, caplog, error: PeerError, lost: str
):
    handle = bench.ask(PROMPT, leg=LEG)
    bench.step()
    (fetch,) = bench.fetches
    fetch.on_end(error)
    bench.run()
    assert bench.tokens(handle) == generate(model, PROMPT, 6)
    assert bench.engine.stats.prompt_tokens == len(PROMPT)
    assert (started(bench)[0].kv_bytes, started(bench)[0].lost_transfer) == (0, lost)
    assert "r is computed here, its cache did not come: the link is down" in caplog.text
    assert len(bench.fetches) == 1
    bench.assert_nothing_is_held()


def parts(bench: Bench, began: float) -> dict[str, float]:
    (start,) = started(bench)
    return split(began, time.monotonic(), start.moments)


def test_the_parts_of_a_first_token_are_those_of_source_link_and_destination(bench: Bench, model: Model):
    began = time.monotonic() - 4
    bench.ask(PROMPT, leg=LEG)
    bench.step()
    (fetch,) = bench.fetches
    fetched = prefix_fetched(model, fetch.sequence, len(PROMPT) - 1)
    done = msgspec.structs.replace(fetched.done, prefill_seconds=0.5, first_byte_seconds=0.25, computed_seconds=0.125)
    fetch.on_end(fetched._replace(done=done, transfer_seconds=2.0))
    bench.run()
    found = parts(bench, began)
    assert found.keys() == set(PARTS)
    assert found["prefill"] == pytest.approx(0.5)
    assert found["decode_queue"] > 0, "it asked for the cache after the source had computed"
    assert sum(found.values()) == pytest.approx(time.monotonic() - began, abs=0.5)


def test_a_source_that_does_not_report_when_it_had_computed_leaves_its_parts_unknown(bench: Bench, model: Model):
    began = time.monotonic()
    bench.ask(PROMPT, leg=LEG)
    bench.step()
    (fetch,) = bench.fetches
    fetch.on_end(prefix_fetched(model, fetch.sequence, len(PROMPT) - 1))
    bench.run()
    assert parts(bench, began).keys() == {"gateway_queue", "first_step", UNKNOWN}


def test_a_prompt_that_is_computed_here_has_no_wait_for_a_link(bench: Bench):
    began = time.monotonic()
    bench.ask(PROMPT)
    bench.run()
    found = parts(bench, began)
    assert (found["link_wait"], found["transfer"], found["decode_queue"]) == (0.0, 0.0, 0.0)
    assert found["prefill"] == pytest.approx(started(bench)[0].prefill_seconds)


def test_a_destination_that_has_the_prompt_declines_and_one_that_has_less_does_not(bench: Bench, model: Model):
    bench.ask(PROMPT, max_tokens=1)
    bench.run()
    longer = PROMPT + b"x" * 200
    handles = [bench.ask(prompt, leg=LEG, max_tokens=1) for prompt in (PROMPT, longer)]
    for _ in range(9):
        bench.step()
    assert bench.declined == [(handles[0], "a" * 32)]
    (fetch,) = bench.fetches
    assert 0 < fetch.sequence.computed_tokens < len(PROMPT), "rows that are here do not cross"
    fetch.on_end(prefix_fetched(model, fetch.sequence, len(longer) - 1))
    bench.run()
    bench.assert_nothing_is_held()


def test_a_destination_that_is_refused_sends_its_source_away(bench: Bench):
    wrong = bench.ask(PROMPT, leg=LEG, stop_token_ids=[10_000])
    bench.run()
    assert bench.declined == [(wrong, "a" * 32)]
    waiting = [bench.ask(PROMPT + bytes([number]), max_tokens=1000) for number in range(3)]
    full = bench.ask(PROMPT, leg=LEG)
    bench.step()
    assert bench.declined[1:] == [(full, "a" * 32)]
    for handle in waiting:
        bench.engine.inbox.put(Cancel(handle))
    bench.run()
    bench.assert_nothing_is_held()


def test_those_that_await_their_source_are_refused_only_where_all_could_not_have_memory(model: Model):
    bench = Bench(model, max_running=1, max_waiting=2, slots=3)
    bench.awaited = []
    for number in range(5):
        bench.ask(PROMPT[number:], leg=LEG)
    bench.step()
    assert not bench.declined
    local = bench.ask(PROMPT[:70])
    bench.step()
    assert [one.handle for one in bench.sent if isinstance(one, Failed)] == [local]
    bench.engine.inbox.put(Cancel(1))
    bench.ask(PROMPT[:70])
    bench.step()
    assert bench.engine.requests.counts() == {(False, True): 4, (False, False): 1}


def test_a_prompt_of_one_token_has_nothing_to_fetch(bench: Bench, model: Model):
    handle = bench.ask(b"#", leg=LEG)
    bench.run()
    assert (bench.tokens(handle), bench.fetches, bench.declined) == (generate(model, b"#", 6), [], [])


@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_client_that_leaves_a_destination_sends_its_source_away(model: Model, is_waiting: bool):
    bench = Bench(model, max_running=1, num_pages=3 + Bench(model).memory.geometry.pages_per_state)
    first = bench.ask(b"x", max_tokens=1000) if is_waiting else None
    handle = bench.ask(PROMPT, leg=LEG)
    bench.step()
    bench.engine.inbox.put(Cancel(handle))
    bench.step()
    if first is not None:
        assert (bench.declined, bench.fetches) == ([(handle, "a" * 32)], [])
        bench.engine.inbox.put(Cancel(first))
    else:
        (fetch,) = bench.fetches
        assert (fetch.cancelled, bench.declined) == (True, [])
        assert bench.engine.cache.stats().used_pages, "it may still be written into"
        fetch.on_end(PeerError("cancelled"))
    bench.run()
    bench.assert_nothing_is_held()


def test_a_client_that_leaves_before_the_source_begins_sends_it_away(bench: Bench):
    bench.awaited = []
    handle = bench.ask(PROMPT, leg=LEG)
    bench.step()
    bench.engine.inbox.put(Cancel(handle))
    bench.step()
    assert bench.declined == [(handle, "a" * 32)]
    bench.awaited[0]()  # the wait ends with the offer
    bench.run()
    assert not bench.fetches
    bench.assert_nothing_is_held()


def test_a_source_says_that_it_begins_in_the_step_that_does(model: Model):
    bench, seen = Bench(model, max_running=1, slots=2), list[tuple[bool, bool]]()
    first, second = (bench.give(PROMPT, handle, transfer_id=f"{handle:032x}") for handle in (500, 501))
    compute = bench.engine.runner.run

    def watched(work: StepWork) -> ComputedStep:
        seen.append((first.await_begin(0), second.await_begin(0)))
        return compute(work)

    bench.engine.runner.run = watched
    bench.step()
    assert not first.await_begin(0)
    bench.run()
    assert (seen[0], seen[-1]) == ((True, False), (True, True)), "before it computes, and the second has no place yet"


def test_a_source_computes_all_but_the_last_token_and_answers_before_it_is_delivered(bench: Bench):
    offer = bench.give(PROMPT)
    bench.run()
    assert len(started(bench)) == 1
    assert bench.engine.stats.prompt_tokens == len(PROMPT) - 1
    assert {frame.header.kind for frame in offer._held or ()} == {Kind.BLOCK, Kind.STATE}
    (sequence,) = bench.engine.requests.sequences()
    assert sequence.phase is Phase.DELIVERING
    bench.engine.inbox.put(Cancel(500))  # its caller has its answer: the lease ends it
    bench.step()
    assert list(bench.engine.requests) == [500]
    bench.offers.end(offer, "delivered")
    bench.run()
    assert len(started(bench)) == 1
    bench.assert_nothing_is_held()


def test_a_cache_that_is_on_its_way_keeps_its_pages_when_streams_want_them(
    model: Model, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(schedule.BUDGETS, "mixed", schedule.Budgets(64, 2))
    bench = Bench(model, num_pages=6)
    stream = bench.ask(b"def f(", max_tokens=150, ignore_eos=True)
    while len(bench.tokens(stream)) < 50:
        bench.step()
    offer = bench.give(b"x" * 201)  # all pages but the next one of the stream
    while list(bench.engine.requests.sequences())[-1].phase is not Phase.DELIVERING:
        bench.step()
    bench.run()
    assert bench.engine.stats.preemptions == 0
    assert len(bench.tokens(stream)) < 150, "the stream waits for a page"
    bench.offers.end(offer, "delivered")
    bench.run()
    assert len(bench.tokens(stream)) == 150
    bench.assert_nothing_is_held()


@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_caller_that_leaves_a_source_ends_its_prefill(bench: Bench, is_waiting: bool):
    first = bench.ask(b"x", max_tokens=1000) if is_waiting else None
    bench.give(PROMPT)
    bench.step()
    bench.step()
    bench.engine.inbox.put(Cancel(500))
    for _ in range(3):
        bench.step()
    assert bench.engine.stats.prompt_tokens < len(PROMPT) - 1
    assert 500 not in bench.engine.requests
    if first is not None:
        bench.engine.inbox.put(Cancel(first))
    bench.run()
    assert all(one.handle != 500 for one in started(bench))
    bench.assert_nothing_is_held()


def test_a_source_whose_destination_declines_answers_and_computes_no_more(bench: Bench):
    offer = bench.give(PROMPT)
    bench.step()
    bench.step()
    bench.offers.end(offer, "cancelled")
    bench.run()
    assert [one.handle for one in started(bench)] == [500]
    assert bench.engine.stats.prompt_tokens < len(PROMPT) - 1
    bench.assert_nothing_is_held()


def test_a_source_whose_offer_ended_before_the_engine_heard_of_it_computes_nothing(bench: Bench):
    bench.offers.end(bench.give(PROMPT), "cancelled")
    bench.run()
    assert [one.handle for one in started(bench)] == [500]
    assert (bench.engine.stats.prompt_tokens, list(bench.engine.requests)) == (0, [])
    bench.assert_nothing_is_held()
