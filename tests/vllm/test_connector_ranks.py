"""prfaas's connector between engines of several tensor-parallel ranks: all parts of a cache are used, or none.

Each rank is a process with its own mover and data port. What one rank misses, no rank may compute on. Between
one rank and two the cache crosses in two halves. Engines of one and of two ranks round otherwise, so a cache that went
from one kind to the other and back must be the same to the last bit.
"""

import math
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from prfaas.ports import free_ports
from prfaas_vllm.scheduling import token_digest

from ..unit.worker.transfer_proxy import Change, CutError, Proxy, Seen, as_it_is
from ..waiting import eventually
from .connected import (
    TOKENS,
    Pair,
    answer_alone,
    first_of_free_ports,
    on_ranks,
    parallel,
    prompt_of,
    reference,
    start,
    started,
)
from .engines import Answer, Engine, EngineHost


class OneRank(NamedTuple):
    """An engine of one rank, its data port and the file of its egress cap."""

    engine: Engine
    port: int
    egress: Path


RANKS = 2
KILL = "worker.rank == 1 and transfers.mover._process.kill()"


@pytest.fixture(scope="module")
def two_ranks(engine_host: EngineHost) -> Engine:
    """An engine of two ranks without a connector; ready when the pair is."""
    return engine_host.start("reference of two ranks", **parallel(RANKS))


