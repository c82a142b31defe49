"""prfaas's connector between real vLLM engines: the answers of one engine, and every failure is computed around."""

import urllib.request
from collections.abc import Iterator

import pytest

from prfaas.ports import free_ports
from prfaas_vllm.scheduling import goal_of

from ..waiting import eventually
from .connected import TOKENS, TRANSFERS, Pair, answer_alone, prompt_of, reference, started
from .engines import Engine, EngineHost

(METRICS_PORT,) = free_ports(1)


@pytest.fixture(scope="module")
def pair(engine_host: EngineHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    extras = {"metrics_port": METRICS_PORT}, {}
    with started(engine_host, tmp_path_factory.mktemp("egress"), *extras) as found:
        yield found


def sent_bytes() -> float:
    """Return what the source has sent since its mover started."""
    with urllib.request.urlopen(f"http://127.0.0.1:{METRICS_PORT}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("prfaas_transfer_sent_bytes_total"))


@pytest.mark.parametrize("length", [5, 6, 64, 127, 128, 129, 130, 256, 257, 512, 513, 514, 640, 641, 1500, 3000])
def test_an_offloaded_prompt_is_answered_to_the_last_bit_fresh_and_after_hits_on_either_side(
    reference_engine: Engine, pair: Pair, length: int
):
    ids, tokens, logprobs = reference(reference_engine, pair, length)
    pair.source.forget_prefixes()
    pair.destination.forget_prefixes()
    free = pair.source.free_pages(), pair.destination.free_pages()
    goal = goal_of(length, pair.destination.page_tokens)
    for forgets in ((), (pair.source,), (pair.destination,), ()):
        for engine in forgets:
            engine.forget_prefixes()
        source, destination = pair.offload(ids)
        answer = destination.result()
        source.result()
        assert (answer.tokens, answer.logprobs) == (tokens, logprobs)
        assert answer.cached_tokens == goal, "the rest came, or was here"
    pair.assert_nothing_is_held(free)


def spoil(engine: Engine, kind: str, layer: int) -> None:
    """Have a source send zeros for one layer's state, or for the first rows of it."""
    is_part = "not part.tokens" if kind == "state" else "part.tokens and part.start_token == 0"
    engine.evaluate(
        f"(lambda t: setattr(t, 'load', lambda transfer_id, part, room: room.__setitem__(slice(None), bytes(len(room)))"
        f" if {is_part} and part.layer == {layer} else type(t).load(t, transfer_id, part, room)))({TRANSFERS})"
    )


def unspoil(engine: Engine) -> None:
    engine.evaluate(f"delattr({TRANSFERS}, 'load')")


@pytest.mark.parametrize("length", [300, 1500])
def test_each_zeroed_state_and_each_zeroed_page_is_seen(reference_engine: Engine, pair: Pair, length: int):
    """The control of the test above: it would fail if a state or a page did not come."""
    ids, tokens, logprobs = reference(reference_engine, pair, length)
    layouts = pair.source.evaluate(f"[(g.layout.kind, g.layout.layers) for g in {TRANSFERS}.rank.groups]")
    assert {kind for kind, _ in layouts} == {"linear", "attention"}
    for kind, layers in layouts:
        for layer in layers:
            spoil(pair.source, "state" if kind == "linear" else "rows", layer)
            pair.destination.forget_prefixes()
            answer = pair.offload(ids)[1].result()
            unspoil(pair.source)
            assert (answer.tokens, answer.logprobs) != (tokens, logprobs), f"{kind} of layer {layer}"
    pair.destination.forget_prefixes()
    assert pair.offload(ids)[1].result().logprobs == logprobs


def test_a_stale_epoch_or_a_wrong_token_brings_nothing_and_the_prompt_is_computed_at_home(
    reference_engine: Engine, pair: Pair
):
    ids = prompt_of(700, 1)
    wanted = answer_alone(reference_engine, ids)
    free = pair.source.free_pages(), pair.destination.free_pages()
    for wrong in ({"epoch": 5}, {"token": "other"}, {"transfer_id": "0" * 32}, {"port": 1}):
        pair.destination.forget_prefixes()
        source, destination = pair.legs()
        pair.source.submit(ids, 1, source)
        answer = pair.destination.generate(ids, TOKENS, {"prfaas": destination["prfaas"] | wrong})
        assert (answer.tokens, answer.logprobs) == (wanted.tokens, wanted.logprobs), wrong
        assert answer.cached_tokens == 0, wrong
        assert pair.source.free_pages() < free[0], "the offer stands, for a request with the right words"
        pair.destination.generate(ids, 1, destination)  # declines it: by now its own cache has all of it
    pair.assert_nothing_is_held(free)


def test_a_cache_of_other_tokens_is_refused_also_where_they_are_as_many(reference_engine: Engine, pair: Pair):
    theirs, ids = prompt_of(1500, 11), prompt_of(1500, 12)
    wanted = answer_alone(reference_engine, ids)
    pair.source.forget_prefixes()
    pair.destination.forget_prefixes()
    free = pair.source.free_pages(), pair.destination.free_pages()
    source, destination = pair.legs()
    pair.source.submit(theirs, 1, source)
    answer = pair.destination.generate(ids, TOKENS, destination)
    assert (answer.tokens, answer.cached_tokens) == (wanted.tokens, 0)
    assert pair.destination.generate(ids, TOKENS).tokens == wanted.tokens, "and its own prefix cache is right, too"
    assert "manifest field prompt is" in pair.destination.log.read_text()
    pair.assert_nothing_is_held(free)


def test_a_destination_that_leaves_in_the_middle_gives_the_memory_back_on_both_sides(pair: Pair):
    pair.source.forget_prefixes()
    pair.destination.forget_prefixes()
    free = pair.source.free_pages(), pair.destination.free_pages()
    pair.slow(1)
    source, destination = pair.offload(prompt_of(3000, 2))
    source.result()
    assert pair.destination.free_pages() < free[1]
    destination.abort()
    pair.assert_nothing_is_held(free)
    pair.slow(None)


def test_a_source_that_is_aborted_in_the_middle_costs_the_destination_only_time(reference_engine: Engine, pair: Pair):
    ids = prompt_of(3500, 3)
    wanted = answer_alone(reference_engine, ids)
    pair.source.forget_prefixes()
    pair.destination.forget_prefixes()
    free = pair.source.free_pages(), pair.destination.free_pages()
    source, destination = pair.offload(ids)
    eventually(lambda: pair.source.free_pages() < free[0], "the source computes")
    source.abort()
    answer = destination.result()
    assert (answer.tokens, answer.logprobs) == (wanted.tokens, wanted.logprobs)
    pair.assert_nothing_is_held(free)


def test_a_mover_that_is_killed_costs_time_and_the_next_transfer_finds_another(reference_engine: Engine, pair: Pair):
    ids = prompt_of(1500, 4)
    wanted = answer_alone(reference_engine, ids)
    pair.source.forget_prefixes()
    pair.destination.forget_prefixes()
    free = pair.source.free_pages(), pair.destination.free_pages()
    for side in (pair.source, pair.destination):
        pair.slow(1)
        before = sent_bytes()
        source, destination = pair.offload(ids)
        source.result()
        # A source without a request keeps its cache longer.
        eventually(lambda before=before: sent_bytes() > before, "a part has crossed")
        side.evaluate(f"{TRANSFERS}.mover._process.kill()")
        answer = destination.result()
        assert (answer.tokens, answer.logprobs) == (wanted.tokens, wanted.logprobs)
        pair.slow(None)
        pair.destination.forget_prefixes()
        pair.assert_nothing_is_held(free)

    pair.offload_until_it_crosses(ids)
    pair.assert_nothing_is_held(free)


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
    pair.source.forget_prefixes()
    pair.destination.forget_prefixes()
    free = pair.source.free_pages(), pair.destination.free_pages()
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


@pytest.mark.parametrize("side", ["source", "destination"])
def test_an_engine_and_a_mover_whose_logs_have_no_room_carry_caches(pair: Pair, side: str):
    ids, engine = prompt_of(1500, 6), getattr(pair, side)
    pair.source.forget_prefixes()
    pair.destination.forget_prefixes()
    free = pair.source.free_pages(), pair.destination.free_pages()
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
    pair.source.forget_prefixes()
    pair.destination.forget_prefixes()
    free = pair.source.free_pages(), pair.destination.free_pages()
    found = [pair.offload(ids) for ids in prompts]
    answers = [destination.result() for _, destination in found]
    for number, answer in enumerate(answers):
        same = sum(a == b for a, b in zip(answer.tokens, wanted[number], strict=True))
        assert same >= TOKENS - 2, f"{number}: {same} of {TOKENS}"  # batches round otherwise than a lone prompt
    assert sum(answer.cached_tokens > 0 for answer in answers) >= 14
    pair.assert_nothing_is_held(free)
