"""Prefixes of other instances, in engines that are stepped by hand: what comes is used as if it had been cached, what
does not come costs only time, what many want is fetched once, and what is lossy stays with its receiver. And an
instance gives what it has, where that takes nothing from those that compute here.
"""

from typing import Any

import msgspec
import pytest

from prfaas.errors import PeerError
from prfaas.wire.engine import Cancel, Failed, Started
from prfaas.wire.frames import Kind
from prfaas.wire.prefill import LegParams
from prfaas_worker.engine.sequences import Phase
from prfaas_worker.models.base import Model

from .engine_bench import NAMED, Bench, FetchByHand, generate, prefix_fetched

SHARED = (b"You are a careful assistant that answers in Python. " * 5)[:192]


def prompt_of(tail: bytes) -> bytes:
    return SHARED + tail + b" and so on until the end"


def leg_of(tokens: int = len(SHARED)) -> LegParams:
    return LegParams(role="destination", **NAMED, host="127.0.0.1", port=1, tokens=tokens)


def ask(bench: Bench, prompt: bytes, tokens: int = len(SHARED), **fields: Any) -> int:
    return bench.ask(prompt, **{"leg": leg_of(tokens)} | fields)


def bring(model: Model, fetch: FetchByHand, tokens: int = len(SHARED), **facts: Any) -> None:
    fetch.on_end(prefix_fetched(model, fetch.sequence, tokens, **facts))


def find_started(bench: Bench, handle: int) -> Started:
    return next(one for one in bench.sent if isinstance(one, Started) and one.handle == handle)


def refusals(bench: Bench) -> list[tuple[int, int, str]]:
    return [(one.handle, one.status, one.code) for one in bench.sent if isinstance(one, Failed)]


def outcomes(bench: Bench) -> dict[str, int]:
    return dict(bench.engine.stats.prefixes)


def teach(bench: Bench, prompt: bytes) -> None:
    """Let an engine serve a prompt, so that its states and rows are cached."""
    bench.ask(prompt, max_tokens=1)
    bench.run()


def test_a_fetched_prefix_is_used_and_only_the_rest_is_computed(model: Model):
    bench, prompt = Bench(model), prompt_of(b"first" * 20)
    expected = generate(model, prompt, 6)
    handle = ask(bench, prompt)
    bench.step()
    (fetch,) = bench.fetches
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
    again = bench.ask(prompt + b", and a second turn")
    bench.run()
    assert find_started(bench, again).cached_tokens > len(SHARED), "what was computed behind it is kept, too"
    bench.assert_nothing_is_held()


def test_a_prefix_that_is_here_or_leaves_no_token_is_not_fetched(model: Model):
    bench, prompt = Bench(model), prompt_of(b"first")
    teach(bench, prompt)
    again, whole, longer = ask(bench, prompt), ask(bench, b"z" * 128, 128), ask(bench, b"z" * 100, 128)
    bench.run()
    assert bench.fetches == []
    assert bench.declined == [(again, NAMED["transfer_id"])]
    assert find_started(bench, again).cached_tokens == len(prompt) // 64 * 64
    assert [find_started(bench, one).cached_tokens for one in (whole, longer)] == [0, 0]


def test_a_fetch_that_brings_nothing_leaves_no_trace(model: Model, caplog: pytest.LogCaptureFixture):
    bench, prompt = Bench(model), prompt_of(b"first")
    expected = generate(model, prompt, 6)
    handle = ask(bench, prompt)
    bench.step()
    (fetch,) = bench.fetches
    bench.memory.slots[fetch.sequence.held.slot].fill_(0x3C)  # some of the states had come
    fetch.on_end(PeerError("gone"))
    bench.run()
    assert bench.tokens(handle) == expected
    assert len(bench.fetches) == 1, "it is not fetched again"
    assert find_started(bench, handle).cached_tokens == 0
    assert outcomes(bench) == {"failed": 1}
    assert "its cache did not come: gone" in caplog.text
    bench.assert_nothing_is_held()