@pytest.fixture(scope="module")
def one_rank(engine_host: EngineHost, tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    """An engine of one rank with a connector; ready when the pair is."""
    port, egress = free_ports(1)[0], tmp_path_factory.mktemp("one") / "mbps"
    return OneRank(start(engine_host, "one rank", port, egress_file=str(egress)), port, egress)


@pytest.fixture(scope="module")
def pair(
    engine_host: EngineHost, two_ranks: Engine, one_rank: OneRank, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    with started(engine_host, tmp_path_factory.mktemp("ranks"), ranks=(RANKS, RANKS)) as found:
        two_ranks.wait_ready()
        one_rank.engine.wait_ready()
        yield found


@pytest.fixture(scope="module")
def mixed(pair: Pair, one_rank: OneRank) -> dict[tuple[int, int], Pair]:
    """Pairs of an engine with one rank and one with two: by the ranks of source and destination."""
    engine, port, egress = one_rank
    return {
        (1, 2): Pair(engine, pair.destination, port, egress, (1, 2)),
        (2, 1): Pair(pair.source, engine, pair.port, pair.egress, (2, 1)),
        (2, 3): pair._replace(ranks=(3, 3)),  # what a gateway with a wrong table would say
    }


@contextmanager
def slowed(pair: Pair) -> Iterator[None]:
    """Have the source give 1 Mbit/s a rank, for a block."""
    pair.slow(1)
    try:
        yield
    finally:
        pair.slow(None)


@pytest.mark.parametrize("length", [6, 700])
def test_an_offloaded_prompt_is_answered_to_the_last_bit_fresh_and_after_hits_on_either_side(
    two_ranks: Engine, pair: Pair, length: int
):
    pair.assert_answered_fresh_and_after_hits(*reference(two_ranks, pair, length))


PARTS = {"state": "not part.tokens", "page": "part.tokens and part.start_token == 0"}
ZEROS = "room.__setitem__(slice(None), bytes(len(room)))"
MODULES = "[__import__('sys').modules[f'prfaas_vllm.{side}'] for side in ('source', 'destination')]"
EXCHANGED = (
    "lambda *arguments, **more: (lambda parts: tuple(one._replace(cuts=other.cuts) "
    "for one, other in zip(parts, parts[::-1])))(module.kept(*arguments, **more))"
)


@contextmanager
def zeroed(source: Engine, condition: str) -> Iterator[None]:
    """Have a source give zeros instead of some parts, for a block."""
    load = f"{ZEROS} if {condition} else type(transfers).load(transfers, key, part, room)"
    on_ranks(source, f"setattr(transfers, 'load', lambda key, part, room: {load})")
    yield
    on_ranks(source, "delattr(transfers, 'load')")


@contextmanager
def exchanged(one: Engine) -> Iterator[None]:
    """Have an engine of one rank take each half of its blocks for the other, for a block."""
    on_ranks(one, f"[setattr(module, 'kept', module.slices_of) for module in {MODULES}]")
    on_ranks(one, f"[setattr(module, 'slices_of', (lambda module: {EXCHANGED})(module)) for module in {MODULES}]")
    yield
    on_ranks(one, f"[setattr(module, 'slices_of', module.kept) for module in {MODULES}]")


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_a_zeroed_state_or_page_of_one_rank_is_seen(two_ranks: Engine, pair: Pair, part: str, rank: int):
    """The control of the test above: it would fail if one rank's part did not come."""
    ids, tokens, logprobs = reference(two_ranks, pair, 700)
    pair.forget_prefixes()
    with zeroed(pair.source, f"worker.rank == {rank} and {part}"):
        answer = pair.offload(ids)[1].result()
    assert answer.cached_tokens == 640
    assert (answer.tokens, answer.logprobs) != (tokens, logprobs)


def test_a_killed_mover_of_one_rank_has_all_ranks_compute_the_prompt(two_ranks: Engine, pair: Pair):
    ids = prompt_of(3000, 4)
    wanted = answer_alone(two_ranks, ids)
    free = pair.forget_prefixes()
    for side in (pair.source, pair.destination):
        with slowed(pair):
            length = len(pair.destination.log.read_text())
            destination = pair.offload(ids)[1]
            eventually(
                lambda: pair.source.free_pages() < free[0] and pair.destination.free_pages() < free[1],
                "both sides are at it",
            )
            on_ranks(side, KILL)
            answer = destination.result()
        assert (answer.tokens, answer.logprobs, answer.cached_tokens) == (wanted.tokens, wanted.logprobs, 0)
        assert "cancelled" in pair.destination.log.read_text()[length:], "the other rank waited for its ten seconds"
        pair.destination.forget_prefixes()
        pair.assert_nothing_is_held(free)

    pair.offload_until_it_crosses(ids)
    pair.assert_nothing_is_held(free)


def test_a_request_that_is_aborted_in_the_middle_gives_the_pages_of_all_ranks_back(two_ranks: Engine, pair: Pair):
    ids = prompt_of(3000, 2)
    wanted = answer_alone(two_ranks, ids)
    free = pair.forget_prefixes()
    with slowed(pair):
        source, destination = pair.offload(ids)
        source.result()
        assert pair.destination.free_pages() < free[1]
        destination.abort()
        pair.assert_nothing_is_held(free)
    pair.source.forget_prefixes()
    source, destination = pair.offload(ids)
    eventually(lambda: pair.source.free_pages() < free[0], "the source computes")
    source.abort()
    answer = destination.result()
    assert (answer.tokens, answer.logprobs) == (wanted.tokens, wanted.logprobs)
    pair.assert_nothing_is_held(free)


def cut_once() -> Change:
    seen: list[Seen] = []

    def change(frame: Seen) -> list[bytes]:
        seen.append(frame)
        if len(seen) == 3:
            raise CutError
        return [frame.raw]

    return change


def offload_through(pair: Pair, ids: list[int], rank: int, change: Change) -> tuple[Answer, int]:
    """Offload with a proxy in front of each rank of the source; one of them changes what its rank says. Return the
    answer, and how many connections that rank had."""
    port = first_of_free_ports(RANKS)
    with ExitStack() as held:
        proxies = [
            held.enter_context(Proxy(("127.0.0.1", pair.port + at), change if at == rank else as_it_is, port=port + at))
            for at in range(RANKS)
        ]
        answer = pair.offload(ids, port=port)[1].result()
        return answer, proxies[rank].connections


SILENT = re.compile(r"its cache did not come: .*(sent no (byte|answer) for|the peer moved no byte for)")


def test_a_cut_connection_of_one_rank_continues_where_it_was(two_ranks: Engine, pair: Pair):
    ids, tokens, logprobs = reference(two_ranks, pair, 1500)
    free = pair.forget_prefixes()

    def goes_on() -> bool:
        pair.destination.forget_prefixes()
        logged = len(pair.destination.log.read_text())
        answer, connections = offload_through(pair, ids, 0, cut_once())
        assert (answer.tokens, answer.logprobs) == (tokens, logprobs)
        if answer.cached_tokens:
            assert connections >= 2
            return True
        # The proxies run in this process. One that has no CPU for two seconds is a source that is silent.
        reason = pair.destination.log.read_text()[logged:]
        assert SILENT.search(reason), f"the destination gave up, and not for silence:\n{reason}"
        return False

    eventually(goes_on, "a transfer whose source was not silent for two seconds")
    pair.destination.forget_prefixes()
    pair.assert_nothing_is_held(free)


ONE_HEAD = {
    "hf_overrides": {
        "num_key_value_heads": 1,
        "num_hidden_layers": 8,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
    },
    "load_format": "dummy",
}
"""Both ranks hold the same of two attention layers. The weights are random, and the same in every engine."""
COUNTED = (
    "setattr(transfers, 'land', lambda key, part, room: (transfers.landed.append((part.group, part.layer)), "
    "type(transfers).land(transfers, key, part, room)))"
)


@pytest.fixture(scope="module")
def one_head(engine_host: EngineHost, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A pair of two ranks each, started after the others."""
    folder = tmp_path_factory.mktemp("one-head")
    with started(engine_host, folder, ranks=(RANKS, RANKS), options=ONE_HEAD) as found:
        yield found


@pytest.mark.parametrize("length", [6, 700])
def test_what_both_ranks_hold_crosses_once_and_is_computed_on_by_both(one_head: Pair, length: int):
    one_head.assert_answered_fresh_and_after_hits(*reference(one_head.destination, one_head, length))


def test_each_layer_of_what_both_ranks_hold_comes_to_one_of_them(one_head: Pair):
    ids = prompt_of(1500, 7)
    one_head.forget_prefixes()
    on_ranks(one_head.destination, f"(setattr(transfers, 'landed', []), {COUNTED})")
    one_head.offload(ids)[1].result()
    on_ranks(one_head.destination, "delattr(transfers, 'land')")
    kinds = on_ranks(one_head.destination, "[each.layout.kind for each in transfers.rank.groups]")[0]
    layers = on_ranks(one_head.destination, "[each.layout.layers for each in transfers.rank.groups]")[0]
    first, second = on_ranks(one_head.destination, "set(transfers.landed)")
    for group, kind in enumerate(kinds):
        of_first, of_second = ({layer for at, layer in found if at == group} for found in (first, second))
        assert of_first | of_second == set(layers[group])
        assert of_first & of_second == (set(layers[group]) if kind == "linear" else set())
        assert of_first
        assert of_second


def test_without_the_other_ranks_share_an_answer_would_be_another(one_head: Pair):
    """The control of the tests above."""
    ids, tokens, logprobs = reference(one_head.destination, one_head, 700)
    one_head.forget_prefixes()
    gather = "__import__('torch').zeros_like(tensor)"
    on_ranks(one_head.destination, f"setattr(transfers.destination, '_all_ranks', lambda tensor: [{gather}] * {RANKS})")
    answer = one_head.offload(ids)[1].result()
    assert answer.cached_tokens == 640
    assert (answer.tokens, answer.logprobs) != (tokens, logprobs)


MIXED = [(1, 2), (2, 1)]
NOISE = 0.06
"""Logprobs of one rank and of two differ by at most 0.03 here."""


def difference(answer: Answer, tokens: list[int], logprobs: list[float]) -> float:
    """The largest difference of logprobs, as far as the tokens are the same."""
    same = 0
    while same < len(tokens) and answer.tokens[same] == tokens[same]:
        same += 1
    return max([abs(a - b) for a, b in zip(answer.logprobs[:same], logprobs[:same], strict=True)], default=math.inf)


@pytest.mark.parametrize("length", [130, 700])
@pytest.mark.parametrize("ranks", MIXED)
def test_between_one_rank_and_two_an_offloaded_prompt_is_answered_but_for_rounding_as_alone(
    mixed: dict[tuple[int, int], Pair], ranks: tuple[int, int], length: int
):
    pair = mixed[ranks]
    ids, tokens, logprobs = reference(pair.destination, pair, length)
    free = pair.forget_prefixes()
    answer = pair.offload(ids)[1].result()
    assert answer.cached_tokens == (129 if length == 130 else 640)
    assert answer.tokens[:8] == tokens[:8]
    assert difference(answer, tokens, logprobs) < NOISE
    pair.destination.forget_prefixes()
    pair.assert_nothing_is_held(free)


@pytest.mark.parametrize("ranks", MIXED)
def test_halves_that_change_places_are_seen(mixed: dict[tuple[int, int], Pair], ranks: tuple[int, int]):
    """The control of the test above: there and back they would be right again."""
    pair = mixed[ranks]
    ids, tokens, logprobs = reference(pair.destination, pair, 130)
    pair.forget_prefixes()
    with exchanged(pair[ranks.index(1)]):
        answer = pair.offload(ids)[1].result()
    assert answer.cached_tokens == 129
    assert answer.tokens[:8] != tokens[:8] or difference(answer, tokens, logprobs) > NOISE


def give_cached(engine: Engine, ids: list[int], goal: int, source: dict[str, Any]) -> None:
    """Have all ranks of an engine offer what its prefix cache has of a prompt, as it is there: a request would compute
    the end of it again."""
    request = (
        f"__import__('vllm.v1.request', fromlist=['x']).Request('cached', {ids[: goal + 1]}, "
        "__import__('vllm').SamplingParams(max_tokens=1), None, block_hasher=core.request_block_hasher)"
    )
    found = f"core.scheduler.kv_cache_manager.get_computed_blocks({request})"
    assert engine.evaluate(f"{found}[1]") == goal
    blocks = engine.evaluate(f"{found}[0].get_block_ids()")
    name = source["prfaas"]["transfer_id"]  # of a request that vLLM does not know, so it never ends
    start = f"SourceStart({name!r}, module.LegParams(**{source['prfaas']}), {goal}, {token_digest(ids[:goal])!r})"
    offer = f"transfers.begin(module.StepPlan(starts=[module.{start}]))"
    put = f"transfers.end_step(module.StepPlan(steps=[module.SourceStep({name!r}, 0, {goal}, {blocks})]))"
    step = f"[{offer}, {put}, transfers.results(set())]"
    on_ranks(engine, f"(lambda module: {step})(__import__('prfaas_vllm.scheduling', fromlist=['x']))")


@pytest.mark.parametrize("spoils", ["nothing", *PARTS])
@pytest.mark.parametrize("ranks", MIXED)
def test_a_cache_that_went_to_the_other_kind_and_back_is_the_same_to_the_last_bit(
    mixed: dict[tuple[int, int], Pair], ranks: tuple[int, int], spoils: str
):
    """Also with its control: zeros instead of the second half of a state or page."""
    there, back = mixed[ranks], mixed[ranks[::-1]]
    there = there._replace(destination=back.source)
    ids, tokens, logprobs = reference(back.destination, back, 700)
    there.forget_prefixes()
    back.forget_prefixes()
    assert there.offload(ids)[1].result().cached_tokens == 640
    back.destination.forget_prefixes()
    source, destination = back.legs()
    second = "key.endswith('/1')" if back.ranks[0] == 1 else "worker.rank == 1"
    with zeroed(back.source, f"{PARTS[spoils]} and {second}") if spoils in PARTS else nullcontext():
        give_cached(back.source, ids, 640, source)
        answer = back.destination.generate(ids, TOKENS, destination)
    assert answer.cached_tokens == 640
    assert ((answer.tokens, answer.logprobs) == (tokens, logprobs)) == (spoils == "nothing")


def test_ranks_that_do_not_divide_are_refused_with_both_values_and_the_prompt_is_computed(
    mixed: dict[tuple[int, int], Pair], two_ranks: Engine
):
    pair, ids = mixed[2, 3], prompt_of(700, 6)
    wanted = answer_alone(two_ranks, ids)
    free = pair.forget_prefixes()
    answer = pair.offload(ids)[1].result()
    assert (answer.tokens, answer.logprobs, answer.cached_tokens) == (wanted.tokens, wanted.logprobs, 0)
    pair.destination.forget_prefixes()
    pair.assert_nothing_is_held(free)
    for engine in (pair.source, pair.destination):
        assert "the other instance has 3 tensor-parallel ranks and this one 2" in engine.log.read_text()
