"""A source has its state at the goal, however vLLM divides prompts into steps: as GPUs run it, in two versions.

Where the last step of a prompt ends no option changes. Where those before it do, many change: so nothing of a source
may depend on it. The controls keep one token more, and hope for a step's end before it.

First vLLM's splitter alone, over many lengths and options; then its whole scheduler and cache manager, with prompts
that the source has cached. Neither needs a GPU or a model. Of the release for GPUs the Python sources run, with the
packages of the other's environment.
"""

from pathlib import Path
from typing import Any

import pytest

from prfaas_vllm.scheduling import goal_of

from .splitter import Mode, Prompt, modes, split_of, steps
from .versions import RUN, Versions

BLOCKS = (256, 528, 768, 1600, 1856)
PROMPTS = (8000, 20_000, 32_001, 60_000)


@pytest.fixture(scope="module")
def sources(vllm_versions: Versions) -> dict[str, Path]:
    """Folders with vLLM's sources, by its minor version."""
    return vllm_versions.folders


def prompts(block: int) -> list[int]:
    """Lengths around the ends of pages, short and long."""
    edges = {pages * block + more for pages in (1, 3, 4, 5, 9) for more in (-1, 0, 1, 2, block // 2)}
    return sorted(edges.union(PROMPTS))


def hits(mode: Mode, goal: int) -> list[int]:
    """What the source may have cached: vLLM computes at least the last token. Some are of no unit at all."""
    most = (goal - 1) // mode.hit_unit * mode.hit_unit
    some = {0, mode.hit_unit, most // mode.hit_unit // 2 * mode.hit_unit, most, goal // 3, goal - 1}
    return sorted(hit for hit in some if 0 <= hit < goal)


@pytest.mark.parametrize("version", RUN)
def test_a_step_ends_at_the_goal_in_every_mode_after_hits_of_any_length(sources: dict[str, Path], version: str):
    split, tried = split_of(sources[version]), 0
    for mode in modes():
        for prompt in prompts(mode.block):
            goal = goal_of(prompt, mode.block)
            for hit in hits(mode, goal):
                for junction in (0, *[goal // 2] * mode.keeps_junctions):
                    for seed in ("", f"{mode} {prompt} {hit}"):
                        found = steps(split, mode, Prompt(goal, hit, junction), seed)
                        assert (found[0], found[-1]) == (hit, goal), (mode, prompt, hit)
                        assert found == sorted(set(found))
                        tried += 1
    assert tried > 50_000


MODES = {
    "no checkpoints": ({}, 0),
    "checkpoints": ({"alignment": 16}, 28),
    "MTP or EAGLE": ({"drops_block": True}, 28),
    "MTP and checkpoints": ({"drops_block": True, "alignment": 16}, 28),
    "checkpoints and finer hits": ({"alignment": 16, "unit": 64}, 25),
    "MTP and finer hits": ({"drops_block": True, "unit": 64}, 0),
    "MTP, checkpoints and finer hits": ({"drops_block": True, "alignment": 16, "unit": 64}, 27),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("version", RUN)
def test_no_step_ends_one_token_before_the_prompts_end_in_most_modes(sources: dict[str, Path], version: str, mode: str):
    """The control: a source that keeps a token behind the goal, where the prompt has one to spare."""
    split, (options, expected) = split_of(sources[version]), MODES[mode]
    failed = 0
    for block in BLOCKS:
        for prompt in (5 * block + 100, 8 * block, *PROMPTS):
            goal = goal_of(prompt, block)
            failed += goal not in steps(split, Mode(block, **options), Prompt(min(goal + 1, prompt - 1)))
    assert failed == expected, "of 30"


PAGE = 256


@pytest.fixture(scope="module")
def schedulers(vllm_versions: Versions) -> dict[str, dict[str, Any]]:
    """What `scheduler_steps.py` found, by vLLM's minor version."""
    return vllm_versions.run("scheduler_steps.py")


@pytest.mark.parametrize("version", RUN)
def test_vllms_scheduler_leaves_each_source_its_state_at_the_goal_also_of_cached_prompts(
    schedulers: dict[str, dict[str, Any]], version: str
):
    found = {mode: report for mode, report in schedulers[version].items() if not mode.startswith("control")}
    assert len(found) == 9
    assert {mode: report["wrong"] for mode, report in found.items() if report["wrong"]} == {}
    assert all((report["tried"], report["missed"]) == (100, 0) for report in found.values())


@pytest.mark.parametrize("version", RUN)
def test_the_block_of_a_sources_state_is_not_free_before_its_offer_is_over(
    schedulers: dict[str, dict[str, Any]], version: str
):
    """It is read where it is. The control is a prompt with a token behind the state: vLLM needs only the last one."""
    freed = {mode: report["freed"] for mode, report in schedulers[version].items()}
    assert {mode for mode, count in freed.items() if count} == {"control: plain"}
    assert freed["control: plain"] == 20, "the second of each pair has no step that ends there"


@pytest.mark.parametrize("version", RUN)
def test_vllms_scheduler_passes_over_the_goal_of_a_source_that_keeps_a_token_more(
    schedulers: dict[str, dict[str, Any]], version: str
):
    """The control. Of a hundred prompts 40 have whole pages, and a token to spare. Of the second of each pair the cache
    has all, but where drafts drop a block."""
    missed = {mode: schedulers[version][f"control: {mode}"]["missed"] for mode in ("plain", "checkpoints", "MTP")}
    assert missed == {"plain": 0, "checkpoints": 20, "MTP": 40}


@pytest.mark.parametrize("version", RUN)
def test_a_prompt_that_comes_again_costs_a_source_its_last_page_and_one_that_goes_on_nothing(
    schedulers: dict[str, dict[str, Any]], version: str
):
    """But for MTP, which drops the last block of any hit."""
    found = {
        mode: {(goal - again, goal - longer) for goal, again, longer in report["hits"] if goal >= 4 * PAGE}
        for mode, report in schedulers[version].items()
    }
    assert found["plain"] == found["checkpoints"] == {(PAGE, 0)}
    assert found["n-gram, finer hits"] == {(64, 0)}
    assert found["MTP, checkpoints"] == {(PAGE, PAGE)}
    assert found["control: plain"] == {(0, 0), (PAGE, 0)}
