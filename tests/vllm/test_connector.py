"""prfaas's connector between real vLLM engines: the answers of one engine to the last bit, and movers without memory.

What an engine with it promises of a hand-off, whatever breaks, stands in test_contract.py.
"""

from collections.abc import Iterator

import pytest

from ..waiting import eventually
from .connected import TOKENS, TRANSFERS, Pair, answer_alone, prompt_of, reference, spoiled, started
from .engines import Answer, Engine, EngineHost, Running


@pytest.fixture(scope="module")
def pair(engine_host: EngineHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with started(engine_host, tmp_path_factory.mktemp("egress")) as found:
        yield found


@pytest.mark.parametrize("length", [5, 6, 64, 127, 128, 129, 130, 256, 257, 512, 513, 514, 640, 641, 1500, 3000])
def test_an_offloaded_prompt_is_answered_to_the_last_bit_fresh_and_after_hits_on_either_side(
    reference_engine: Engine, pair: Pair, length: int
):
    pair.assert_answered_fresh_and_after_hits(*reference(reference_engine, pair, length))


@pytest.mark.parametrize("length", [300, 1500])
def test_each_zeroed_state_and_each_zeroed_page_is_seen(reference_engine: Engine, pair: Pair, length: int):
    """The control of the test above: it would fail if a state or a page did not come."""
    ids, tokens, logprobs = reference(reference_engine, pair, length)
    layouts = pair.source.evaluate(f"[(g.layout.kind, g.layout.layers) for g in {TRANSFERS}.rank.groups]")
    assert {kind for kind, _ in layouts} == {"linear", "attention"}
    for kind, layers in layouts:
        for layer in layers:
            pair.destination.forget_prefixes()
            with spoiled(pair.source, kind, layer):
                answer = pair.offload(ids)[1].result()
            assert (answer.tokens, answer.logprobs) != (tokens, logprobs), f"{kind} of layer {layer}"
    pair.destination.forget_prefixes()
    assert pair.offload(ids)[1].result().logprobs == logprobs


def behind(beginning: list[int], seed: int) -> list[int]:
    return beginning + prompt_of(300, seed)


def answer_behind(engine: Engine, ids: list[int], *known: int) -> Answer:
    """Return what one engine says to a prompt of which it has cached so many tokens, step by step."""
    engine.forget_prefixes()
    for tokens in known:
        engine.generate(ids[: tokens + 1], 1)  # a state stays where at least one token follows
    answer = engine.generate(ids, TOKENS)
    assert answer.cached_tokens == known[-1]
    return answer


@pytest.mark.parametrize("pages", [1, 4, 8])
def test_a_prefix_that_the_source_has_crosses_with_the_page_behind_it_and_the_rest_is_computed(
    reference_engine: Engine, pair: Pair, pages: int
):
    page, known = pair.source.page_tokens, pages * pair.source.page_tokens
    ids = behind(prompt_of(known, 21), 22)
    wanted = answer_behind(reference_engine, ids, known, known + page)
    free = pair.forget_prefixes()
    pair.source.generate(ids[: known + 1], 1)
    source, destination = pair.legs(known)
    giving = pair.source.submit(ids, 1, source)
    answer = pair.destination.generate(ids, TOKENS, destination)
    assert (answer.tokens, answer.logprobs) == (wanted.tokens, wanted.logprobs)
    assert (giving.result().cached_tokens, answer.cached_tokens) == (known, known + page)
    pair.assert_nothing_is_held(free)


def offloaded_behind(pair: Pair, ids: list[int], known: int) -> tuple[Running, Running, Running]:
    """Offload a prompt whose beginning the destination has: it gives that to the source first."""
    port = pair.destination.evaluate("core.vllm_config.kv_transfer_config.kv_port")
    (giving, incoming), (source, destination) = pair.legs(known, port=port), pair.legs()
    source["prfaas"]["prefix"] = incoming["prfaas"]
    return (
        pair.destination.submit(ids, 1, giving),
        pair.source.submit(ids, 1, source),
        pair.destination.submit(ids, TOKENS, destination),
    )


def test_a_source_fetches_a_prefix_first_and_gives_all_of_it(reference_engine: Engine, pair: Pair):
    page = pair.source.page_tokens
    known, ids = 4 * page, behind(prompt_of(4 * page, 25), 26)
    whole = (len(ids) - 1) // page * page
    wanted = answer_behind(reference_engine, ids, known, known + page, whole)
    free = pair.forget_prefixes()
    pair.destination.generate(ids[: known + 1], 1)
    giving, source, destination = offloaded_behind(pair, ids, known)
    answer = destination.result()
    assert (answer.tokens, answer.logprobs) == (wanted.tokens, wanted.logprobs)
    assert (source.result().cached_tokens, answer.cached_tokens) == (known + page, whole)
    giving.result()
    pair.assert_nothing_is_held(free)


def test_a_source_that_is_aborted_while_its_prefix_comes_gives_all_memory_back(pair: Pair):
    known = 8 * pair.source.page_tokens
    ids = behind(prompt_of(known, 27), 28)
    free = pair.forget_prefixes()
    pair.destination.generate(ids[: known + 1], 1)
    pair.slow(1)
    giving, source, destination = offloaded_behind(pair, ids, known)
    eventually(lambda: pair.source.free_pages() < free[0], "the source fetches")
    source.abort()
    assert destination.result().finish_reason
    giving.result()
    pair.slow(None)
    pair.assert_nothing_is_held(free)
    assert pair.source.generate(ids, 1).tokens, "it lives"


MOVER = f"{TRANSFERS}.mover._process"
# Less than the stack of a thread beyond what it has.
NO_MEMORY = (
    "(lambda resource, pid: resource.prlimit(pid, resource.RLIMIT_AS, (resource.getpagesize() * "
    "int(open(f'/proc/{pid}/statm').read().split()[0]) + (4 << 20), resource.RLIM_INFINITY)))"
    f"(__import__('resource'), {MOVER}.pid)"
)
FULL_DISK = "(lambda kept: (os.dup2(os.open('/dev/full', os.O_WRONLY), 2), kept)[1])(os.dup(2))"


@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_mover_without_memory_costs_time_and_its_successor_has_some(reference_engine: Engine, pair: Pair, side: str):
    ids = prompt_of(1500, 5)
    wanted = answer_alone(reference_engine, ids)
    free = pair.forget_prefixes()
    starved: Engine = getattr(pair, side)
    logged = len(pair.destination.log.read_text())
    starved.evaluate(NO_MEMORY)
    source, destination = pair.legs()
    pair.source.submit(ids, 1, source)
    answer = pair.destination.generate(ids, TOKENS, destination)
    assert answer.tokens == wanted.tokens
    sentence = "is computed here, its cache did not come: " in pair.destination.log.read_text()[logged:]
    assert sentence == (answer.cached_tokens == 0)
    starved.evaluate(f"{MOVER}.kill()")
    pair.offload_until_it_crosses(ids)
    pair.destination.generate(ids, 1)
    pair.destination.generate(ids, 1, destination)  # declines it, if its source heard nothing of it
    pair.destination.forget_prefixes()
    pair.assert_nothing_is_held(free)


@pytest.mark.release
@pytest.mark.parametrize("side", ["source", "destination"])
def test_an_engine_and_a_mover_whose_logs_have_no_room_carry_caches(pair: Pair, side: str):
    ids, engine = prompt_of(1500, 6), getattr(pair, side)
    free = pair.forget_prefixes()
    kept = engine.evaluate(FULL_DISK)
    engine.evaluate(f"{MOVER}.kill()")
    pair.offload_until_it_crosses(ids)
    engine.evaluate(f"os.dup2({kept}, 2)")
    engine.evaluate(f"{MOVER}.kill()")
    pair.offload_until_it_crosses(ids)
    pair.assert_nothing_is_held(free)


def test_many_at_once_are_preempted_and_answered_as_alone(reference_engine: Engine, pair: Pair):
    prompts = [prompt_of(900 + 37 * number, number) for number in range(16)]
    wanted = []
    for ids in prompts:
        reference_engine.forget_prefixes()
        reference_engine.generate(ids, 1)
        wanted.append(reference_engine.generate(ids, TOKENS).tokens)
    free = pair.forget_prefixes()
    found = [pair.offload(ids) for ids in prompts]
    answers = [destination.result() for _, destination in found]
    for number, answer in enumerate(answers):
        same = sum(a == b for a, b in zip(answer.tokens, wanted[number], strict=True))
        assert same >= TOKENS - 2, f"{number}: {same} of {TOKENS}"  # batches round otherwise than a lone prompt
    assert sum(answer.cached_tokens > 0 for answer in answers) >= 14
    pair.assert_nothing_is_held(free)
