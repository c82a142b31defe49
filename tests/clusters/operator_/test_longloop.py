"""Proves on a real API server that a policy converts and scales its pools by what its scheduler says, and then rests.

The scheduler's summary is written into the status as a scheduler writes it; the operator, its rights, the Deployment
that both pools share and the ownership of replicas are real. Any change of a policy makes the operator look at once.
"""

import json
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from tests.clusters.operator_.kubelet import Kubelet, Pods, role

pytestmark = pytest.mark.clusters

OWNED = "prfaas.io/scaled-by-policy"
# One instance prefills a prompt a second, or decodes an answer a second: of four, two should prefill.
PROFILE = [
    {"tokens": tokens, "prefillMicros": 1_000_000 + tokens // 1024, "cacheBytes": 1000 * tokens}
    for tokens in (1024, 16_384, 131_072)
]


@pytest.fixture(scope="module")
def balanced(world):
    """Pools `decode` and `swing` that share 3 + 1 instances, and a policy over them without measurements."""
    world.pods = Pods(world.hub)
    kubelet = Kubelet(Pods(world.hub))
    kubelet.start()
    world.hub.apply(
        world.pool("DecodePool", "decode", replicas=3),
        world.resource("PrefillPool", "swing", shareWith="decode", replicas=1),
        world.resource(
            "PrfaaSPolicy",
            "kimi",
            model="kimi-linear-tiny",
            decodePool="decode",
            prefillPools=["swing"],
            threshold={"mode": "Disabled"},
            metrics={"prometheusUrl": "http://192.0.2.1:9090"},
            conversion={"enabled": True, "cooldownSeconds": 0},
            gateway={"replicas": 0},
        ),
    )
    world.hub.kubectl("annotate", "dcpool/decode", "pfpool/swing", f"{OWNED}=true")
    world.hub.wait_reason("dcpool", "decode", "AllReady")
    world.hub.wait_reason("pfpool", "swing", "AllReady")
    yield world
    kubelet.stop()
    world.pods.close()


def measured(world, arrivals_milli: int, age_seconds: int = 0) -> None:
    """Write a summary as the scheduler does."""
    time = datetime.now(UTC) - timedelta(seconds=age_seconds)
    observed = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "prompts": 500,
        "gatewayArrivalMilliPerSecond": arrivals_milli,
        "lengthTokens": [500, 1000, 2000, 4000],
        "outputMilliTokens": 1_000_000,
        "decodeStepMicros": 10_000,
        "decodeBatch": 10,
        "pools": [{"name": "decode", "samples": 9, "profile": PROFILE}],
    }
    body = {
        "apiVersion": "prfaas.io/v1alpha1",
        "kind": "PrfaaSPolicy",
        "metadata": {"name": "kimi"},
        "status": {"observed": observed},
    }
    options = ("--server-side", "--subresource=status", "--field-manager=prfaas-scheduler")
    world.hub.kubectl("apply", *options, "-f", "-", stdin=json.dumps(body))


def look(world, **spec) -> int:
    """Change the policy, so that the operator looks at once; return the generation that it will have seen."""
    turn = world.hub.get("prfaas", "kimi")["spec"]["gateway"].get("drainSeconds", 60) % 100 + 1
    world.hub.patch("prfaas", "kimi", {"spec": {**spec, "gateway": {"drainSeconds": turn}}})
    return world.hub.get("prfaas", "kimi")["metadata"]["generation"]


def wait_balance(world, reason: str, generation: int) -> dict:
    """Return the condition Balanced once a look at this generation or a later one gave it this reason.

    A look that found the pools not settled is made again: by itself the next one would be a long interval away.
    """

    def reached() -> dict | None:
        nonlocal generation
        found = world.hub.condition("prfaas", "kimi", "Balanced")
        if found.get("observedGeneration", 0) < generation:
            return None
        if found["reason"] == "PoolsNotSettled" != reason:
            generation = look(world)
        return found if found["reason"] == reason else None

    found = lambda: json.dumps(world.hub.get("prfaas", "kimi").get("status"))  # noqa: E731
    return world.eventually(reached, f"Balanced has reason {reason}", found=found)


