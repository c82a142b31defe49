"""Prefixes from other instances, in an engine that is stepped by hand: what comes is used as if it had been cached,
what does not come costs only time, what many want is fetched once, and what is lossy stays with its receiver.
"""

from typing import Any

import pytest

from prfaas.errors import PeerError
from prfaas.wire.engine import Cancel, Started, StartPrefill
from prfaas.wire.prefill import PrefillRequest
from prfaas_transfer.fetch import AbsentError
from prfaas_worker.engine.sequences import Phase, PrefillOffered
from prfaas_worker.models.base import Model

from .engine_bench import Bench, FetchByHand, generate, prefix_fetched

URL = "http://127.0.0.1:1"
SHARED = (b"You are a careful assistant that answers in Python. " * 5)[:192]


def prompt_of(tail: bytes) -> bytes:
    return SHARED + tail + b" and so on until the end"


def ask(bench: Bench, prompt: bytes, **fields: Any) -> int:
    return bench.ask(prompt, **{"prefix_url": URL} | fields)


def bring(model: Model, fetch: FetchByHand, tokens: int = len(SHARED), *, is_exact: bool = True) -> None:
    fetch.on_end(prefix_fetched(model, fetch.sequence, tokens, is_exact=is_exact))


def find_started(bench: Bench, handle: int) -> Started:
    return next(one for one in bench.sent if isinstance(one, Started) and one.handle == handle)


def outcomes(bench: Bench) -> dict[str, int]:
    return dict(bench.engine.stats.prefixes)


def test_a_fetched_prefix_is_used_and_only_the_rest_is_computed(model: Model):
    bench, prompt = Bench(model), prompt_of(b"first")
    expected = generate(model, prompt, 6)
    handle = ask(bench, prompt)
    bench.step()
    (fetch,) = bench.fetches
    assert fetch.is_prefix
    assert fetch.sequence.phase is Phase.FETCHING
    assert not bench.step(), "nothing is computed meanwhile"
    bring(model, fetch)
    bench.run()
    assert bench.tokens(handle) == expected
    assert bench.engine.stats.prompt_tokens == len(prompt) - len(SHARED)
    assert bench.engine.stats.prefix_tokens == len(SHARED)
    message = find_started(bench, handle)
    assert (message.cached_tokens, message.kv_bytes, message.transfer_seconds) == (len(SHARED), 7, 0.25)
    assert outcomes(bench) == {"fetched": 1}
    bench.assert_nothing_is_held()


def test_fetches_nothing_that_cannot_be_more_than_is_cached(model: Model):
    bench, prompt = Bench(model), prompt_of(b"first")
    bench.ask(prompt)
    bench.run()
    again = ask(bench, prompt)
    short = ask(bench, b"less than a block")
    bench.run()
    assert bench.fetches == []
    assert find_started(bench, again).cached_tokens == len(prompt) // 64 * 64
    assert find_started(bench, short).cached_tokens == 0


@pytest.mark.parametrize("error", [PeerError("gone"), AbsentError("nothing")])
def test_a_fetch_that_brings_nothing_leaves_no_trace(model: Model, error: PeerError):
    bench, prompt = Bench(model), prompt_of(b"first")
    expected = generate(model, prompt, 6)
    handle = ask(bench, prompt)
    bench.step()
    (fetch,) = bench.fetches
    bench.memory.slots[fetch.sequence.held.slot].fill_(0x3C)  # some of the states had come
    fetch.on_end(error)
    bench.run()
    assert bench.tokens(handle) == expected
    assert len(bench.fetches) == 1, "it is not fetched again"
    assert find_started(bench, handle).cached_tokens == 0
    assert outcomes(bench) == {"absent" if isinstance(error, AbsentError) else "failed": 1}
    bench.assert_nothing_is_held()


def test_many_that_want_the_same_make_one_transfer(model: Model):
    bench, prompt = Bench(model, max_running=8, max_waiting=8), prompt_of(b"first")
    expected = generate(model, prompt, 6)
    handles = [ask(bench, prompt) for _ in range(6)]
    bench.step()
    assert len(bench.fetches) == 1
    assert bench.engine.cache.free_slots == 7, "who waits holds nothing"
    bring(model, bench.fetches[0])
    bench.run()
    assert len(bench.fetches) == 1
    assert [bench.tokens(handle) for handle in handles] == [expected] * 6
    assert bench.engine.stats.prompt_tokens == 6 * (len(prompt) - len(SHARED))
    assert outcomes(bench) == {"fetched": 1, "joined": 5}
    bench.assert_nothing_is_held()


def test_prompts_behind_one_system_prompt_make_one_transfer(model: Model):
    bench = Bench(model, max_waiting=8)
    prompts = [prompt_of(tail) for tail in (b"one", b"two", b"three", b"four")]
    handles = [ask(bench, prompt) for prompt in prompts]
    bench.step()
    bring(model, bench.fetches[0])
    bench.step()
    # What they have in common is cached now, and none of it is longer than that: none is fetched again.
    for fetch in bench.fetches[1:]:
        assert fetch.sequence.computed_tokens == len(SHARED)
        fetch.on_end(AbsentError("nothing longer"))
    bench.run()
    assert [bench.tokens(handle) for handle in handles] == [generate(model, prompt, 6) for prompt in prompts]
    assert outcomes(bench)["fetched"] == 1
    assert bench.engine.stats.prompt_tokens == sum(map(len, prompts)) - 4 * len(SHARED)


