"""Proves what pods and Deployments say about a pool, and when a deletion stops waiting."""

from datetime import UTC, datetime, timedelta

import pytest

from prfaas_operator.errors import ClusterUnreachableError, ForbiddenError, SecretNotFoundError
from prfaas_operator.plan.conditions import ENGINE_PROVEN, REACHABLE, READY
from prfaas_operator.plan.member import Contact, conditions, contact_time, secret_is_needed, users_of
from prfaas_operator.plan.pod_facts import project_pod
from prfaas_operator.plan.pool_status import Counts, counts, engine_proof, readiness, seconds_left, version_proof

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def raw_pod(status: dict, **metadata) -> dict:
    labels = {"prfaas.io/pool-uid": "u", "prfaas.io/role": "prefill"}
    return {"metadata": {"name": "p", "labels": labels, **metadata}, "status": status}


def container(ready: bool = False, **states) -> dict:
    return {"containerStatuses": [{"name": "worker", "ready": ready, **states}]}


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        ({"phase": "Pending"}, "is Pending, no container has started yet"),
        ({"phase": "Running"}, "is running, but its readiness probe fails"),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3"}]},
            "Unschedulable: 0/3",
        ),
        (
            container(state={"waiting": {"reason": "ImagePullBackOff", "message": "no image"}}),
            "ImagePullBackOff: no image",
        ),
        (
            container(state={"waiting": {"reason": "CrashLoopBackOff"}}, lastState={"terminated": {"exitCode": 3}}),
            "CrashLoopBackOff (last exit code 3)",
        ),
        (
            container(state={"terminated": {"exitCode": 137, "reason": "OOMKilled"}}),
            "container ended with exit code 137 (OOMKilled)",
        ),
        (
            container(
                state={"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s restarting"}},
                lastState={"terminated": {"exitCode": 1, "message": "vLLM 0.31.2 is not\nsupported"}},
            ),
            "CrashLoopBackOff: vLLM 0.31.2 is not supported (last exit code 1)",
        ),
        (
            container(state={"terminated": {"exitCode": 1, "message": "no key in /etc/prfaas/tls"}}),
            "container ended with exit code 1 (Error): no key in /etc/prfaas/tls",
        ),
    ],
)
def test_a_pod_that_is_not_ready_says_why(status, problem):
    assert project_pod(raw_pod(status)).problem == problem


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        ({"phase": "Pending"}, ""),
        ({"conditions": [{"type": "PodScheduled", "status": "False"}]}, "Unschedulable"),
        (container(state={"waiting": {"reason": "ContainerCreating"}}), ""),
        (container(state={"waiting": {"reason": "ErrImagePull"}}), "ImagePullFailed"),
        (container(state={"waiting": {"reason": "ImagePullBackOff"}}), "ImagePullFailed"),
        (container(state={"waiting": {"reason": "CreateContainerConfigError"}}), "ContainerNotCreated"),
        (container(state={"waiting": {"reason": "CrashLoopBackOff"}}), "CrashLooping"),
        (container(state={"running": {}}, restartCount=1), ""),
        (container(state={"running": {}}, restartCount=2), "CrashLooping"),
        (container(ready=True, state={"running": {}}, restartCount=9), ""),
    ],
)
def test_a_cause_that_does_not_pass_by_waiting_has_a_reason_that_does_not_flap(status, cause):
    assert project_pod(raw_pod(status)).cause == cause


INITIALISING = container(state={"waiting": {"reason": "PodInitializing"}})


