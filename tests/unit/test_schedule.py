"""The schedule: what is admitted, what a step computes, what gives way, and that run to the end it serves all."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.schedule import (
    Budgets,
    RunningSequence,
    Schedule,
    ScheduledChunk,
    ScheduleFacts,
    WaitingSequence,
    most_further_slots,
    role_budgets,
    schedule,
    step_tokens,
)

BUDGETS = Budgets(step_tokens=1024, prompt_tokens_beside_decodes=512)


def waiting(handle: int, pages: int = 1, *, further: bool = False, comes: bool = False) -> WaitingSequence[int]:
    return WaitingSequence(handle, pages, further, comes)


def prompt(handle: int, remaining: int, cut: int | None = None) -> RunningSequence[int]:
    return RunningSequence(handle, remaining, remaining if cut is None else cut, 2, False, False)


def decoding(handle: int, *, short: bool = False, held: int = 2, continues: bool = True) -> RunningSequence[int]:
    return RunningSequence(handle, 1, 1, held, short, decodes=True, continues=continues)


def facts(
    *running: RunningSequence[int],
    waits: tuple[WaitingSequence[int], ...] = (),
    slots: int = 8,
    pages: int = 100,
    further_slots: int = 4,
    most_decodes: int = 1000,
) -> ScheduleFacts[int]:
    return ScheduleFacts(waits, running, slots, pages, further_slots, most_decodes)


@pytest.mark.parametrize(
    ("fixed_seconds", "token_seconds", "most_tokens", "expected"),
    [
        (0.004, 1e-4, 2048, 1024),  # a processor's cores: a small step is nearly as quick by the token
        (0.004, 1e-4, 256, 1024),  # the same, without the time to measure more
        (0.02, 3e-6, 32_768, 16_384),  # every step reads 98 GB of weights
        (0.02, 3e-6, 4096, 2048),  # as quick, with memory for 4,096 tokens
        (0.0, 1e-2, 1024, 256),  # a large model on a small machine: no request waits longer than it must
        (0.1, 7e-4, 1024, 512),  # half a second at most
    ],
)
def test_a_step_is_as_long_as_makes_a_machine_quick_and_no_longer(fixed_seconds, token_seconds, most_tokens, expected):
    sizes = [256 << doublings for doublings in range(8) if 256 << doublings <= most_tokens]
    assert step_tokens({tokens: fixed_seconds + token_seconds * tokens for tokens in sizes}) == expected


def test_without_a_measurement_steps_are_as_long_as_they_were():
    assert role_budgets(step_tokens({})) == {
        "prefill": Budgets(2048, 2048),
        "mixed": Budgets(1024, 512),
        "decode": Budgets(1024, 128),
    }


def test_nothing_to_do_is_an_empty_batch():
    assert schedule(facts(), BUDGETS).empty


def test_decoding_continues_beside_one_chunk_of_prompt():
    found = schedule(facts(prompt(3, 5000), decoding(1), decoding(2)), BUDGETS)
    assert found == Schedule(chunks=(ScheduledChunk(3, 512),), decodes=(1, 2))


def test_a_prompt_alone_gets_the_whole_step():
    assert schedule(facts(prompt(3, 5000)), BUDGETS).chunks == (ScheduledChunk(3, 1024),)


def test_decodes_take_their_tokens_out_of_the_steps_budget():
    many = tuple(decoding(n) for n in range(600))
    assert schedule(facts(*many, prompt(900, 5000)), BUDGETS).chunks == (ScheduledChunk(900, 424),)


def test_what_a_short_prompt_leaves_of_a_step_goes_to_the_next():
    prompts = prompt(1, 100), prompt(2, 300), prompt(3, 900), prompt(4, 5)
    found = schedule(facts(*prompts), BUDGETS).chunks
    assert found == (ScheduledChunk(1, 100), ScheduledChunk(2, 300), ScheduledChunk(3, 619), ScheduledChunk(4, 5))


def test_a_short_prompt_does_not_wait_for_a_long_one():
    found = schedule(facts(prompt(1, 60_000), prompt(2, 30_000), prompt(3, 20)), BUDGETS).chunks
    assert found == (ScheduledChunk(1, 512), ScheduledChunk(2, 492), ScheduledChunk(3, 20))
    beside_decodes = schedule(facts(decoding(1), prompt(2, 60_000), prompt(3, 20)), BUDGETS)
    assert beside_decodes.chunks == (ScheduledChunk(2, 492), ScheduledChunk(3, 20))


def test_the_first_prompt_gets_half_of_every_step_however_many_short_ones_come():
    short = tuple(prompt(n, 100) for n in range(2, 40))
    assert schedule(facts(prompt(1, 60_000), *short), BUDGETS).chunks[0] == ScheduledChunk(1, 512)


def test_in_order_of_arrival_a_prompt_gets_what_those_before_it_leave():
    budgets = role_budgets(1024, in_order=True)["decode"]
    prompts = prompt(1, 700), prompt(2, 60_000), prompt(3, 20)
    found = schedule(facts(decoding(4), *prompts), budgets)
    assert found.chunks == (ScheduledChunk(1, 700), ScheduledChunk(2, 323))
    assert schedule(facts(decoding(4), *prompts), BUDGETS).chunks[-1] == ScheduledChunk(3, 20), "ours is for short ones"


def test_of_prompts_that_are_alike_one_is_finished_before_the_next_begins():
    assert schedule(facts(prompt(1, 5000), prompt(2, 5000)), BUDGETS).chunks == (ScheduledChunk(1, 1024),)
    assert schedule(facts(prompt(1, 700), prompt(2, 5000)), BUDGETS).chunks == (
        ScheduledChunk(1, 700),
        ScheduledChunk(2, 324),
    )


def test_a_chunk_ends_where_its_state_is_to_be_kept():
    assert schedule(facts(prompt(1, 900, cut=192)), BUDGETS).chunks == (ScheduledChunk(1, 192),)


def test_one_token_left_of_a_prompt_is_a_chunk_unless_it_decodes():
    last = prompt(1, 1)
    assert schedule(facts(last), BUDGETS) == Schedule(chunks=(ScheduledChunk(1, 1),))


def test_requests_are_admitted_in_order_while_slots_and_pages_are_free():
    waits = waiting(7), waiting(8), waiting(9)
    assert schedule(facts(waits=waits, slots=3), BUDGETS).admit == (7, 8, 9)
    assert schedule(facts(waits=waits, slots=2), BUDGETS).admit == (7, 8)
    assert schedule(facts(waits=waits, slots=0), BUDGETS).admit == ()
    assert schedule(facts(waits=waits, pages=1), BUDGETS).admit == (7,)


def test_a_large_request_is_not_overtaken():
    assert schedule(facts(waits=(waiting(1, pages=40), waiting(2)), pages=30), BUDGETS).admit == ()
    choice = waiting(1, pages=40, further=True)
    assert schedule(facts(waits=(choice, waiting(2)), pages=30), BUDGETS).admit == ()


def test_further_choices_take_their_share_of_the_slots_in_turn_and_then_let_others_pass():
    waits = waiting(1, further=True), waiting(2, further=True), waiting(3), waiting(4, further=True), waiting(5)
    assert schedule(facts(waits=waits, further_slots=3), BUDGETS).admit == (1, 2, 3, 4, 5)
    assert schedule(facts(waits=waits, further_slots=1), BUDGETS).admit == (1, 3, 5)
    assert schedule(facts(waits=waits, further_slots=0), BUDGETS).admit == (3, 5)
    assert schedule(facts(waits=waits, further_slots=2, slots=3), BUDGETS).admit == (1, 2, 3)
    assert schedule(facts(waits=(waiting(1, pages=101, further=True), waiting(2)), further_slots=0), BUDGETS).admit == (
        2,
    )


def test_a_cache_that_comes_takes_no_slot_and_passes_what_lacks_one_but_nothing_that_lacks_pages():
    waits = waiting(1), waiting(2, comes=True), waiting(3), waiting(4, comes=True)
    assert schedule(facts(waits=waits, slots=0), BUDGETS).admit == (2, 4)
    assert schedule(facts(waits=waits, slots=1), BUDGETS).admit == (1, 2, 4)
    assert schedule(facts(waits=waits, slots=2, pages=2), BUDGETS).admit == (1, 2)
    assert schedule(facts(waits=(waiting(1, pages=9), waits[1]), pages=5), BUDGETS).admit == ()


def test_a_cache_that_has_come_takes_a_slot_with_its_place_and_before_what_is_admitted():
    come = [decoding(number, continues=False)._replace(lacks_slot=True) for number in (1, 2, 3)]
    waits = waiting(4), waiting(5)
    for slots, most_decodes, decodes, admit in [
        (0, 9, (), ()),
        (2, 9, (1, 2), ()),
        (2, 1, (1,), (4,)),
        (4, 9, (1, 2, 3), (4,)),
        (4, 2, (1, 2), (4, 5)),
    ]:
        found = schedule(facts(*come, waits=waits, slots=slots, most_decodes=most_decodes), BUDGETS)
        assert (found.decodes, found.admit) == (decodes, admit)


def test_a_cache_that_has_come_with_more_to_compute_than_a_token_takes_a_slot_with_its_chunk():
    come = prompt(1, 9)._replace(lacks_slot=True)
    found = schedule(facts(come, waits=(waiting(2),), slots=1), BUDGETS)
    assert (found.chunks, found.admit) == ((ScheduledChunk(1, 9),), ())
    assert schedule(facts(come, waits=(waiting(2),), slots=0), BUDGETS).empty
    found = schedule(facts(decoding(3), come, slots=1, most_decodes=1), BUDGETS)
    assert (found.chunks, found.decodes) == ((), (3,)), "it has no place for its answer"


def test_a_cache_that_has_come_gives_way_as_all_do():
    come = decoding(2, held=7, continues=False)._replace(lacks_slot=True)
    found = schedule(facts(decoding(1, short=True), come, decoding(3), pages=0, most_decodes=2), BUDGETS)
    assert (found.preempt, found.decodes) == ((2,), (1, 3)), "before an answer that came later"
    found = schedule(facts(come._replace(key=0), decoding(1, short=True), pages=0, slots=0), BUDGETS)
    assert (found.preempt, found.decodes) == ((0,), (1,)), "or both would wait for ever"


def test_examines_no_request_behind_one_that_lacks_pages():
    def waits() -> Iterator[WaitingSequence[int]]:
        yield waiting(1)
        yield waiting(2)
        raise AssertionError

    assert schedule(facts()._replace(waiting=waits(), free_pages=1), BUDGETS).admit == (1,)


def test_admission_leaves_a_page_for_every_decode():
    assert schedule(facts(decoding(1), decoding(2), waits=(waiting(3),), pages=2), BUDGETS).admit == ()
    assert schedule(facts(decoding(1), decoding(2), waits=(waiting(3),), pages=3), BUDGETS).admit == (3,)


def test_without_a_page_the_last_to_arrive_gives_way_and_none_is_admitted():
    found = schedule(facts(decoding(1, short=True), decoding(2), prompt(3, 9), waits=(waiting(4),), pages=0), BUDGETS)
    assert found == Schedule(preempt=(3,), decodes=(1, 2))


def test_one_that_gives_way_may_do_for_several():
    found = schedule(facts(decoding(1, short=True), decoding(2, short=True), decoding(3, held=2), pages=0), BUDGETS)
    assert found == Schedule(preempt=(3,), decodes=(1, 2))
    found = schedule(facts(decoding(1, short=True), decoding(2, short=True), decoding(3, held=1), pages=0), BUDGETS)
    assert found == Schedule(preempt=(3,), decodes=(1,))


def test_a_prompt_that_others_read_from_never_gives_way():
    pinned = prompt(3, 9)._replace(pinned=True)
    found = schedule(facts(decoding(1, short=True), decoding(2), pinned, pages=0), BUDGETS)
    assert found == Schedule(preempt=(2,), chunks=(ScheduledChunk(3, 9),), decodes=(1,))
    assert schedule(facts(decoding(1, short=True), pinned, pages=0), BUDGETS) == Schedule(
        chunks=(ScheduledChunk(3, 9),)
    )


def test_what_could_begin_waits_until_fewer_decode_than_may_and_interrupts_none():
    running = decoding(1, continues=False), decoding(2), prompt(3, 9), decoding(4), decoding(5, continues=False)
    for most, decodes, tokens in [
        (1, (2,), 8),
        (2, (2, 4), 8),
        (3, (2, 4, 1), 8),
        (4, (2, 4, 1, 5), 8),
        (5, (2, 4, 1, 5), 9),
    ]:
        found = schedule(facts(*running, most_decodes=most), BUDGETS)
        assert (found.decodes, found.chunks) == (decodes, (ScheduledChunk(3, tokens),))


def test_without_a_place_for_its_answer_a_prompt_is_computed_but_for_its_last_token():
    prompts = prompt(2, 9), prompt(3, 1), prompt(4, 7)._replace(pinned=True)
    found = schedule(facts(decoding(1), *prompts, most_decodes=1), BUDGETS)
    assert found.chunks == (ScheduledChunk(2, 8), ScheduledChunk(4, 7)), "what is for another instance has no answer"
    found = schedule(facts(decoding(1), *prompts, most_decodes=2), BUDGETS)
    assert found.chunks == (ScheduledChunk(2, 9), ScheduledChunk(4, 7))


def test_one_without_a_page_takes_no_place_from_those_that_it_waits_for():
    first, full = decoding(1, continues=False), decoding(2, short=True)
    assert schedule(facts(first, full, pages=0, most_decodes=1), BUDGETS).decodes == (1,)
    found = schedule(facts(first._replace(short=True), full, pages=0, most_decodes=1), BUDGETS)
    assert (found.preempt, found.decodes) == ((2,), (1,)), "or both would wait for ever"


def test_one_that_gives_way_does_not_decode():
    found = schedule(facts(decoding(1, short=True, continues=False), decoding(2), pages=0, most_decodes=2), BUDGETS)
    assert (found.preempt, found.decodes) == ((2,), (1,))


def test_what_only_transfers_hold_is_waited_for():
    assert schedule(facts(decoding(1, short=True), pages=0), BUDGETS).empty


@dataclass
class Line:
    """A sequence of the simulation: tokens still to compute for its prompt, tokens to draw, and what it holds."""

    prompt: int
    left: int
    further: bool
    fetched: bool
    computed: int = 0
    pages: int = 0
    drawn: int = 0
    continues: bool = False
    has_slot: bool = False

    @property
    def comes(self) -> bool:
        return self.fetched and not self.drawn

    @property
    def remaining(self) -> int:
        return self.prompt + self.drawn - self.computed

    def waiting(self, handle: int) -> WaitingSequence[int]:
        return waiting(handle, -(-self.remaining // 64), further=self.further, comes=self.comes)

    def facts(self, handle: int) -> RunningSequence[int]:
        short, decodes = self.computed + 1 > self.pages * 64, self.remaining == 1
        return RunningSequence(
            handle,
            self.remaining,
            self.remaining,
            self.pages,
            short,
            decodes=decodes,
            continues=self.continues,
            lacks_slot=not self.has_slot,
        )


lines = st.lists(st.tuples(st.integers(1, 1500), st.integers(1, 300), st.booleans(), st.booleans()), max_size=12)


@given(lines, st.integers(2, 6), st.integers(1, 6), st.integers(30, 60), st.integers(64, 700))
def test_run_to_the_end_it_serves_everyone_within_memory_slots_and_budget(
    entries: list[tuple[int, int, bool, bool]], slots: int, most_decodes: int, pages: int, step_tokens: int
):
    """A run that preempts at will still ends, because the first to arrive always gets on."""
    budgets = Budgets(step_tokens, max(1, step_tokens // 2))
    everyone = {handle: Line(*entry) for handle, entry in enumerate(entries)}
    waits, runs = list(everyone), []
    for _ in range(60_000):
        if not everyone:
            break
        free_pages = pages - sum(everyone[n].pages for n in runs)
        free_slots = slots - sum(everyone[n].has_slot for n in runs)
        further = sum(everyone[n].further for n in runs)
        assert free_pages >= 0
        assert free_slots >= 0
        assert further <= slots // 2
        found = schedule(
            ScheduleFacts(
                tuple(everyone[n].waiting(n) for n in sorted(waits)),
                tuple(everyone[n].facts(n) for n in sorted(runs)),
                free_slots,
                free_pages,
                most_further_slots(slots) - further,
                most_decodes,
            ),
            budgets,
        )
        assert not found.empty
        assert len(found.decodes) + sum(chunk.tokens for chunk in found.chunks) <= max(step_tokens, len(found.decodes))
        drawing = [*found.decodes, *(key for key, tokens in found.chunks if tokens == everyone[key].remaining)]
        assert len(drawing) <= most_decodes
        for handle in set(runs) - set(found.preempt):
            one = everyone[handle].facts(handle)
            assert handle in drawing or one.short or not one.continues, "an answer was interrupted"
        if runs and everyone[min(runs)].has_slot:
            assert min(runs) not in found.preempt
        for handle, one in everyone.items():
            one.continues = handle in drawing
        for handle in found.preempt:
            one = everyone[handle]
            one.pages = one.computed = 0
            one.has_slot = False
            runs.remove(handle)
            waits.append(handle)
        for handle, tokens in found.chunks:
            everyone[handle].has_slot = True
            everyone[handle].computed += tokens
            everyone[handle].drawn += everyone[handle].remaining == 0
        for handle in found.decodes:
            one = everyone[handle]
            one.has_slot = True
            one.pages += one.computed + 1 > one.pages * 64
            one.computed += 1
            one.drawn += 1
        for handle in found.admit:
            one = everyone[handle]
            one.pages = -(-one.remaining // 64)
            one.has_slot = not one.comes
            one.computed = one.remaining - 1 if one.comes else 0
            waits.remove(handle)
            runs.append(handle)
        for handle in [n for n in runs if everyone[n].drawn >= everyone[n].left]:
            runs.remove(handle)
            del everyone[handle]
    assert not everyone
