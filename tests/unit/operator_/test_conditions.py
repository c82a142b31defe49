"""Proves that conditions keep the moment they turned, and that only a real difference causes a write."""

from prfaas.api import Condition
from prfaas_operator.errors import ForbiddenError, reason_of
from prfaas_operator.plan.conditions import MAX_MESSAGE_CHARS, ConditionState, merge, no, turned, yes
from prfaas_operator.plan.drift import AppliedManifest, needs_apply, status_differs, view


def known(status: str, reason: str = "Old", since: str = "2026-01-01T00:00:00Z") -> Condition:
    return Condition(type="Ready", status=status, reason=reason, last_transition_time=since)


def merged(current: list[Condition], verdict: ConditionState) -> dict:
    return merge(current, {"Ready": verdict}, 4, "2026-02-02T00:00:00Z")[0]


def test_a_condition_that_turns_gets_the_present_time():
    assert merged([known("False")], yes("AllReady", "fine")) == {
        "type": "Ready",
        "status": "True",
        "reason": "AllReady",
        "message": "fine",
        "observedGeneration": 4,
        "lastTransitionTime": "2026-02-02T00:00:00Z",
    }


def test_a_new_reason_without_a_new_status_keeps_the_time():
    assert merged([known("False")], no("Other", ""))["lastTransitionTime"] == "2026-01-01T00:00:00Z"


def test_a_first_condition_gets_the_present_time():
    assert merged([], no("Other", ""))["lastTransitionTime"] == "2026-02-02T00:00:00Z"


def test_a_long_message_is_cut():
    assert len(merged([], no("Other", "x" * 9000))["message"]) == MAX_MESSAGE_CHARS


def test_an_event_is_due_when_status_or_reason_changes_and_the_first_time():
    assert turned([known("False", "A")], "Ready", no("B", "m"))
    assert turned([], "Ready", no("B", "m"))
    assert not turned([known("False", "B")], "Ready", no("B", "another message"))


def test_errors_know_their_reason_and_surprises_are_called_internal():
    assert reason_of(ForbiddenError("x")) == "Forbidden"
    assert reason_of(RuntimeError("x")) == "InternalError"


MANIFEST = {
    "metadata": {"name": "a", "labels": {"l": "1"}},
    "spec": {"containers": [{"name": "c", "limits": {"cpu": "1000m"}, "args": ["a"]}], "empty": {}},
}
LIVE = {
    "metadata": {"name": "a", "uid": "u", "labels": {"l": "1", "other": "2"}},
    "spec": {
        "containers": [
            {"name": "injected"},
            {"name": "c", "limits": {"cpu": "1"}, "args": ["a"], "pullPolicy": "Always"},
        ],
        "empty": {"default": True},
        "more": 7,
    },
    "status": {"x": 1},
}
LAST = AppliedManifest(MANIFEST, view(LIVE, MANIFEST))


def changed(**spec) -> dict:
    return {**LIVE, "spec": {**LIVE["spec"], **spec}}


def test_defaults_quantities_and_injected_parts_are_no_drift():
    assert not needs_apply(LIVE, MANIFEST, LAST)
    assert not needs_apply({**changed(more=8), "status": {}}, MANIFEST, LAST)


def test_every_edit_of_what_the_manifest_says_is_drift():
    edited = {**LIVE["spec"]["containers"][1], "args": ["a", "b"]}
    assert needs_apply(changed(containers=[edited]), MANIFEST, LAST)
    assert needs_apply(changed(containers=[]), MANIFEST, LAST)
    assert needs_apply(changed(containers=None), MANIFEST, LAST)
    assert needs_apply({**LIVE, "metadata": {"name": "a"}}, MANIFEST, LAST)


def test_a_missing_child_a_new_manifest_and_a_fresh_start_are_applied():
    assert needs_apply(None, MANIFEST, LAST)
    assert needs_apply(LIVE, {**MANIFEST, "spec": {}}, LAST)
    assert needs_apply(LIVE, MANIFEST, None)


def test_conditions_of_other_writers_are_no_difference():
    ours = {"type": "Ready", "status": "True"}
    live = {"conditions": [{"type": "MetricsFresh", "status": "False"}, {**ours}], "thresholdTokens": 5}
    assert not status_differs(live, {"conditions": [ours]})
    assert status_differs(live, {"conditions": [{**ours, "status": "False"}]})
    assert status_differs({}, {"conditions": [ours]})