def test_requests_that_waited_in_vain_fetch_once(model: Model):
    """Two conversations that begin alike: what came for one is of no use to the other."""
    bench = Bench(model)
    one, other = SHARED[:64] + b"a" * 200, SHARED[:64] + b"b" * 200
    handles = [ask(bench, one), ask(bench, other), ask(bench, other)]
    bench.step()
    assert len(bench.fetches) == 1
    bring(model, bench.fetches[0], 256)
    bench.step()
    bench.step()
    assert len(bench.fetches) == 2, "the two others ask once"
    bring(model, bench.fetches[1], 192)
    bench.run()
    assert [bench.tokens(handle) for handle in handles] == [
        generate(model, prompt, 6) for prompt in (one, other, other)
    ]
    assert outcomes(bench) == {"fetched": 2, "joined": 3}
    bench.assert_nothing_is_held()


def test_strangers_and_other_sources_are_not_waited_for(model: Model):
    bench = Bench(model, max_waiting=4)
    ask(bench, prompt_of(b"first"))
    ask(bench, prompt_of(b"first"), prefix_url="http://127.0.0.1:2")
    ask(bench, b"x" * 200)
    ask(bench, prompt_of(b"first"), cache_salt="another tenant")
    bench.step()
    assert len(bench.fetches) == 4


def test_a_source_that_fails_one_is_not_tried_by_those_that_waited(model: Model):
    bench, prompt = Bench(model), prompt_of(b"first")
    handles = [ask(bench, prompt) for _ in range(3)]
    bench.step()
    bench.fetches[0].on_end(PeerError("gone"))
    bench.run()
    assert len(bench.fetches) == 1
    assert [bench.tokens(handle) for handle in handles] == [generate(model, prompt, 6)] * 3
    bench.assert_nothing_is_held()


def test_another_request_fetches_when_the_first_leaves(model: Model):
    bench, prompt = Bench(model), prompt_of(b"first")
    handles = [ask(bench, prompt) for _ in range(3)]
    bench.step()
    bench.engine.inbox.put(Cancel(handles[0]))
    bench.step()
    assert bench.fetches[0].cancelled
    assert bench.engine.cache.free_slots == 7, "its memory may still be written to"
    bench.fetches[0].on_end(PeerError("cancelled"))
    bench.step()
    assert len(bench.fetches) == 2
    bring(model, bench.fetches[1])
    bench.run()
    assert [bench.tokens(handle) for handle in handles[1:]] == [generate(model, prompt, 6)] * 2
    assert outcomes(bench) == {"cancelled": 1, "fetched": 1, "joined": 3}
    bench.assert_nothing_is_held()


@pytest.mark.parametrize("is_exact", [True, False])
def test_lossy_rows_are_never_found_by_others(model: Model, is_exact: bool):
    """Neither what came, nor what was computed on it, nor what was generated behind it; an exact one is found."""
    bench, prompt = Bench(model), prompt_of(b"first" * 20)
    handle = ask(bench, prompt, max_tokens=150, ignore_eos=True, choices=2)
    bench.step()
    bring(model, bench.fetches[0], is_exact=is_exact)
    bench.run()
    assert len(bench.tokens(handle)) == 150
    assert (bench.engine.cache.stats().cached_pages > 0) == is_exact
    again = bench.ask([*prompt, *bench.tokens(handle), 1])
    bench.run()
    assert (find_started(bench, again).cached_tokens > len(prompt)) == is_exact
    bench.assert_nothing_is_held()


def test_a_request_that_frees_its_memory_computes_lossy_rows_again(model: Model):
    bench, prompt = Bench(model), prompt_of(b"first")
    handle = ask(bench, prompt, max_tokens=70, ignore_eos=True)
    bench.step()
    bring(model, bench.fetches[0], is_exact=False)
    bench.step()
    bench.step()
    (sequence,) = bench.engine.requests.sequences()
    bench.engine._preempt(sequence)
    bench.run()
    assert len(bench.tokens(handle)) == 70
    assert bench.engine.cache.cached_tokens(sequence.chain.hashes, 1000) >= len(SHARED), "it is exact now"


def test_a_prefill_for_another_instance_takes_a_prefix_too_and_its_end_frees_it(model: Model):
    bench, prompt = Bench(model), list(prompt_of(b"first"))
    body = PrefillRequest(request_id="r", model="tiny", token_ids=prompt, prefix_url=URL)
    for handle, ends_early in ((1, False), (2, True)):
        bench.engine.cache.reset()
        message = StartPrefill(handle, body)
        offer, _ = bench.offers.grant(message.subject, 0, len(prompt))
        bench.engine.inbox.put(PrefillOffered(message, offer))
        bench.step()
        fetch = bench.fetches[-1]
        if ends_early:
            bench.offers.end(offer, "cancelled")
            bench.step()
            assert fetch.cancelled
            fetch.on_end(PeerError("cancelled"))
            bench.step()
        else:
            bring(model, fetch)
            bench.run()
            assert bench.engine.stats.prompt_tokens == len(prompt) - len(SHARED)
            assert offer.send_state.queue.queued_bytes > 0
            bench.offers.end(offer, "delivered")
            bench.step()
        bench.assert_nothing_is_held()


def test_marks_what_a_prefill_computes_on_lossy_rows(model: Model):
    bench, prompt = Bench(model), list(prompt_of(b"first"))
    message = StartPrefill(1, PrefillRequest(request_id="r", model="tiny", token_ids=prompt, prefix_url=URL))
    offer, _ = bench.offers.grant(message.subject, 0, len(prompt))
    bench.engine.inbox.put(PrefillOffered(message, offer))
    bench.step()
    bring(model, bench.fetches[0], is_exact=False)
    bench.run()
    assert not offer.send_state._is_exact
    assert bench.engine.cache.stats().cached_pages == 0
