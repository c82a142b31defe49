"""The scheduler's side of vLLM's connector, by requests that have the attributes of vLLM's."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from prfaas.errors import ConfigError
from prfaas_vllm import settings
from prfaas_vllm.scheduling import NOTHING, StepPlan, TransferPlanner, goal_of, leg_of
from prfaas_vllm.settings import (
    data_port,
    read_settings,
    require_parallelism,
    require_role,
    require_states,
    require_transfer_memory,
)

PAGE = 256
LEG = {"transfer_id": "a" * 32, "epoch": 7, "token": "secret", "host": "10.0.0.1", "port": 8001, "cluster": "eu"}


@dataclass
class Parallel:
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1


@dataclass
class Request:
    request_id: str = "r"
    num_prompt_tokens: int = 3000
    kv_transfer_params: dict[str, Any] | None = None
    num_computed_tokens: int = 0
    max_tokens: int = 16
    prompt_token_ids: list[int] | None = field(default_factory=lambda: [7])


def source(transfer_id: str = "", **more: Any) -> Request:
    return _leg(transfer_id, "source", more)


def destination(transfer_id: str = "", **more: Any) -> Request:
    return _leg(transfer_id, "destination", more)


def _leg(transfer_id: str, role: str, more: dict[str, Any]) -> Request:
    """A request; without a name of its own its transfer is called as its id is."""
    named = transfer_id or more.get("request_id", "a").encode().hex().zfill(32)
    return Request(kv_transfer_params={"prfaas": LEG | {"role": role, "transfer_id": named}}, **more)


@pytest.mark.parametrize(
    ("prompt", "goal"),
    [(0, 0), (1, 0), (2, 1), (256, 255), (1024, 1023), (1025, 1024), (1026, 1024), (1280, 1024), (1281, 1280)],
)
def test_all_but_the_last_token_of_a_short_prompt_cross_and_whole_pages_of_a_long_one(prompt: int, goal: int):
    assert goal_of(prompt, PAGE) == goal


def test_the_sources_prompt_ends_where_the_destinations_cache_does_and_before_the_last_token():
    for prompt in range(1, 3000, 7):
        goal = goal_of(prompt, PAGE)
        assert goal < prompt
        assert TransferPlanner(PAGE).add(source(num_prompt_tokens=prompt)) == (prompt - goal if goal else 0)
        assert TransferPlanner(PAGE).matched(destination(num_prompt_tokens=prompt), 0) == goal


def test_both_sides_name_the_tokens_that_cross_and_no_others():
    def prompts(ids: list[int]) -> tuple[str, str]:
        request = {"prompt_token_ids": ids, "num_prompt_tokens": len(ids)}
        planner = TransferPlanner(PAGE)
        planner.add(source(request_id="s", **request))
        planner.allocated(destination(request_id="d", **request), ([1], [2]), 100)
        plan = planner.take()
        return plan.starts[0].prompt, plan.fetches[0].prompt

    ids = list(range(1100))
    announced, wanted = prompts(ids)
    assert announced == wanted != ""
    assert prompts([*ids[:1024], *[7] * 76]) == (announced, wanted), "the rest is computed by each side"
    assert prompts([*ids[:1023], 7, *ids[1024:]])[0] != announced


def with_goal(request: Request, tokens: int) -> Request:
    """Have the gateway name a prefix."""
    assert request.kv_transfer_params is not None
    request.kv_transfer_params["prfaas"]["tokens"] = tokens
    return request


@pytest.mark.parametrize(("tokens", "goal"), [(512, 768), (2560, 2816), (2816, 2999), (2998, 2999)])
def test_both_sides_of_a_prefix_end_a_page_behind_what_the_source_has_and_it_leaves_a_token(tokens: int, goal: int):
    giving, fetching = (with_goal(leg(num_prompt_tokens=3000), tokens) for leg in (source, destination))
    planner = TransferPlanner(PAGE)
    assert planner.add(giving) == 3000 - goal
    assert planner.take().starts[0].goal == goal
    assert planner.matched(fetching, 256) == goal - 256
    assert planner.matched(fetching, 2999) == 0


@pytest.mark.parametrize("tokens", [2999, 3000, 5000])
def test_a_prefix_that_leaves_no_token_is_not_offered_and_declined(tokens: int):
    giving, fetching = (with_goal(leg(num_prompt_tokens=3000), tokens) for leg in (source, destination))
    planner = TransferPlanner(PAGE)
    assert (planner.add(giving), planner.matched(fetching, 0)) == (0, 0)
    planner.allocated(fetching, ([1],), 0)
    plan = planner.take()
    assert (plan.starts, [one.request_id for one in plan.declined]) == ([], ["r"])


def offloaded(tokens: int = 512, **more: Any) -> Request:
    """A request that computes for another instance, and fetches a prefix first."""
    request = source(num_prompt_tokens=1100, **more)
    assert request.kv_transfer_params is not None
    prefix = LEG | {"role": "destination", "transfer_id": "b" * 32, "tokens": tokens}
    request.kv_transfer_params["prfaas"]["prefix"] = prefix
    return request


def test_a_source_fetches_its_prefix_first_and_gives_all_of_it():
    planner, request = TransferPlanner(PAGE), offloaded()
    request.num_prompt_tokens -= planner.add(request)
    assert planner.matched(request, 0) == 768
    planner.allocated(request, ([1, 2, 3, 4],), 768)
    plan = planner.take()
    assert [start.goal for start in plan.starts] == [1024]
    assert [(one.leg.transfer_id, one.start, one.goal) for one in plan.fetches] == [("b" * 32, 0, 768)]
    assert planner.matched(request, 0) == 0, "it is tried once"
    planner.end_fetches(["r"], failed=[])
    assert [one.goal for one in planner.take().fetched] == [768]
    request.num_computed_tokens = 768
    planner.scheduled(request, 256, ([1, 2, 3, 4],))
    assert [(step.before, step.computed) for step in planner.take().steps] == [(768, 1024)]
    again = source(transfer_id="61".zfill(32), request_id="other", num_prompt_tokens=1100)
    assert planner.add(again) == 0, "its own transfer is not over"
    assert planner.finish(request, is_whole=True) is True


@pytest.mark.parametrize(("tokens", "goal"), [(512, 768), (700, 956), (768, 0)])
def test_a_source_whose_prompt_was_cut_and_the_giver_of_its_prefix_mean_the_same_goal(tokens: int, goal: int):
    giver, planner, request = TransferPlanner(PAGE), TransferPlanner(PAGE), offloaded(tokens)
    request.num_prompt_tokens -= planner.add(request)
    assert planner.matched(request, 0) == goal, "of all that is computed here nothing crosses"
    giver.add(with_goal(source(num_prompt_tokens=1100), tokens))
    assert goal in (0, giver.take().starts[0].goal)


@pytest.mark.parametrize("has_come", [False, True])
def test_of_a_source_that_is_aborted_while_its_prefix_comes_vllm_hears_one_end(has_come: bool):
    planner, request = TransferPlanner(PAGE), offloaded()
    request.num_prompt_tokens -= planner.add(request)
    planner.allocated(request, ([1, 2, 3, 4],), 768)
    planner.take()
    if has_come:
        planner.end_fetches(["r"], failed=[])
    assert planner.finish(request, is_whole=False) is has_come
    plan = planner.take()
    assert plan.revoked == {"r": "the prefill was aborted"}
    assert plan.unawaited == (set() if has_come else {"r"})


def test_a_source_that_ends_before_its_prefix_is_fetched_declines_it():
    planner, request = TransferPlanner(PAGE), offloaded()
    request.num_prompt_tokens -= planner.add(request)
    planner.take()
    assert planner.finish(request, is_whole=False) is True
    plan = planner.take()
    assert [one.leg.transfer_id for one in plan.declined] == ["b" * 32]
    assert plan.revoked == {"r": "the prefill was aborted"}


def test_a_source_is_announced_followed_and_kept_until_its_offer_ends():
    planner, request = TransferPlanner(PAGE), source(num_prompt_tokens=1100)
    assert planner.add(request) == 1100 - 1024
    planner.scheduled(request, 512, ([1, 2], [3]))
    plan = planner.take()
    assert [(start.request_id, start.goal) for start in plan.starts] == [("r", 1024)]
    assert [(step.before, step.computed, step.block_ids) for step in plan.steps] == [(0, 512, ([1, 2], [3]))]
    assert planner.finish(request, is_whole=True) is True
    assert planner.take().revoked == {}
    assert planner.is_source("r") is False


def test_an_aborted_source_is_revoked_and_an_unknown_one_holds_nothing():
    planner, request = TransferPlanner(PAGE), source()
    planner.add(request)
    assert planner.finish(request, is_whole=False) is False
    assert planner.take().starts == []
    planner.add(request)
    planner.take()
    assert planner.finish(request, is_whole=False) is True
    assert planner.take().revoked == {"r": "the prefill was aborted"}


def test_a_preempted_source_is_revoked_before_its_blocks_are_written_again():
    planner, request = TransferPlanner(PAGE), source()
    planner.add(request)
    planner.take()
    planner.preempted(["other", "r"])
    planner.scheduled(request, 512, ([1],))
    plan = planner.take()
    assert list(plan.revoked) == ["r"]
    assert plan.steps == []
    assert planner.finish(request, is_whole=True) is True


@pytest.mark.parametrize("is_known", [True, False])
def test_of_a_step_across_the_goal_nothing_is_given(is_known: bool):
    """No supported vLLM makes one, as its prompt ends there. What a state would be after it is not known."""
    planner, request = TransferPlanner(PAGE), source(num_prompt_tokens=1100)
    planner.add(request)
    plan = planner.take() if is_known else None
    planner.scheduled(request, 1025, ([1],))
    planner.scheduled(request, 1, ([1],))
    after = planner.take()
    assert (after.steps, after.starts, planner.is_source("r")) == ([], [], False)
    reason = "vLLM leaves no state at token 1024: a step goes from 0 to 1025"
    assert after.revoked == ({"r": reason} if plan else {}), "what was not announced is not revoked"
    assert planner.finish(request, is_whole=True) is is_known


def test_a_source_that_is_computed_on_is_revoked_before_its_state_is_written_again():
    planner, request = TransferPlanner(PAGE), source(num_prompt_tokens=1100)
    planner.add(request)
    planner.scheduled(request, 1024, ([1],))
    assert len(planner.take().steps) == 1
    request.num_computed_tokens = 1024
    planner.scheduled(request, 1, ([1],))
    plan = planner.take()
    reason = "vLLM leaves no state at token 1024: a step goes from 1024 to 1025"
    assert (plan.steps, plan.revoked) == ([], {"r": reason})
    assert planner.finish(request, is_whole=True) is True, "its blocks stay until its offer is over"


def test_a_destination_fetches_what_its_own_cache_lacks_once():
    planner, request = TransferPlanner(PAGE), destination()
    assert planner.matched(request, 512) == 2816 - 512
    assert planner.matched(request, 512) == 2816 - 512, "without side effects"
    planner.allocated(request, ([1, 2],), 2816 - 512)
    (fetching,) = planner.take().fetches
    assert (fetching.start, fetching.goal, fetching.leg.port) == (512, 2816, 8001)
    assert planner.matched(request, 0) == 0, "after a failure it is computed here"
    planner.allocated(request, ([1, 2],), 0)
    assert planner.take().fetches == []
    assert planner.finish(request, is_whole=True) is False


def test_a_destination_that_has_it_all_tells_the_source_once():
    planner, request = TransferPlanner(PAGE), destination()
    assert planner.matched(request, 2816) == 0
    planner.allocated(request, ([1, 2],), 0)
    planner.allocated(request, ([1, 2],), 0)
    plan = planner.take()
    assert [(one.request_id, one.leg.token) for one in plan.declined] == [("r", "secret")]
    assert plan.fetches == []
    planner.allocated(destination(num_prompt_tokens=1), ([1],), 0)
    assert planner.take().declined == [], "no source offers what is too short"


def test_a_destination_that_is_aborted_in_its_queue_tells_the_source():
    """Otherwise the source keeps a computed cache that no request needs, for as long as its destination might queue."""
    planner = TransferPlanner(PAGE)
    queued, known, failed, short = (destination(request_id=name) for name in ("queued", "known", "failed", "short"))
    short.num_prompt_tokens = 1
    planner.allocated(known, ([1],), 0)
    planner.allocated(failed, ([1],), 512)
    planner.take()
    for request in (queued, known, failed, short, Request(request_id="other"), source(request_id="source")):
        assert planner.finish(request, is_whole=False) is False
    assert [(one.request_id, one.leg.token) for one in planner.take().declined] == [("queued", "secret")]


def test_a_destination_with_more_cached_than_the_goal_fetches_nothing():
    planner, request = TransferPlanner(PAGE), destination(num_prompt_tokens=1300)
    assert planner.matched(request, 1280) == 0
    assert planner.matched(request, 1299) == 0


def test_a_destination_asks_once_also_where_vllm_allocates_again_after_a_failure():
    planner, request = TransferPlanner(PAGE), destination()
    for _ in range(2):
        planner.allocated(request, ([1, 2],), 512)
    assert len(planner.take().fetches) == 1


def test_a_transfer_that_is_named_for_two_requests_is_the_first_ones_until_that_is_over():
    """The second would end the first's offer, or take its cache for its own."""
    planner = TransferPlanner(PAGE)
    first, second = (source(transfer_id=LEG["transfer_id"], request_id=name) for name in ("first", "second"))
    assert planner.add(first) > 0
    assert planner.add(second) == 0
    assert [start.request_id for start in planner.take().starts] == ["first"]
    assert planner.is_source("second") is False
    assert planner.finish(second, is_whole=True) is False
    assert planner.finish(first, is_whole=True) is True
    assert planner.add(second) == 0, "its offer may be open"
    planner.end_offers({"first"})
    assert planner.add(second) > 0

    planner = TransferPlanner(PAGE)
    first, second = (destination(transfer_id=LEG["transfer_id"], request_id=name) for name in ("first", "second"))
    planner.allocated(first, ([1],), 2816)
    assert planner.matched(second, 0) == 0
    planner.allocated(second, ([2],), 0)
    planner.finish(second, is_whole=True)
    plan = planner.take()
    assert ([each.request_id for each in plan.fetches], plan.declined) == (["first"], [])
    planner.end_fetches({"first"}, set())
    assert planner.matched(destination(transfer_id=LEG["transfer_id"], request_id="third"), 0) == 2816