def test_prompts_behind_one_system_prompt_make_one_transfer(model: Model):
    bench = Bench(model, slots=8, max_waiting=8)
    prompts = [prompt_of(tail) for tail in (b"one", b"two", b"two", b"four")]
    handles = [ask(bench, prompt) for prompt in prompts]
    bench.step()
    assert len(bench.fetches) == 1
    assert [handle for handle, _ in bench.declined] == handles[1:], "their sources need not wait"
    assert bench.engine.cache.free_slots == 7, "who waits holds nothing"
    bring(model, bench.fetches[0])
    bench.run()
    assert len(bench.fetches) == 1
    assert [bench.tokens(handle) for handle in handles] == [generate(model, prompt, 6) for prompt in prompts]
    assert outcomes(bench) == {"fetched": 1, "joined": 3}
    assert bench.engine.stats.prompt_tokens == sum(map(len, prompts)) - 4 * len(SHARED)
    bench.assert_nothing_is_held()


def test_strangers_and_prefixes_of_other_lengths_are_not_waited_for(model: Model):
    bench = Bench(model, slots=8, max_waiting=4)
    ask(bench, prompt_of(b"first"))
    ask(bench, prompt_of(b"first"), 128)
    ask(bench, b"x" * 200)
    ask(bench, prompt_of(b"first"), cache_salt="another tenant")
    bench.step()
    assert len(bench.fetches) == 4


@pytest.mark.parametrize(("second", "fetches"), [("eu", 1), ("us", 2), ("hub", 2)])
def test_a_request_waits_for_no_cluster_but_that_of_its_own_leg(model: Model, second: str, fetches: int):
    """A slow member would delay requests that forbid it. The control is a second request to the same cluster."""
    bench = Bench(model, slots=8, max_waiting=4)
    for cluster, places in (("eu", ("eu",)), (second, (second,))):
        ask(bench, prompt_of(b"first"), leg=msgspec.structs.replace(leg_of(), cluster=cluster), places=places)
    bench.step()
    assert len(bench.fetches) == fetches
    for fetch in bench.fetches[1:]:
        bring(model, fetch)
    bench.run()
    assert bench.ends(2) == (["length"] if fetches == 2 else []), "the first one's source is silent"


@pytest.mark.parametrize("leaves", [False, True])
def test_those_that_waited_in_vain_compute(model: Model, leaves: bool):
    bench, prompt = Bench(model, slots=8), prompt_of(b"first")
    handles = [ask(bench, prompt) for _ in range(3)]
    bench.step()
    if leaves:
        bench.engine.inbox.put(Cancel(handles.pop(0)))
        bench.step()
        assert bench.fetches[0].cancelled
        assert bench.engine.cache.free_slots == 7, "its memory may still be written to"
    bench.fetches[0].on_end(PeerError("gone"))
    bench.run()
    assert len(bench.fetches) == 1
    assert [bench.tokens(handle) for handle in handles] == [generate(model, prompt, 6)] * len(handles)
    assert outcomes(bench) == {"cancelled" if leaves else "failed": 1, "joined": 2}
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


@pytest.mark.parametrize("ends_early", [False, True])
def test_an_instance_that_prefills_for_another_fetches_a_prefix_first(model: Model, ends_early: bool):
    bench, prompt = Bench(model), prompt_of(b"first")
    offer = bench.give(prompt, prefix=leg_of())
    bench.step()
    (fetch,) = bench.fetches
    if ends_early:
        bench.offers.end(offer, "cancelled")
        bench.step()
        assert fetch.cancelled
        fetch.on_end(PeerError("cancelled"))
    else:
        bring(model, fetch)
        bench.run()
        assert bench.engine.stats.prompt_tokens == len(prompt) - 1 - len(SHARED)
        assert rows_of(offer) == len(prompt) - 1, "of the prefix, too"
        bench.offers.end(offer, "delivered")
    bench.run()
    bench.assert_nothing_is_held()


def rows_of(offer: Any) -> int:
    """Return the tokens of which one layer's rows were put."""
    frames = [frame.header for frame in offer._held or () if frame.header.kind == Kind.BLOCK]
    layer = frames[0].layer
    return sum(header.tokens for header in frames if header.layer == layer)


def test_marks_what_a_prefill_computes_on_lossy_rows(model: Model):
    bench = Bench(model)
    offer = bench.give(prompt_of(b"first"), prefix=leg_of())
    bench.step()
    bring(model, bench.fetches[0], is_exact=False)
    bench.run()
    assert offer._finished is not None
    assert offer._finished[1] is False
    assert bench.engine.cache.stats().cached_pages == 0


