"""Proves what the demo concludes and chooses from what it has seen; tests/e2e/test_demo.py runs it."""

from typing import Any

import pytest

from prfaas_sandbox.demo.decide import KILL_BYTES, kill_moment
from prfaas_sandbox.demo.records import (
    KILLED,
    DemoResults,
    FailureDrill,
    RequestRecord,
    SeenTransfer,
    StreamDrill,
    find_problems,
)

MEMBER = "prefill-eu"
NOT_IN_THE_MIDDLE = "the worker was not killed in the middle of a transfer"
NO_STREAM_BROKE = "no decode instance was killed in the middle of a stream"


def request(**fields: Any) -> RequestRecord:
    return RequestRecord(**{"id": "demo-1", "act": "lengths", "decision": "offload", "outcome": "ok"} | fields)


def drill(outcome: str, transfer: SeenTransfer | None, pod: str = "p", after: str = MEMBER) -> FailureDrill:
    return FailureDrill(
        request=request(act=KILLED, outcome=outcome),
        transfer=transfer,
        killed_pod=pod,
        request_after_recovery=request(prefilled_in=after) if pod else None,
    )


def test_the_verdict_names_every_promise_that_an_empty_story_breaks():
    problems = find_problems(DemoResults())
    assert len(problems) >= 6
    assert all(FailureDrill.__name__ not in problem for problem in problems)


@pytest.mark.parametrize(
    ("outcome", "transfer", "pod", "in_the_middle", "asks_for_another"),
    [
        ("fallback", SeenTransfer(outcome="failed", payload_bytes=300_000), "p", True, False),  # our workers
        ("ok", SeenTransfer(outcome="failed", payload_bytes=300_000), "p", True, False),  # vLLM
        ("ok", SeenTransfer(outcome="delivered", payload_bytes=2_000_000), "p", False, True),  # killed after the end
        ("ok", SeenTransfer(outcome="delivered", payload_bytes=2_000_000), "", False, True),  # not killed: it was late
        ("fallback", SeenTransfer(outcome="failed", payload_bytes=0), "p", False, True),  # killed before the beginning
        ("fallback", None, "p", False, True),
        ("ok", None, "", False, True),  # prefilled in the hub
        # What follows is prfaas's fault, and another moment would not show it.
        ("failed: HTTP 500", SeenTransfer(outcome="failed", payload_bytes=300_000), "p", True, False),
        ("failed: HTTP 500", SeenTransfer(outcome="delivered", payload_bytes=2_000_000), "p", False, False),
        ("fallback", SeenTransfer(outcome="failed", payload_bytes=300_000), "", False, False),  # broke without a kill
    ],
)
def test_only_a_transfer_that_broke_by_the_kill_is_taken_for_a_broken_one(
    outcome: str, transfer: SeenTransfer | None, pod: str, in_the_middle: bool, asks_for_another: bool
):
    seen = drill(outcome, transfer, pod)
    assert (seen.is_in_the_middle, seen.asks_for_another) == (in_the_middle, asks_for_another)
    assert (NOT_IN_THE_MIDDLE in find_problems(DemoResults(failure_drill=seen))) is not in_the_middle


def test_a_worker_that_did_not_come_back_is_a_problem():
    broken = SeenTransfer(outcome="failed", payload_bytes=300_000)
    problem = "no prompt was offloaded after the killed worker came back"
    assert problem not in find_problems(DemoResults(failure_drill=drill("fallback", broken)))
    for after in ("hub", "?"):
        assert problem in find_problems(DemoResults(failure_drill=drill("fallback", broken, after=after)))


@pytest.mark.parametrize(
    ("arrived", "whole", "is_answered", "moment"),
    [
        (0, 2e6, False, "wait"),
        (KILL_BYTES - 1, 2e6, False, "wait"),
        (KILL_BYTES, 2e6, False, "now"),
        (1.2e6, 2e6, False, "now"),
        (1.3e6, 2e6, False, "late"),
        (2e6, 2e6, False, "late"),
        (KILL_BYTES, 2e6, True, "late"),
        (0, 2e6, True, "late"),
        (KILL_BYTES, float("inf"), False, "now"),  # no cache has crossed so far
    ],
)
def test_the_worker_is_killed_when_a_part_has_arrived_and_enough_is_to_come(arrived, whole, is_answered, moment):
    assert kill_moment(arrived, whole, is_answered=is_answered) == moment


@pytest.mark.parametrize(
    ("text", "tokens", "events", "outcome", "problem"),
    [
        ("abcd", 4, 2, "resumed", ""),
        ("abxy", 4, 2, "resumed", ""),  # a near-tie after the kill
        ("axcd", 4, 2, "resumed", "began with another text"),
        ("abc", 3, 2, "resumed", "shorter"),
        ("abcd", 4, 4, "resumed", "in the middle of a stream"),
        ("abcd", 4, 2, "ok", "in the middle of a stream"),  # the gateway had all of it before
    ],
)
def test_the_verdict_on_vllm_asks_for_every_token_of_the_broken_stream(text, tokens, events, outcome, problem):
    undisturbed = request(act="undisturbed", output_tokens=4, text="abcd")
    killed = request(act="killed", output_tokens=tokens, text=text)
    seen = StreamDrill(
        undisturbed=undisturbed, request=killed, killed_pod="p", events_before_kill=events, outcome=outcome
    )
    found = find_problems(DemoResults(engine="vllm", stream_drill=seen))
    about_streams = [each for each in found if "stream" in each]
    assert [problem in each for each in about_streams] == ([True] if problem else [])


@pytest.mark.parametrize(
    ("reached", "logged", "asks_for_another"),
    [
        ("ok", "resumed", False),
        ("ok", "ok", True),
        ("ok", "", True),
        ("failed: the stream ended early", "failed", False),  # prfaas's fault
    ],
)
def test_a_stream_that_nothing_broke_is_followed_by_a_longer_one(reached: str, logged: str, asks_for_another: bool):
    killed = request(act="killed", output_tokens=300, outcome=reached)
    seen = StreamDrill(undisturbed=killed, request=killed, killed_pod="p", events_before_kill=60, outcome=logged)
    assert seen.asks_for_another is asks_for_another
    found = find_problems(DemoResults(engine="vllm", stream_drill=seen))
    assert (NO_STREAM_BROKE in found) is (logged != "resumed")