def test_a_step_of_which_there_is_nothing_to_say_has_an_empty_plan():
    planner = TransferPlanner(PAGE)
    planner.fetches_failed({"r"})
    assert planner.take().in_vain
    assert planner.take() is NOTHING
    assert StepPlan() == NOTHING


def test_nothing_is_kept_of_requests_that_ended():
    planner = TransferPlanner(PAGE)
    empty = {name: type(held)() for name, held in vars(planner).items() if isinstance(held, (dict, set))}
    assert len(empty) == 5
    first, second, third = (
        role(request_id=name, transfer_id=name * 32)
        for role, name in ((source, "a"), (destination, "b"), (source, "c"))
    )
    for request in (first, third):
        planner.add(request)
    planner.allocated(second, ([1],), 512)
    planner.take()
    planner.preempted(["c"])
    for request in (first, second, third):
        planner.finish(request, is_whole=request is first)
    planner.end_offers({"a", "c"})
    planner.end_fetches({"b"}, set())
    assert {name: held for name, held in vars(planner).items() if name in empty} == empty


@pytest.mark.parametrize(
    "params", [None, {}, {"do_remote_decode": True}, {"prfaas": {"role": "thief"}}, {"prfaas": 7}, "text"]
)
def test_serves_other_requests_as_before(params: dict[str, Any] | None):
    planner, request = TransferPlanner(PAGE), Request(kv_transfer_params=params)
    assert planner.add(request) == 0
    assert planner.matched(request, 0) == 0
    planner.allocated(request, ([1],), 5)
    assert planner.take().fetches == []
    assert planner.finish(request, is_whole=False) is False