def test_a_source_gives_the_prefix_that_it_has_and_computes_nothing(model: Model):
    bench = Bench(model)
    teach(bench, SHARED + b"x")
    computed = bench.engine.stats.prompt_tokens
    offer = bench.give(prompt_of(b"first"), tokens=len(SHARED))
    bench.run()
    assert (rows_of(offer), bench.engine.stats.prompt_tokens) == (len(SHARED), computed)
    assert offer._finished is not None
    assert not [one for one in bench.sent if isinstance(one, Started) and one.handle == 500]
    bench.offers.end(offer, "delivered")
    bench.run()
    assert find_started(bench, 500).cached_tokens == len(SHARED)
    bench.assert_nothing_is_held()


def test_a_given_prefix_that_nobody_fetches_is_free_when_its_caller_leaves(model: Model):
    bench = Bench(model)
    teach(bench, SHARED + b"x")
    bench.give(prompt_of(b"first"), tokens=len(SHARED))
    bench.run()
    bench.engine.inbox.put(Cancel(500))
    bench.run()
    bench.assert_nothing_is_held()


@pytest.mark.parametrize("tokens", [64, 128, 100])
def test_a_source_without_a_state_where_the_prefix_ends_refuses(model: Model, tokens: int):
    bench = Bench(model)
    teach(bench, SHARED + b"x")
    offer = bench.give(prompt_of(b"first"), tokens=tokens)
    bench.run()
    assert refusals(bench) == [(500, 404, "prefix_not_found")]
    assert offer.send_state.failure == f"no prefix of {tokens} tokens of this prompt is cached here"
    bench.offers.end(offer, "failed")
    bench.run()
    bench.assert_nothing_is_held()


def test_given_prefixes_take_a_quarter_of_the_slots(model: Model):
    bench = Bench(model, max_running=8, slots=8)
    teach(bench, SHARED + b"x")
    legs = [{"handle": number, "transfer_id": f"{number:032x}", "tokens": len(SHARED)} for number in range(501, 505)]
    offers = [bench.give(prompt_of(b"first"), **leg) for leg in legs[:3]]
    bench.run()
    assert refusals(bench) == [(503, 503, "overloaded")]
    bench.offers.end(offers[0], "delivered")
    offers.append(bench.give(prompt_of(b"first"), **legs[3]))
    bench.run()
    assert len(refusals(bench)) == 1, "one more may be given"
    for offer in offers[1:]:
        bench.offers.end(offer, "failed")
    bench.run()
    bench.assert_nothing_is_held()


def test_a_given_prefix_takes_no_slot_of_a_request_that_waits(model: Model):
    bench = Bench(model, max_running=2, slots=2)
    teach(bench, SHARED + b"x")
    handles = [bench.ask(bytes([number]) * 40, max_tokens=3) for number in (1, 2)]
    offer = bench.give(prompt_of(b"first"), tokens=len(SHARED))
    bench.run()
    assert refusals(bench) == [(500, 503, "overloaded")]
    assert [len(bench.tokens(handle)) for handle in handles] == [3, 3]
    bench.offers.end(offer, "failed")
    bench.run()
    bench.assert_nothing_is_held()


def test_a_given_prefix_takes_no_promised_slot(model: Model):
    bench = Bench(model, max_running=2, slots=2)
    teach(bench, SHARED + b"x")
    handle = bench.ask(b"some prompt", choices=3, max_tokens=3)
    bench.engine._handle_events(wait=False)
    bench.engine._admit(next(bench.engine.requests.sequences()))  # one slot is free, for its next choice
    offer = bench.give(prompt_of(b"first"), tokens=len(SHARED))
    bench.step()
    assert refusals(bench) == [(500, 503, "overloaded")]
    bench.offers.end(offer, "failed")
    bench.run()
    assert len(bench.tokens(handle, 2)) == 3
    bench.assert_nothing_is_held()


def test_a_given_prefix_takes_no_page_that_a_stream_needs_next(model: Model):
    bench = Bench(model, num_pages=5)
    teach(bench, b"x" * 65)  # a block, and a state
    bench.ask(b"y" * 60, max_tokens=30, ignore_eos=True)
    for _ in range(3):
        bench.step()
    taken = bench.engine.cache.open((), 64 * (bench.engine.cache.free_pages - 1), 0)
    assert taken is not None
    offer = bench.give(b"x" * 70, tokens=64)
    bench.step()
    bench.engine.cache.close(taken.lease)
    ((_, status, _),) = refusals(bench)
    assert status in (404, 503)
    bench.offers.end(offer, "failed")
    bench.run()
    bench.assert_nothing_is_held()


