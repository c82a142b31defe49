"""How vLLM runs on GPUs, in two versions: our connector in its own asynchronous scheduler, under its own
Model Runner V2, and in its own data-parallel ranks, without a model.

Two batches are in flight there: the second is scheduled before the first one's token is known. A source's blocks must
be its own until a destination has them, whatever comes in between.
"""

from typing import Any

import pytest

from .versions import RUN, Versions

Seen = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def of_each(vllm_versions: Versions) -> dict[str, Seen]:
    return vllm_versions.run("async_steps.py")


@pytest.fixture(params=RUN)
def seen(request: pytest.FixtureRequest, of_each: dict[str, Seen]) -> Seen:
    return of_each[request.param]


def test_a_source_ends_at_its_goal_and_no_step_writes_its_state_again(seen: Seen):
    found = {name: report for name, report in seen.items() if name.startswith("sources")}
    assert len(found) == 5
    for name, report in found.items():
        assert report == {"wrong": [], "withdrawn": 0, "lost": 0, "tried": 100}, name


def test_a_source_with_more_than_one_token_to_give_is_taken_beyond_its_goal(seen: Seen):
    """The control: vLLM would schedule the second one before the first is known."""
    assert seen["control: sources"]["withdrawn"] == 100


@pytest.mark.parametrize("heard", range(5))
def test_an_abort_between_two_batches_withdraws_the_source_and_frees_its_blocks_when_it_is_sent(seen: Seen, heard: int):
    found = seen[f"aborted after {heard}"]
    assert found == {"computed": min(heard + 2, 5) * 256, "revoked": ["s"], "steps": 0, "held": True, "freed": True}


def test_a_source_whose_last_step_is_in_flight_keeps_its_blocks_where_memory_is_short(seen: Seen):
    assert seen["preempted in flight"] == {
        "computed": 1280,
        "preempted": False,
        "revoked": [],
        "older goes on": False,
        "held": True,
        "finished": True,
    }


def test_a_source_that_loses_its_blocks_is_withdrawn_in_the_same_step(seen: Seen):
    found = seen["preempted"]
    assert (found["preempted"], found["revoked"], found["held"]) == (True, ["s"], False)
    assert found["older goes on"]
    assert not found["finished"]


def test_a_producer_would_lose_blocks_that_a_batch_in_flight_writes(seen: Seen):
    """The control: the connector refuses that role."""
    found = seen["control: preempted in flight"]
    assert (found["computed"], found["preempted"], found["held"]) == (1280, True, False)


def test_no_cache_lands_where_a_batch_in_flight_still_writes(seen: Seen):
    assert seen["landing"] == {"early": False, "later": True}
    assert seen["control: landing"]["early"], "the control: a producer's blocks are given away at once"


def test_a_destination_goes_on_from_its_goal_when_its_cache_has_come_between_batches(seen: Seen):
    found = seen["fetched"]
    assert (found["fetched"], found["completed"], found["computed"]) == ([[0, 1280]], ["d"], {"d": 66})
    assert found["held"]


def test_a_destination_that_is_aborted_between_batches_keeps_its_blocks_until_nothing_lands_in_them(seen: Seen):
    found = seen["fetch aborted"]
    assert (found["held"], found["freed"], found["finished"]) == (True, True, True)
    assert (found["completed"], found["computed"]) == ([], {})


BEFORE = ["handle_preemptions", "bind_connector_metadata", "start_load_kv"]
REPORT = ["get_transfer_results", "build_connector_worker_meta"]
CALLS = [*BEFORE, "wait_for_save", *REPORT, "clear_connector_metadata"]
WITH_DRAFTS = [*BEFORE, *REPORT, "wait_for_save", "clear_connector_metadata"]


def test_caches_cross_between_workers_of_both_model_runners_as_they_are_after_the_step(seen: Seen):
    """Also where the report of a step comes before its drafts, whose layers are written last."""
    for name, found in seen["runners"].items():
        sent = (found["received"], found["sent"], found["same"])
        assert sent == (["d"], ["s"], True), name


@pytest.mark.parametrize("version", RUN)
def test_model_runner_v2_calls_a_connector_in_the_order_of_the_first_one(of_each: dict[str, Seen], version: str):
    calls = {name: found["calls"] for name, found in of_each[version]["runners"].items()}
    assert calls["V1"] == calls["V2"] == CALLS
    assert calls["V1 with drafts"] == WITH_DRAFTS
    assert calls["V2 with drafts"] == (CALLS if version == "0.32" else WITH_DRAFTS)


@pytest.mark.parametrize("is_moe", [False, True])
def test_each_rank_of_each_data_parallel_rank_has_a_mover_and_a_port_of_its_own(seen: Seen, is_moe: bool):
    found = seen[f"data-parallel, {is_moe=}"]
    assert found["ranks"] == [[0, 4, 0, 0, 2], [1, 4, 1, 1, 2], [2, 4, 2, 0, 2], [3, 4, 3, 1, 2]]
    assert found["models"] == 1
