"""Caches cross between instances of which one or both draft tokens: by n-grams, or with a layer of their own.

First between real engines. For a hybrid model vLLM's CPU engines draft only without a prefix cache: the kernel that
sorts the states of cached pages runs on GPUs. So what a destination with both does with its blocks is followed in
vLLM's own scheduler and cache manager, without a model.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prfaas_vllm.scheduling import goal_of

from ..waiting import eventually
from .connected import TOKENS, TRANSFERS, Pair, first_of_free_ports, prompt_of, spoiled, start
from .draft_model import with_draft_layer
from .engines import Answer, Engine, EngineHost
from .versions import RUN, Versions

VOCABULARY, PAGE = 264, 256
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2}
DRAFTS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "three n-grams": NGRAM | {"num_speculative_tokens": 3},
    "two n-grams": NGRAM | {"num_speculative_tokens": 2},
    "MTP of two": {"method": "mtp", "num_speculative_tokens": 2},
    "MTP of one": {"method": "mtp", "num_speculative_tokens": 1},
}
DRAFT_LAYER = 0
"""The number of MTP's layer in the group of the model's attention, whose only layer is 3."""
NEAR = 0.05
"""How far logprobs may be from each other where one side's kernels keep drafts, and round otherwise."""
COUNT_ACCEPTED = (
    "(lambda s: (setattr(s, 'accepted', []), setattr(s, 'make_spec_decoding_stats', "
    "lambda stats, num_accepted_tokens, **_: s.accepted.append(num_accepted_tokens))))(core.scheduler)"
)
NOTE_LANDED = (
    "(lambda t: (setattr(t, 'landed', set()), setattr(t, 'land', lambda key, part, received: ("
    "t.landed.add((part.group, part.layer, any(received[:4096]))), type(t).land(t, key, part, received))[1])))"
    f"({TRANSFERS})"
)


class Instances(dict[str, tuple[Engine, int]]):
    """Engines by their drafts, with their ports."""

    def pair(self, source: str, destination: str) -> Pair:
        return Pair(self[source][0], self[destination][0], self[source][1], Path())


@pytest.fixture(scope="module")
def instances(engine_host: EngineHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instances]:
    model = str(with_draft_layer(engine_host.model, tmp_path_factory.mktemp("mtp")))
    found = Instances()
    for name, drafts in DRAFTS.items():
        port = first_of_free_ports(1)
        options = {"model": model, "speculative_config": drafts, "enable_prefix_caching": drafts is None}
        found[name] = start(engine_host, f"drafts-{port}", port, options=options), port
    for engine, _ in found.values():
        engine.wait_ready()
        engine.evaluate(COUNT_ACCEPTED)
        engine.evaluate(NOTE_LANDED)
    yield found
    for engine, _ in found.values():
        engine.stop()


def prompt_with_all_tokens(length: int) -> list[int]:
    """Any token has others behind it there, so each step drafts as many as it may. After a step with fewer vLLM's CPU
    kernels lose a convolution's inputs, with or without a connector."""
    return [*range(VOCABULARY), *prompt_of(length)][:length]


def forget(engine: Engine) -> None:
    """Empty what an engine has cached and counted."""
    eventually(lambda: engine.evaluate("engine.reset_prefix_cache()"), f"{engine.name} holds no pages")
    engine.evaluate("core.scheduler.accepted.clear()")
    engine.evaluate(f"{TRANSFERS}.landed.clear()")


def answer_alone(engine: Engine, ids: list[int]) -> Answer:
    forget(engine)
    return engine.generate(ids, TOKENS)


def offload(pair: Pair, ids: list[int]) -> Answer:
    """Offload a prompt of which neither side has anything."""
    for engine in (pair.source, pair.destination):
        forget(engine)
    source, destination = pair.offload(ids)
    answer = destination.result()
    source.result()
    return answer


def distance(one: Answer, other: Answer) -> float:
    """Return how far the logprobs of two answers are from each other, up to a token in which they differ."""
    pairs = zip(one.tokens, other.tokens, one.logprobs, other.logprobs, strict=True)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
    return max((abs(here - there) for _, _, here, there in same), default=float("inf"))


@pytest.mark.parametrize("length", [300, 1500])
@pytest.mark.parametrize(
    ("source", "destination"), [("three n-grams", "none"), ("none", "two n-grams"), ("three n-grams", "two n-grams")]
)
def test_drafts_by_ngrams_on_either_side_or_both_change_no_answer(
    instances: Instances, source: str, destination: str, length: int
):
    pair, ids = instances.pair(source, destination), prompt_with_all_tokens(length)
    alone, answer = answer_alone(pair.destination, ids), offload(pair, ids)
    assert answer.cached_tokens == goal_of(length, pair.destination.page_tokens)
    assert answer.tokens == alone.tokens
    assert distance(answer, alone) <= NEAR
    assert sum(pair.destination.evaluate("core.scheduler.accepted")) > 0 or destination == "none"