def test_a_prefix_of_another_cluster_serves_no_request_that_forbids_that_cluster(model: Model):
    bench, prompt = Bench(model), prompt_of(b"first" * 20)
    expected = generate(model, prompt, 6)
    ask(bench, prompt, leg=msgspec.structs.replace(leg_of(), cluster="eu"))
    bench.step()
    bring(model, bench.fetches[0])
    bench.run()
    strict, allowed, anybody = (bench.ask(prompt, places=places) for places in ((), ("eu",), None))
    bench.run()
    assert find_started(bench, strict).cached_tokens == 0
    assert bench.tokens(strict) == expected
    assert find_started(bench, allowed).cached_tokens >= len(SHARED)
    assert find_started(bench, anybody).cached_tokens >= len(SHARED)
    later = bench.ask(prompt, places=())
    bench.run()
    assert find_started(bench, later).cached_tokens >= len(SHARED), "what was computed here serves all"


@pytest.mark.parametrize("cluster", ["hub", "eu"])
def test_a_prefix_of_nobody_knows_where_serves_only_requests_that_forbid_nothing(model: Model, cluster: str):
    """As an instance of an older version gives it, which may have it from anywhere."""
    bench, prompt = Bench(model), prompt_of(b"first" * 20)
    ask(bench, prompt, leg=msgspec.structs.replace(leg_of(), cluster=cluster))
    bench.step()
    bring(model, bench.fetches[0], origins=None)
    bench.run()
    allowed, strict = (bench.ask(prompt, places=places) for places in (("eu", "*"), ("eu", "us")))
    bench.run()
    assert find_started(bench, allowed).cached_tokens >= len(SHARED)
    assert find_started(bench, strict).cached_tokens == 0


def test_without_certificates_what_another_cluster_gave_may_be_from_anywhere(model: Model):
    """Nobody proves where a cache is from. What the own cluster gave is left to its own network."""
    bench = Bench(model, knows_peers=False)
    for number, cluster in enumerate(("eu", "hub")):
        prompt = bytes([number]) + prompt_of(b"first" * 20)[1:]
        ask(bench, prompt, leg=msgspec.structs.replace(leg_of(), cluster=cluster))
        bench.step()
        bring(model, bench.fetches[number])
        bench.run()
        strict = bench.ask(prompt, places=("eu",))
        bench.run()
        assert (find_started(bench, strict).cached_tokens > 0) is (cluster == "hub")


@pytest.mark.parametrize(("places", "serves"), [(("eu@1",), True), (("eu@2",), False), (("eu",), False)])
def test_what_a_cluster_gave_before_it_was_admitted_again_serves_no_request(model: Model, places: Any, serves: bool):
    bench, prompt = Bench(model), prompt_of(b"first" * 20)
    ask(bench, prompt, leg=msgspec.structs.replace(leg_of(), cluster="eu", place="eu@1"))
    bench.step()
    bring(model, bench.fetches[0])
    bench.run()
    strict = bench.ask(prompt, places=places)
    bench.run()
    assert (find_started(bench, strict).cached_tokens > 0) is serves


def test_what_the_own_cluster_gave_is_its_own_in_every_place(model: Model):
    """A place is another one each time that a cluster is admitted, and its instances know none."""
    bench, prompt = Bench(model), prompt_of(b"first" * 20)
    ask(bench, prompt, leg=msgspec.structs.replace(leg_of(), cluster="hub", place="hub@1"))
    bench.step()
    bring(model, bench.fetches[0])
    bench.run()
    strict = bench.ask(prompt, places=())
    bench.run()
    assert find_started(bench, strict).cached_tokens > 0


def test_a_given_prefix_says_whose_bytes_it_stands_on_and_is_not_given_against_the_places(model: Model):
    bench, prompt = Bench(model), prompt_of(b"first" * 20)
    ask(bench, prompt, leg=msgspec.structs.replace(leg_of(), cluster="eu"))
    bench.step()
    bring(model, bench.fetches[0])
    bench.run()
    offer = bench.give(prompt, tokens=len(SHARED))
    bench.step()
    assert offer._finished == (0.0, True, ("eu",))
    bench.give(prompt, handle=501, places=(), tokens=len(SHARED), transfer_id="b" * 32)
    bench.step()
    assert refusals(bench) == [(501, 404, "prefix_not_found")]
