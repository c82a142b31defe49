"""One request with many choices beside others: none waits for all of it, and each choice answers as if alone."""

from typing import Any

import pytest

from prfaas.wire.engine import Sampling
from prfaas.wire.prefill import LegParams
from prfaas_worker.engine import sequences
from prfaas_worker.models.base import Model

from .engine_bench import NAMED, Bench, Parrot, prefix_fetched

SAMPLED = Sampling(1.0, 1.0, 0, 42)
PROMPT = b"def f(x):\n    return" * 8
LEG = LegParams(role="destination", **NAMED)


@pytest.fixture
def parrot(model: Model) -> Any:
    return Parrot(model)


def steps_until_ended(bench: Bench, handles: list[int], most: int) -> int:
    """Step until all of these have ended, or more than `most` times."""
    for steps in range(most):
        if all(bench.ends(handle) for handle in handles):
            return steps
        bench.step()
    return most


@pytest.mark.parametrize("begun", [False, True])
def test_a_request_with_as_many_choices_as_may_decode_does_not_stop_the_others(parrot: Any, begun: bool):
    """A long stream runs, then comes one request with as many choices as may decode, and behind it, or when it has
    begun and some of its choices wait, five short ones."""
    bench = Bench(parrot, max_running=8, max_waiting=20)
    bench.ask(b"a" * 100, max_tokens=500, ignore_eos=True)
    for _ in range(10):
        bench.step()
    many = bench.ask(b"b" * 100, choices=8, max_tokens=500, ignore_eos=True)
    while begun and not bench.tokens(many):
        bench.step()
    short = [bench.ask(bytes([99 + number]) * 100, max_tokens=5, ignore_eos=True) for number in range(5)]
    assert steps_until_ended(bench, short, 100) < 60
    bench.run()
    assert [len(bench.tokens(many, choice)) for choice in range(8)] == [500] * 8
    bench.assert_nothing_is_held()


def test_a_request_with_many_choices_leaves_half_of_the_places_to_others(parrot: Any):
    bench = Bench(parrot, max_running=8, max_waiting=20)
    handle = bench.ask(b"b" * 100, choices=8, max_tokens=50, ignore_eos=True)
    while not bench.tokens(handle):
        bench.step()
    assert bench.memory.num_slots - bench.engine.cache.free_slots == 1 + 4
    assert [len(bench.tokens(handle, choice)) for choice in range(8)] == [1] * 8, "each has begun"
    bench.run()
    assert [len(bench.tokens(handle, choice)) for choice in range(8)] == [50] * 8


def answers(bench: Bench, requests: list[tuple[bytes, int]], max_tokens: int) -> list[list[int]]:
    """Run requests for so many choices to their end; return the tokens of each choice."""
    handles = [
        bench.ask(prompt, choices=choices, max_tokens=max_tokens, sampling=SAMPLED, ignore_eos=True)
        for prompt, choices in requests
    ]
    bench.run()
    assert not bench.engine.requests
    bench.assert_nothing_is_held()
    return [
        bench.tokens(handle, choice)
        for handle, (_, choices) in zip(handles, requests, strict=True)
        for choice in range(choices)
    ]


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_choices_without_a_slot_wait_and_generate_the_same(model: Model, slots: int):
    expected = answers(Bench(model, max_running=32), [(PROMPT, 5)], 70)
    assert answers(Bench(model, max_running=slots), [(PROMPT, 5)], 70) == expected
    assert [len(tokens) for tokens in expected] == [70] * 5


def test_a_choice_that_waited_starts_from_its_prompts_state_and_computes_nothing_again(model: Model):
    bench = Bench(model, max_running=4)
    bench.ask(PROMPT, choices=6, max_tokens=20, sampling=SAMPLED)
    bench.run()
    assert bench.engine.stats.prompt_tokens == len(PROMPT)


def test_choices_of_a_prompt_that_was_prefilled_elsewhere_compute_none_of_it_here(model: Model):
    bench = Bench(model, max_running=4)
    single, handle = (bench.ask(PROMPT, choices=count, max_tokens=12, sampling=SAMPLED, leg=LEG) for count in (1, 6))
    bench.run()
    for fetch in bench.fetches:
        fetch.on_end(prefix_fetched(model, fetch.sequence, len(PROMPT) - 1))
    bench.run()
    assert bench.engine.stats.prompt_tokens == 0
    assert bench.tokens(handle, 0) == bench.tokens(single)
    assert all(bench.tokens(handle, choice) for choice in range(6))
    bench.assert_nothing_is_held()


@pytest.mark.parametrize(("slots", "pages"), [(1, 7), (1, 8), (3, 7), (3, 9), (3, 12)])
def test_a_stored_prompt_gives_way_when_pages_are_short(model: Model, slots: int, pages: int):
    """Two requests whose answers outgrow the memory, however many pages there are beyond the least."""
    requests = [(b"import os\n" * 6, 3), (b"class A:\n    pass\n" * 5, 2)]
    expected = answers(Bench(model), requests, 150)
    assert answers(Bench(model, max_running=slots, num_pages=pages), requests, 150) == expected


slots_or_pages = pytest.mark.parametrize(("slots", "pages"), [(4, 256), (16, 16)])
"""Which of the two a buyer's prefills would use up: each has a slot and three pages."""


def answer_beside_a_buyer(model: Model, slots: int, pages: int) -> list[int]:
    """Return what the hub gets after a buyer asked for prefills that it does not fetch."""
    bench = Bench(model, max_running=slots, max_waiting=20, num_pages=pages)
    for number in range(8):
        prompt, transfer_id = bytes([97 + number]) * 190, f"{number:032x}"
        bench.give(prompt, 500 + number, caller="buyer/shop", transfer_id=transfer_id)
    bench.run()
    handle = bench.ask(b"i" * 100, max_tokens=3, ignore_eos=True)
    bench.run()
    return bench.tokens(handle)


@slots_or_pages
def test_a_buyer_that_fetches_nothing_leaves_half_of_the_memory_to_the_hub(model: Model, slots: int, pages: int):
    assert len(answer_beside_a_buyer(model, slots, pages)) == 3


@slots_or_pages
def test_control_a_buyer_that_may_have_all_memory_keeps_the_hub_waiting(
    model: Model, monkeypatch: pytest.MonkeyPatch, slots: int, pages: int
):
    monkeypatch.setattr(sequences, "COUNTED_PART", 1)
    assert not answer_beside_a_buyer(model, slots, pages)