@pytest.mark.parametrize(
    "wrong",
    [
        {"transfer_id": "a" * 200_000},
        {"transfer_id": "A" * 32},
        {"transfer_id": "a"},
        {"transfer_id": "g" * 32},
        {"epoch": 1 << 63},
        {"epoch": 1 << 70},
        {"epoch": -1},
        {"token": "\ud800"},
        {"token": "t" * 300},
        {"host": "10.0.0.1\n"},
        {"host": "h" * 300},
        {"port": 65_536},
        {"port": -1},
        {"cluster": "e u"},
    ],
)
def test_serves_a_leg_that_no_frame_or_message_could_carry_without_a_transfer(wrong: dict[str, Any]):
    planner = TransferPlanner(PAGE)
    for role in ("source", "destination"):
        request = Request(kv_transfer_params={"prfaas": LEG | {"role": role} | wrong})
        assert leg_of(request) is None
        assert (planner.add(request), planner.matched(request, 0), planner.is_source("r")) == (0, 0, False)


def test_serves_a_prompt_of_embeddings_without_a_transfer():
    """It has no token ids that could be shortened."""
    for request in (source(prompt_token_ids=None), destination(prompt_token_ids=None)):
        planner = TransferPlanner(PAGE)
        assert planner.add(request) == 0
        assert planner.is_source("r") is False
        assert planner.matched(request, 0) == 0


