"""The schedule: who is admitted, what a step computes, and that running it to the end serves everyone in order."""

from hypothesis import given
from hypothesis import strategies as st

from prfaas_worker.engine.schedule import Batch, Chunk, Facts, Limits, Prefilling, Waiting, schedule

LIMITS = Limits(max_running=4, chunk_tokens=512)


def facts(
    waiting: tuple[Waiting, ...] = (),
    prefilling: tuple[Prefilling, ...] = (),
    decoding: tuple[int, ...] = (),
    held: int = 0,
) -> Facts:
    return Facts(waiting, prefilling, decoding, held)


def test_nothing_to_do_is_an_empty_batch():
    assert schedule(facts(), LIMITS).empty


def test_decoding_goes_on_beside_one_chunk_of_prompt():
    found = schedule(facts(prefilling=(Prefilling(3, 5000),), decoding=(1, 2), held=3), LIMITS)
    assert found == Batch(admit=(), prefill=(Chunk(3, 512),), decode=(1, 2))


def test_what_a_short_prompt_leaves_of_a_step_goes_to_the_next():
    prompts = (Prefilling(1, 100), Prefilling(2, 300), Prefilling(3, 900), Prefilling(4, 5))
    assert schedule(facts(prefilling=prompts), LIMITS).prefill == (Chunk(1, 100), Chunk(2, 300), Chunk(3, 112))


def test_requests_are_admitted_in_order_while_sequences_are_free():
    waiting = (Waiting(7, 1), Waiting(8, 2), Waiting(9, 1))
    assert schedule(facts(waiting=waiting), LIMITS).admit == (7, 8, 9)
    assert schedule(facts(waiting=waiting, held=1), LIMITS).admit == (7, 8)
    assert schedule(facts(waiting=waiting, held=4), LIMITS).admit == ()


def test_a_wide_request_is_not_overtaken():
    assert schedule(facts(waiting=(Waiting(1, 4), Waiting(2, 1)), held=1), LIMITS).admit == ()


requests = st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 4), st.integers(1, 5)), max_size=12)


@given(requests, st.integers(4, 8), st.integers(1, 700))
def test_run_to_the_end_it_serves_everyone_in_order_within_its_limits(
    asked: list[tuple[int, int, int]], max_running: int, chunk_tokens: int
):
    limits = Limits(max_running, chunk_tokens)
    waiting = {handle: choices for handle, (_, choices, _) in enumerate(asked)}
    prompts: dict[int, int] = {}
    decoding: dict[int, int] = {}
    began: list[int] = []
    for _ in range(10_000):
        held = sum(asked[handle][1] for handle in [*prompts, *decoding])
        batch = schedule(
            Facts(
                tuple(Waiting(*entry) for entry in waiting.items()),
                tuple(Prefilling(*entry) for entry in prompts.items()),
                tuple(decoding),
                held,
            ),
            limits,
        )
        if batch.empty:
            break
        assert sum(chunk.tokens for chunk in batch.prefill) <= chunk_tokens
        for handle in batch.decode:
            decoding[handle] -= 1
        decoding = {handle: left for handle, left in decoding.items() if left}
        for handle, tokens in batch.prefill:
            prompts[handle] -= tokens
            assert prompts[handle] >= 0
            if prompts[handle] == 0:
                del prompts[handle]
                began.append(handle)
                decoding[handle] = asked[handle][2]
        for handle in batch.admit:
            del waiting[handle]
            prompts[handle] = asked[handle][0]
        assert sum(asked[handle][1] for handle in [*prompts, *decoding]) <= max_running
    assert [waiting, prompts, decoding] == [{}, {}, {}]
    assert began == list(range(len(asked)))