@pytest.mark.parametrize(
    ("first", "problem", "cause"),
    [
        (
            {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no image c:7"}}},
            "ImagePullBackOff: no image c:7",
            "ImagePullFailed",
        ),
        (
            {"state": {"terminated": {"exitCode": 1, "reason": "Error"}}, "restartCount": 2},
            "container ended with exit code 1 (Error)",
            "CrashLooping",
        ),
        ({"state": {"running": {}}}, "is Pending, no container has started yet", ""),
        ({"state": {"terminated": {"exitCode": 0}}, "ready": True}, "PodInitializing", ""),
    ],
)
def test_an_init_container_that_does_not_get_on_is_what_the_pod_says(first, problem, cause):
    started = [{"name": "connector", "ready": False, **first}]
    facts = project_pod(raw_pod({"phase": "Pending", **INITIALISING, "initContainerStatuses": started}))
    assert (facts.problem, facts.cause) == (problem, cause)


def looked(message: str | None) -> dict:
    ended = {"exitCode": 0} | ({"message": message} if message else {})
    return {"name": "version", "ready": True, "state": {"terminated": ended}}


UNTESTED = "vLLM 0.34.0 has all that PrfaasConnector needs, but was not tested with it"


@pytest.mark.parametrize(
    ("first", "untested"),
    [
        ([looked(UNTESTED)], UNTESTED),
        ([{"name": "connector", "state": {"terminated": {"exitCode": 0, "message": "x"}}}, looked(UNTESTED)], UNTESTED),
        ([looked(None)], ""),
        ([{"name": "version", "state": {"running": {}}}], ""),
        ([{"name": "connector", "state": {"terminated": {"exitCode": 1, "message": "no room"}}}], ""),
        ([looked("x" * 1000)], "x" * 300),
    ],
)
def test_a_pod_says_of_an_untested_version_what_its_init_container_has_left(first, untested):
    assert project_pod(raw_pod({"phase": "Running", "initContainerStatuses": first})).untested == untested
    assert project_pod(raw_pod({})).untested == ""


def test_a_ready_pod_has_no_problem_and_both_addresses():
    status = {"conditions": [{"type": "Ready", "status": "True"}], "podIP": "10.0.0.1", "hostIP": "192.168.0.1"}
    facts = project_pod(raw_pod(status))
    assert (facts.ready, facts.problem, facts.pod_ip, facts.host_ip) == (True, "", "10.0.0.1", "192.168.0.1")


def test_a_deletion_timestamp_makes_a_pod_terminating():
    assert project_pod(raw_pod({}, deletionTimestamp="2026-01-01T00:00:00Z")).terminating


def deployment(generation: int = 1, **status) -> dict:
    return {"metadata": {"generation": generation}, "status": {"observedGeneration": 1, **status}}


FULL = {"replicas": 2, "readyReplicas": 2, "updatedReplicas": 2}


def test_a_pool_is_ready_when_all_instances_are_ready_and_of_the_present_template(make):
    pool = make.prefill_pool()
    assert readiness(pool, deployment(**FULL), ()).good
    assert not readiness(pool, deployment(**{**FULL, "readyReplicas": 1}), ()).good
    assert not readiness(pool, deployment(**{**FULL, "updatedReplicas": 1}), ()).good
    assert not readiness(pool, deployment(**{**FULL, "replicas": 3}), ()).good
    assert not readiness(pool, deployment(generation=2, **FULL), ()).good


def test_no_instances_are_wanted_and_none_is_fine(make):
    assert readiness(make.prefill_pool(replicas=0), deployment(), ()).message == "scaled to zero"


def test_the_first_waiting_pod_is_cited_and_a_terminating_one_is_not(make):
    pods = (
        make.pod("b", "offload", ready=False, problem="is Pending"),
        make.pod("a", "offload", ready=False, problem="is terminating", terminating=True),
    )
    verdict = readiness(make.prefill_pool(), deployment(replicas=2), pods)
    assert verdict.message == "0 of 2 instances ready, 0 of the present template; pod b: is Pending"


def test_a_pod_with_a_cause_is_cited_before_one_that_only_waits(make):
    pods = (
        make.pod("a", "offload", ready=False, problem="is Pending"),
        make.pod("b", "offload", ready=False, problem="0/3 nodes", cause="Unschedulable"),
    )
    verdict = readiness(make.prefill_pool(), deployment(replicas=2), pods)
    assert verdict.reason == "Unschedulable"
    assert verdict.message.endswith("; pod b: 0/3 nodes")


def test_a_pool_that_serves_while_its_instances_are_replaced_is_rolling_out(make):
    pods = (make.pod("a", "offload", ready=False, problem="is Pending"),)
    rolling = deployment(**{**FULL, "replicas": 3, "updatedReplicas": 1})
    assert readiness(make.prefill_pool(), rolling, pods).reason == "RollingOut"
    stuck = (make.pod("a", "offload", ready=False, problem="0/3 nodes", cause="Unschedulable"),)
    assert readiness(make.prefill_pool(), rolling, stuck).reason == "Unschedulable"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ('pods "x" is forbidden: exceeded quota: q, requested: pods=1', "QuotaExceeded"),
        ('pods "x" is forbidden: no PriorityClass with name top was found', "PodsRefused"),
    ],
)
def test_the_controllers_complaint_comes_before_any_pod(make, message, reason):
    failing = {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": message}]}
    pods = (make.pod("b", "offload", ready=False, problem="0/3 nodes", cause="Unschedulable"),)
    verdict = readiness(make.prefill_pool(), deployment(**failing), pods)
    assert verdict.reason == reason
    assert verdict.message.endswith(f"; {message}")


def test_a_deployment_without_status_counts_nothing():
    assert counts({}) == Counts()


def test_the_deadline_of_a_deletion_counts_from_its_timestamp():
    since = (NOW - timedelta(seconds=100)).isoformat().replace("+00:00", "Z")
    assert seconds_left(since, 300, NOW) == 200
    assert seconds_left(since, 100, NOW) == 0
    assert seconds_left(since, 30, NOW) == -70


@pytest.mark.parametrize(
    ("error", "reachable", "ready"),
    [
        (None, ("True", "Answered"), ("True", "AllReady")),
        (ClusterUnreachableError("x"), ("False", "ClusterUnreachable"), ("False", "ClusterUnreachable")),
        (ForbiddenError("x"), ("True", "Answered"), ("False", "Forbidden")),
        (SecretNotFoundError("x"), ("Unknown", "SecretNotFound"), ("False", "SecretNotFound")),
    ],
)
def test_the_last_contact_decides_both_conditions_of_a_member(make, error, reachable, ready):
    found = conditions(make.member(), Contact("v1.34.4", error), ())
    assert (found[REACHABLE][:2], found[READY][:2]) == (reachable, ready)


def test_a_member_that_is_being_deleted_names_the_pools_that_hold_it(make):
    going = make.member(meta={"deletionTimestamp": "2026-01-01T00:00:00Z"})
    verdict = conditions(going, Contact("v1"), ("a", "b"))[READY]
    assert verdict.reason == "InUse"
    assert "delete a, b first" in verdict.message
    assert conditions(going, Contact("v1"), ())[READY].reason == "Deleting"


def test_a_secret_is_needed_while_any_pool_is_reached_through_it(make):
    pools = [make.prefill_pool("a", clusterName="eu"), make.prefill_pool("b", clusterName="")]
    assert users_of("eu", pools) == ("a",)
    in_use = {pool.spec.cluster_name for pool in pools}
    assert secret_is_needed("s", {"us": "s", "eu": "s"}, in_use)
    assert not secret_is_needed("s", {"us": "s"}, in_use)
    assert not secret_is_needed("t", {"eu": "s"}, in_use)


def test_the_time_of_contact_moves_in_steps_of_a_minute():
    assert contact_time(None, NOW) == "2026-01-01T12:00:00Z"
    assert contact_time("2026-01-01T11:59:01Z", NOW) == "2026-01-01T11:59:01Z"
    assert contact_time("2026-01-01T11:59:00Z", NOW) == "2026-01-01T12:00:00Z"
    assert contact_time("2026-01-01T12:00:02Z", NOW) == "2026-01-01T12:00:02Z", "answers tell whole seconds"
    assert contact_time("2026-01-01T15:00:00Z", NOW) == "2026-01-01T12:00:00Z", "a clock was wrong"


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"type": "sglang"}, "was not run against sglang yet"),
        ({"type": "tensorrt-llm"}, "was not run against tensorrt-llm yet"),
        ({"type": "vllm", "transfer": {"connector": "Mooncake"}}, "was not run against vllm with connector Mooncake"),
        ({"type": "dynamo"}, "frontends of dynamo with a mocker only"),
    ],
)
def test_a_pool_of_an_experimental_engine_says_so(make, engine, words):
    proof = engine_proof(make.decode_pool(engine={**engine, "image": "e:1"}))[ENGINE_PROVEN]
    assert (proof.status, proof.reason) == ("False", "Experimental")
    assert words in proof.message
    assert proof.message.endswith("the fields of this engine follow its documentation. Report what you see.")


@pytest.mark.parametrize(
    "engine",
    [{}, {"type": "vllm", "image": "v:1"}, {"type": "vllm", "transfer": {"connector": "Nixl"}, "image": "v:1"}],
)
def test_a_pool_of_an_engine_that_was_run_has_no_such_condition(make, engine):
    assert engine_proof(make.decode_pool(engine=engine)) == {}


def test_a_pool_whose_instances_compute_nothing_says_so(make):
    proof = engine_proof(make.decode_pool(engine={"type": "emulated", "args": ["--emulate=p"]}))[ENGINE_PROVEN]
    assert (proof.status, proof.reason) == ("False", "Emulated")


def test_a_pool_with_a_pod_of_an_untested_version_says_so_and_names_the_first(make):
    tested, gone = make.pod("a", "offload"), make.pod("b", "offload", untested="old", terminating=True)
    assert version_proof([tested, gone]) == {}
    pods = [make.pod(name, "offload", untested=UNTESTED) for name in ("d", "c")]
    proof = version_proof([tested, gone, *pods])[ENGINE_PROVEN]
    assert proof == ("False", "UntestedVersion", f"pod c: {UNTESTED}")