def replicas(world) -> tuple[int, int]:
    return tuple(
        world.hub.get(kind, name)["spec"]["replicas"] for kind, name in (("pfpool", "swing"), ("dcpool", "decode"))
    )


def settle(world) -> None:
    """Wait until both pools match their specs."""

    def settled() -> bool:
        pools = [world.hub.get(kind, name) for kind, name in (("pfpool", "swing"), ("dcpool", "decode"))]
        return all(
            one["spec"]["replicas"] == one["status"].get("replicas") == one["status"].get("readyReplicas")
            and one["status"]["conditions"][0]["status"] == "True"
            and one["status"]["conditions"][0]["observedGeneration"] == one["metadata"]["generation"]
            for one in pools
        )

    world.eventually(settled, "both pools are settled")


def owners(world) -> set[str]:
    return {
        world.hub.get(kind, name)["status"]["replicasOwner"]
        for kind, name in (("pfpool", "swing"), ("dcpool", "decode"))
    }


def messages(world, subject: str, reason: str) -> list[str]:
    return world.hub.messages(subject, reason)


def test_a_policy_that_measures_nothing_may_neither_convert_nor_scale(balanced):
    with pytest.raises(subprocess.CalledProcessError) as refused:
        balanced.hub.kubectl("patch", "prfaas", "kimi", "--type=merge", "-p", '{"spec": {"metrics": null}}')
    assert "conversion and scaling need measurements" in refused.value.stderr


def test_without_measurements_nothing_is_changed_and_the_policy_says_so(balanced):
    found = wait_balance(balanced, "NotMeasured", look(balanced))
    assert found["status"] == "Unknown"
    assert "scheduler has no summary" in found["message"]
    assert replicas(balanced) == (1, 3)


def test_old_measurements_change_nothing_either(balanced):
    measured(balanced, 900, age_seconds=3600)
    assert "s old" in wait_balance(balanced, "MetricsStale", look(balanced))["message"]
    assert replicas(balanced) == (1, 3)


def test_one_instance_is_converted_without_a_restart_and_then_the_policy_rests(balanced):
    before = {pod["metadata"]["name"] for pod in balanced.pods.all("prfaas.io/pool=decode")}
    assert owners(balanced) == {"User"}
    # A summary after another is a new one, although the scheduler's clock is an hour slow.
    measured(balanced, 900, age_seconds=3590)
    look(balanced)
    balanced.eventually(lambda: replicas(balanced) == (2, 2), "one instance is converted")
    settle(balanced)
    after = balanced.pods.all("prfaas.io/pool=decode")
    assert {pod["metadata"]["name"] for pod in after} == before
    assert Counter(map(role, after)) == {"prefill": 2, "decode": 2}
    balanced.eventually(lambda: owners(balanced) == {"Policy"}, "the policy owns both pools' replicas")

    measured(balanced, 900)
    for _ in range(2):
        found = wait_balance(balanced, "Balanced", look(balanced))
        assert found["status"] == "True"
        assert replicas(balanced) == (2, 2)
    (message,) = messages(balanced, "kimi", "Converting")
    assert message.startswith("converts swing 1 to 2, decode 3 to 2, since 100% more would be served with N_p 2")
    assert message.endswith("1 to 2 requests/s, 0.9 arrive")
    status = balanced.hub.get("prfaas", "kimi")["status"]
    assert (status["plan"]["prefill"], status["plan"]["decode"]) == (2, 2)
    assert status["capacity"]["maxMilliPerSecond"] == pytest.approx(2000, rel=0.01)
    described = balanced.hub.kubectl("describe", "prfaas", "kimi")
    for words in ("Max Milli Per Second", "Decode Load Percent", "Last Change Time", "converts swing 1 to 2"):
        assert words in described


def test_during_the_cooldown_a_wanted_change_is_reported_and_not_made(balanced):
    cooled = {"enabled": True, "cooldownSeconds": 3600}
    settle(balanced)
    measured(balanced, 900)
    look(balanced, conversion={**cooled, "minPrefill": 3})
    found = wait_balance(balanced, "Cooldown", balanced.hub.get("prfaas", "kimi")["metadata"]["generation"])
    assert "converts swing 2 to 3, decode 2 to 1, since the bounds ask for it" in found["message"]
    assert replicas(balanced) == (2, 2)
    wait_balance(balanced, "Balanced", look(balanced, conversion={**cooled, "minPrefill": 1}))


