"""What is the default on GPUs, or common there, as far as vLLM computes it on CPUs, too: dense models, FP8 caches,
Mamba2 hybrids, and a second batch in flight.

The built-in model is a hybrid of GDN in bfloat16, one batch after the other. What vLLM cannot compute here is tried on
its own classes: see docs/use/engines.md.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from prfaas_vllm.scheduling import goal_of

from .connected import TOKENS, TRANSFERS, Pair, prompt_of, reference, spoiled, started
from .engines import EngineHost


class Row(NamedTuple):
    """A model of `tiny_models.py`, or the built-in one, and how an engine of it is started."""

    model: str = ""
    options: dict[str, Any] = {}  # noqa: RUF012  # of a tuple, which nobody changes
    kinds: tuple[str, ...] = ("linear", "attention")


DENSE, FP8, MAMBA2, ASYNC = "dense", "dense, FP8 cache", "Mamba2", "two batches in flight"
ROWS = {
    DENSE: Row("dense", kinds=("attention",)),
    FP8: Row("dense", {"kv_cache_dtype": "fp8"}, ("attention",)),
    # With a prefix cache vLLM 0.32 fails on CPUs: there its kernel of Mamba2 gives no checkpoints within a step.
    MAMBA2: Row("mamba2", {"enable_prefix_caching": False}),
    ASYNC: Row(options={"variables": {"BATCHES_IN_FLIGHT": "2"}}),
}
HAS_FP8 = "avx512f" in Path("/proc/cpuinfo").read_text()
FP8_NEEDS = "vLLM computes on FP8 caches with AVX-512 only"


@pytest.fixture(scope="module")
def models(engine_host: EngineHost, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one of each tiny model."""
    folder = tmp_path_factory.mktemp("models")
    engine_host.run("tiny_models.py", MADE_FOLDER=str(folder))
    return folder


@pytest.fixture(
    scope="module",
    params=[pytest.param(row, marks=pytest.mark.skipif(row == FP8 and not HAS_FP8, reason=FP8_NEEDS)) for row in ROWS],
)
def row(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def pair(engine_host: EngineHost, models: Path, row: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model, options, _ = ROWS[row]
    options |= {"model": str(models / model)} if model else {}
    with started(engine_host, tmp_path_factory.mktemp("egress"), options=options) as found:
        yield found


@pytest.mark.parametrize("length", [6, 300, 700])
def test_an_offloaded_prompt_is_answered_to_the_last_bit_fresh_and_after_hits_on_either_side(pair: Pair, length: int):
    pair.assert_answered_fresh_and_after_hits(*reference(pair.destination, pair, length))
    assert "its cache did not come" not in pair.destination.log.read_text()


@pytest.mark.parametrize("length", [300, 700])
def test_a_zeroed_state_or_page_is_seen(pair: Pair, row: str, length: int):
    """The control of the test above."""
    ids, tokens, logprobs = reference(pair.destination, pair, length)
    layouts = pair.source.evaluate(f"[(g.layout.kind, g.layout.layers) for g in {TRANSFERS}.rank.groups]")
    assert sorted({kind for kind, _ in layouts}) == sorted(ROWS[row].kinds)
    for kind, layers in layouts:
        pair.forget_prefixes()
        with spoiled(pair.source, kind, layers[0]):
            answer = pair.offload(ids)[1].result()
        assert answer.cached_tokens == goal_of(length, pair.destination.page_tokens)
        assert (answer.tokens, answer.logprobs) != (tokens, logprobs), f"{kind} of layer {layers[0]}"


@pytest.mark.parametrize("row", [ASYNC], indirect=True)
def test_aborts_between_two_batches_and_too_little_memory_change_no_other_answer_and_hold_no_memory(pair: Pair):
    assert [engine.evaluate("core.batch_queue_size") for engine in pair[:2]] == [2, 2]
    prompts = [prompt_of(900 + 37 * number, number) for number in range(10)]
    wanted = []
    for ids in prompts:
        pair.destination.forget_prefixes()
        pair.destination.generate(ids, 1)
        wanted.append(pair.destination.generate(ids, TOKENS).tokens)
    free = pair.forget_prefixes()
    found = [pair.offload(ids) for ids in prompts]
    found[2][0].abort()
    found[5][1].abort()
    found[8][0].abort()
    for number in {*range(len(prompts))} - {5}:
        answer = found[number][1].result()
        same = sum(a == b for a, b in zip(answer.tokens, wanted[number], strict=True))
        assert same >= TOKENS - 2, f"{number}: {same} of {TOKENS}"  # batches round otherwise than a lone prompt
    pair.destination.forget_prefixes()
    pair.assert_nothing_is_held(free)