def test_settings_are_read_from_text_and_numbers_and_faults_are_named():
    assert read_settings({"transfer_memory_mib": "64", "host": "10.1.1.1"}).transfer_memory_mib == 64
    with pytest.raises(ConfigError, match="unknown field `hots`"):
        read_settings({"hots": "x"})
    with pytest.raises(ConfigError, match="compression is 'zip', want one of"):
        read_settings({"compression": "zip"})
    assert [data_port(9000, 0), data_port(None, 3)] == [9000, 8004]


def test_transfers_that_may_not_hold_two_parts_of_the_cache_are_refused_with_what_they_need():
    require_transfer_memory(128 << 20, 256)
    with pytest.raises(ConfigError, match=r"is 256, and two parts .* of 134,217,729 bytes each, .* at least 257"):
        require_transfer_memory((128 << 20) + 1, 256)


def test_writes_why_it_does_not_start_where_kubernetes_reads_it_into_the_pods_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    log = tmp_path / "termination-log"
    monkeypatch.setattr(settings, "TERMINATION_LOG", log)
    for is_in_kubernetes in (False, True):
        if is_in_kubernetes:
            log.touch()
        with pytest.raises(ConfigError), settings.refusals_in_status():
            require_role("kv_producer")
        assert log.exists() == is_in_kubernetes
    assert log.read_text().startswith("kv_role of PrfaasConnector is kv_producer")