def planned(world, *more: str) -> subprocess.CompletedProcess[str]:
    place = ("--kubeconfig", str(world.hub.cluster.kubeconfig), "-n", world.hub.name)
    command = [sys.executable, "-m", "prfaas.cli.main", "plan", "--from-cluster", *place, *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


def test_the_plan_command_reads_what_the_installation_measures(balanced):
    result = json.loads(planned(balanced, "-o", "json").stdout)["homogeneous"]
    assert (result["n_p"], result["n_d"]) == (2, 2)
    assert result["lambda_max"] == pytest.approx(2.0, rel=0.01)
    assert "Lambda_max, 1/s" in planned(balanced).stdout
    unknown = planned(balanced, "--policy", "gemma")
    assert unknown.returncode == 1
    assert "--policy is 'gemma', but no such PrfaaSPolicy exists" in unknown.stderr


@pytest.mark.parametrize(
    ("manager", "words"), [("kubectl-scale", "a user owns"), ("kube-controller-manager", "an autoscaler owns")]
)
def test_keeps_replicas_that_another_manager_wrote(balanced, manager, words):
    balanced.hub.kubectl("annotate", "dcpool/decode", "pfpool/swing", f"{OWNED}-")
    for pool, count in (("dcpool/decode", 3), ("pfpool/swing", 1)):
        # Written twice, so that the value changes and the field changes hands.
        for wanted in (count + 1, count):
            patch = json.dumps({"spec": {"replicas": wanted}})
            options = ("--subresource=scale", "--type=merge", f"--field-manager={manager}")
            balanced.hub.kubectl("patch", pool, *options, "-p", patch)
    if words == "an autoscaler owns":  # which no annotation gives away
        balanced.hub.kubectl("annotate", "dcpool/decode", "pfpool/swing", f"{OWNED}=true")
    settle(balanced)
    measured(balanced, 900)
    generation = look(balanced, conversion={"enabled": True, "cooldownSeconds": 0})
    assert words in wait_balance(balanced, "ReplicasNotOwned", generation)["message"]
    assert replicas(balanced) == (1, 3)


def test_a_busy_policy_scales_within_bounds_one_change_at_a_time(balanced):
    for pool in ("dcpool/decode", "pfpool/swing"):
        patch = json.dumps({"spec": {"maxReplicas": 3}})
        balanced.hub.kubectl("patch", pool, "--type=merge", "-p", patch)
        balanced.hub.kubectl("annotate", "--overwrite", pool, f"{OWNED}=true")
        for wanted in (3, 2):
            balanced.hub.kubectl("scale", pool, f"--replicas={wanted}")
    settle(balanced)
    measured(balanced, 2000)
    scaling = {"mode": "Auto", "targetLoadPercent": 70, "cooldownSeconds": 0}
    look(balanced, scaling=scaling, conversion={"enabled": False})
    balanced.eventually(lambda: replicas(balanced) == (2, 3), "decode grows, and nothing else with it")
    settle(balanced)
    measured(balanced, 2000)
    look(balanced)
    balanced.eventually(lambda: replicas(balanced) == (3, 3), "prefill follows")
    settle(balanced)
    measured(balanced, 4000)
    assert "3 of at most 3" in wait_balance(balanced, "AtBounds", look(balanced))["message"]
    assert replicas(balanced) == (3, 3)
    assert messages(balanced, "decode", "Scaling")


def test_a_policy_that_stops_deciding_says_nothing_of_balance(balanced):
    look(balanced, scaling={"mode": "None"})

    def silent() -> bool:
        status = balanced.hub.get("prfaas", "kimi")["status"]
        types = {one["type"] for one in status["conditions"]}
        return "Balanced" not in types and "plan" not in status and "capacity" not in status

    balanced.eventually(silent, "the long loop's part of the status is removed")