def test_pages_and_states_cross_to_the_last_bit_between_drafts_of_one_kind_and_other_numbers(instances: Instances):
    """Both sides' kernels are the same then, and the destination's tail is a chunk."""
    ids = prompt_with_all_tokens(1500)
    for source, destination in (("three n-grams", "two n-grams"), ("MTP of two", "MTP of one")):
        pair = instances.pair(source, destination)
        alone, answer = answer_alone(pair.destination, ids), offload(pair, ids)
        assert (answer.tokens, answer.logprobs) == (alone.tokens, alone.logprobs)
        assert answer.cached_tokens == goal_of(1500, pair.destination.page_tokens)


@pytest.mark.parametrize(("source", "destination"), [("none", "two n-grams"), ("MTP of two", "MTP of one")])
def test_each_zeroed_state_is_seen(instances: Instances, source: str, destination: str):
    """The control of the tests above."""
    pair, ids = instances.pair(source, destination), prompt_with_all_tokens(300)
    alone = answer_alone(pair.destination, ids)
    for layer in (0, 1, 2):
        with spoiled(pair.source, "linear", layer):
            answer = offload(pair, ids)
        assert answer.cached_tokens == goal_of(300, pair.destination.page_tokens)
        assert distance(answer, alone) > NEAR, f"state of layer {layer}"


@pytest.mark.parametrize("length", [300, 1500])
def test_the_caches_of_layers_that_draft_cross_and_drafts_are_accepted(instances: Instances, length: int):
    pair, ids = instances.pair("MTP of one", "MTP of two"), prompt_with_all_tokens(length)
    alone = answer_alone(pair.destination, ids)
    accepted = sum(pair.destination.evaluate("core.scheduler.accepted"))
    answer = offload(pair, ids)
    assert answer.cached_tokens == goal_of(length, pair.destination.page_tokens)
    assert answer.tokens == alone.tokens
    assert distance(answer, alone) <= NEAR
    assert sum(pair.destination.evaluate("core.scheduler.accepted")) == accepted
    landed = {(layer, has_values) for _, layer, has_values in pair.destination.evaluate(f"{TRANSFERS}.landed")}
    assert landed == {(layer, True) for layer in range(4)}
    with spoiled(pair.source, "rows", DRAFT_LAYER):  # The control.
        assert offload(pair, ids).tokens == alone.tokens, "what a draft is made from changes no answer"
    landed = {(layer, has_values) for _, layer, has_values in pair.destination.evaluate(f"{TRANSFERS}.landed")}
    assert (DRAFT_LAYER, False) in landed


@pytest.mark.parametrize(("source", "destination"), [("MTP of one", "none"), ("two n-grams", "MTP of one")])
def test_layers_that_draft_on_one_side_alone_are_refused_with_both_sides_values(
    instances: Instances, source: str, destination: str
):
    pair, ids = instances.pair(source, destination), prompt_with_all_tokens(1500)
    alone, answer = answer_alone(pair.destination, ids), offload(pair, ids)
    assert (answer.tokens, answer.cached_tokens) == (alone.tokens, 0)
    refusal = next(line for line in pair.destination.log.read_text().splitlines() if "draft layers" in line)
    theirs, _, ours = refusal.partition("this instance needs")
    assert ("draft layers mtp " in theirs, "draft layers mtp " in ours) == ("MTP" in source, "MTP" in destination)
    assert ("draft layers none" in theirs, "draft layers none" in ours) == ("MTP" in destination, "MTP" in source)


@pytest.fixture(scope="module")
def steps(vllm_versions: Versions) -> dict[str, dict[str, Any]]:
    """What `draft_steps.py` found, by vLLM's minor version."""
    return vllm_versions.run("draft_steps.py")


@pytest.mark.parametrize("version", RUN)
def test_a_destination_fetches_into_the_blocks_that_its_first_step_reads_whatever_it_drafts(
    steps: dict[str, dict[str, Any]], version: str
):
    found = steps[version]
    assert {mode: report["wrong"] for mode, report in found.items() if report["wrong"]} == {}
    assert all(report["fetches"] >= 50 for report in found.values())
    drafts = {mode: report["drafts"] for mode, report in found.items()}
    assert drafts["none"] == 0
    assert drafts["n-gram"] == 3, "beside the prompt's last token, which is computed once more"
    assert drafts["MTP"] == drafts["MTP, no prefix cache"] == 2


@pytest.mark.parametrize("version", RUN)
def test_the_state_is_not_in_the_last_block_of_a_destination_with_drafts(
    steps: dict[str, dict[str, Any]], version: str
):
    """The control: there it is without drafts."""
    last = {mode: report["last"] for mode, report in steps[version].items()}
    assert last.pop("none") == steps[version]["none"]["fetches"]
    assert set(last.values()) == {0}


@pytest.mark.parametrize("version", RUN)
def test_vllm_puts_layers_that_draft_into_the_models_group_or_into_one_of_larger_blocks(
    steps: dict[str, dict[str, Any]], version: str
):
    alike, unlike = (steps[version][mode]["groups"] for mode in ("MTP", "a draft of larger blocks"))
    assert ["FullAttentionSpec", PAGE, ["model.layers.3", "mtp.layers.0"]] in alike
    assert ["FullAttentionSpec", 2 * PAGE, ["mtp.layers.0"]] in unlike