def test_ranks_that_hold_a_part_of_the_layers_or_of_the_tokens_are_refused_with_the_cure():
    require_parallelism(Parallel())
    with pytest.raises(ConfigError, match=r"split by layers: set parallelism\.pipeline to 1"):
        require_parallelism(Parallel(pipeline_parallel_size=2))
    for parallel in (Parallel(decode_context_parallel_size=8), Parallel(prefill_context_parallel_size=2)):
        with pytest.raises(ConfigError, match="split by tokens: remove --decode-context-parallel-size"):
            require_parallelism(parallel)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", None])
def test_a_role_in_which_vllm_may_give_blocks_away_too_early_is_refused_with_the_cure(role: str | None):
    require_role("kv_both")
    with pytest.raises(ConfigError, match=f"is {role}: set it to kv_both on every instance"):
        require_role(role)


def test_states_that_are_more_than_their_block_are_refused_with_the_cure():
    require_states(use_replayssm=False)
    with pytest.raises(ConfigError, match="remove it from args"):
        require_states(use_replayssm=True)


def test_a_fetch_that_failed_at_one_rank_fails_at_all_and_each_hears_it_once():
    planner = TransferPlanner(PAGE)
    planner.fetches_failed({"r"})
    planner.fetches_failed({"other"})
    assert planner.take().in_vain == {"r", "other"}
    assert planner.take().in_vain == set()


def test_ranks_complete_a_cache_once_in_the_step_after_it_came_and_never_one_that_failed_or_was_aborted():
    planner = TransferPlanner(PAGE)
    requests = [destination(request_id=name) for name in ("came", "failed", "aborted", "aborted late")]
    for request in requests:
        planner.allocated(request, ([1] * 11,), 2816)
    fetching = {each.request_id: each for each in planner.take().fetches}
    planner.finish(requests[2], is_whole=False)
    planner.end_fetches({"came", "failed", "aborted late", "unknown"}, {"failed"})
    planner.finish(requests[3], is_whole=False)
    assert planner.take().fetched == [fetching["came"]]
    planner.end_fetches({"came"}, set())
    assert planner.take().fetched == []
