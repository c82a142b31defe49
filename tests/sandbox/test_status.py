"""A pod's status follows from what is known of its containers, and of nothing else."""

from dataclasses import replace

import pytest

from prfaas_sandbox.node.container import back_off_seconds
from prfaas_sandbox.node.status import (
    ContainerFacts,
    ContainerRunning,
    ContainerTerminated,
    ContainerWaiting,
    PodAddresses,
    phase,
    pod_status,
    should_restart,
)

THEN, NOW = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"
PLACE = PodAddresses("10.244.1.1", "10.244.0.1")
UP = ContainerFacts("a", "none", ContainerRunning(THEN), ready=True, started=True)
STARTING = ContainerFacts("b", "none", ContainerWaiting("ContainerCreating"))
GOOD, BAD = ContainerTerminated(0, "Completed", THEN, NOW), ContainerTerminated(1, "Error", THEN, NOW)
DONE, FAILED = replace(UP, state=GOOD, ready=False), replace(UP, state=BAD, ready=False)
LOOPING = replace(STARTING, state=ContainerWaiting("CrashLoopBackOff"), last=BAD)


def pod(**spec) -> dict:
    return {"metadata": {"name": "p", "uid": "u"}, "spec": spec, "status": {}}


def conditions(status: dict) -> dict[str, str]:
    return {each["type"]: each["status"] for each in status["conditions"]}


@pytest.mark.parametrize(
    ("policy", "containers", "expected"),
    [
        ("Always", [UP], "Running"),
        ("Always", [UP, STARTING], "Pending"),
        ("Always", [LOOPING], "Running"),
        ("Always", [FAILED], "Running"),
        ("Never", [DONE], "Succeeded"),
        ("Never", [DONE, FAILED], "Failed"),
        ("Never", [DONE, UP], "Running"),
        ("OnFailure", [DONE], "Succeeded"),
        ("OnFailure", [FAILED], "Running"),
    ],
)
def test_phase(policy, containers, expected):
    assert phase(policy, containers) == expected


@pytest.mark.parametrize(
    ("policy", "code", "expected"),
    [("Always", 0, True), ("Always", 1, True), ("OnFailure", 0, False), ("OnFailure", 1, True), ("Never", 1, False)],
)
def test_restart(policy, code, expected):
    assert should_restart(policy, code) is expected


def test_back_off_doubles_up_to_its_limit():
    assert [back_off_seconds(failures) for failures in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]


def test_a_pod_is_ready_when_all_containers_are():
    assert conditions(pod_status(pod(), [UP], PLACE, NOW)) == {
        "Initialized": "True",
        "ContainersReady": "True",
        "Ready": "True",
    }
    status = pod_status(pod(), [UP, STARTING], PLACE, NOW)
    assert conditions(status)["Ready"] == "False"
    assert status["conditions"][-1]["message"] == "containers with unready status: b"


def test_a_gate_holds_ready_back_but_not_containers_ready():
    gated = pod(readinessGates=[{"conditionType": "mine"}])
    status = pod_status(gated, [UP], PLACE, NOW)
    assert (conditions(status)["ContainersReady"], conditions(status)["Ready"]) == ("True", "False")
    gated["status"] = {"conditions": [{"type": "mine", "status": "True"}]}
    opened = pod_status(gated, [UP], PLACE, NOW)
    assert conditions(opened)["Ready"] == "True"
    assert "mine" not in conditions(opened)  # its owner writes it, not the node


def test_conditions_keep_their_time_while_they_hold():
    known = pod()
    known["status"] = {"conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": THEN}]}
    ready = {each["type"]: each for each in pod_status(known, [UP], PLACE, NOW)["conditions"]}
    assert (ready["Ready"]["lastTransitionTime"], ready["ContainersReady"]["lastTransitionTime"]) == (THEN, NOW)
    unready = {each["type"]: each for each in pod_status(known, [STARTING], PLACE, NOW)["conditions"]}
    assert unready["Ready"]["lastTransitionTime"] == NOW


def test_a_container_reports_its_state_and_how_it_ended_before():
    status = pod_status(pod(), [replace(LOOPING, restarts=2)], PLACE, NOW)["containerStatuses"][0]
    assert status["state"] == {"waiting": {"reason": "CrashLoopBackOff", "message": ""}}
    assert status["lastState"]["terminated"]["exitCode"] == 1
    assert (status["restartCount"], status["ready"], status["containerID"]) == (2, False, "process://u/b/2")


def test_a_pod_waits_for_its_init_containers_and_fails_with_one_that_failed_for_good():
    first, second = replace(DONE, name="first"), replace(STARTING, name="second")
    status = pod_status(pod(), [STARTING], PLACE, NOW, [first, second])
    assert (status["phase"], conditions(status)["Initialized"]) == ("Pending", "False")
    assert [one["ready"] for one in status["initContainerStatuses"]] == [True, False]
    status = pod_status(pod(), [UP], PLACE, NOW, [first])
    assert (status["phase"], conditions(status)["Initialized"]) == ("Running", "True")
    assert pod_status(pod(restartPolicy="Never"), [STARTING], PLACE, NOW, [FAILED])["phase"] == "Failed"
    assert "initContainerStatuses" not in pod_status(pod(), [UP], PLACE, NOW)
