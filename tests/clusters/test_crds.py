"""Proves what users do with the custom resources on a real API server: create, read, explain, scale, update, status."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from prfaas.api import KINDS, DecodePool, MemberCluster, PrefillPool, PrfaaSPolicy

pytestmark = pytest.mark.clusters

ROOT = Path(__file__).parents[2]
CLUSTER = {"kubeconfigSecretRef": {"name": "eu-kubeconfig"}, "link": {"capacityMbps": 100}}
FOLDER = {"name": "m", "source": "/models/m"}
POOL = {"model": {"name": "org/kimi-linear", "source": "builtin:kimi-linear-tiny"}}
POLICY = {"model": "org/kimi-linear", "decodePool": "d", "prefillPools": ["p"], "threshold": {"mode": "Fixed"}}
METRICS = {"prometheusUrl": "https://prometheus.example:9090/base"}
FULL_TEMPLATE = {
    "labels": {"team": "serving", "example.com/tier": "gold"},
    "annotations": {"example.com/note": "any text at all: ü, {}, \n"},
    "resources": {"requests": {"cpu": 4, "memory": "8Gi", "nvidia.com/gpu": 1}, "limits": {"nvidia.com/gpu": "1"}},
    "connectorResources": {"limits": {"cpu": "500m", "memory": "128Mi"}},
    "nodeSelector": {"kubernetes.io/arch": "amd64"},
    "tolerations": [{"operator": "Exists"}, {"key": "k", "effect": "NoExecute", "tolerationSeconds": 5}],
    "volumes": [
        {"name": "weights", "persistentVolumeClaim": {"claimName": "weights"}},
        {"name": "files", "secret": {"secretName": "s"}},
        {"name": "config", "configMap": {"name": "c"}},
        {"name": "scratch", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
    ],
    "volumeMounts": [
        {"name": "weights", "mountPath": "/models"},
        {"name": "scratch", "mountPath": "/scratch", "readOnly": False},
    ],
    "env": [
        {"name": "A", "value": ""},
        {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k.v"}}},
        {"name": "C", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
    ],
    "imagePullSecrets": [{"name": "registry"}],
    "priorityClassName": "high",
    "serviceAccountName": "weights-reader",
    "runtimeClassName": "nvidia",
    "schedulerName": "gang",
    "nodeAffinity": [
        {"key": "nvidia.com/gpu.memory", "operator": "Gt", "values": ["79000"]},
        {"key": "gpu", "operator": "Exists"},
    ],
    "topologySpread": [{"topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}],
}
GOOD = {
    "cluster": ("MemberCluster", CLUSTER),
    "cluster-by-host": ("MemberCluster", CLUSTER | {"addressing": "HostIP", "namespace": "n", "datacenter": "fra_1.a"}),
    "cluster-key": (
        "MemberCluster",
        CLUSTER | {"kubeconfigSecretRef": {"name": "eu.v1-kubeconfig", "key": "kube_config.yaml"}},
    ),
    "offload-pool": ("PrefillPool", POOL | {"clusterName": "prefill-eu"}),
    "local-pool": ("PrefillPool", POOL),
    "idle-pool": ("PrefillPool", POOL | {"replicas": 0, "drainSeconds": 0}),
    "full-pool": ("PrefillPool", POOL | {"template": FULL_TEMPLATE}),
    "rollout": ("PrefillPool", POOL | {"rollout": {"maxSurge": 0, "maxUnavailable": "100%"}}),
    "surge": ("DecodePool", POOL | {"rollout": {"maxSurge": "5%", "maxUnavailable": 10_000}}),
    "flags": ("PrefillPool", POOL | {"engine": {"args": ["--threads", "4", "--max-context=4096"]}}),
    "image": ("DecodePool", POOL | {"engine": {"image": "registry.example:5000/prfaas/worker@sha256:abc"}}),
    "vllm": (
        "DecodePool",
        {"model": FOLDER, "engine": {"type": "vllm", "image": "v:1", "args": ["--max-model-len", "9"]}},
    ),
    "mooncake": (
        "PrefillPool",
        {"model": FOLDER, "engine": {"type": "vllm", "transfer": {"connector": "Mooncake"}, "image": "v:1"}},
    ),
    "transfer": (
        "PrefillPool",
        {
            "model": FOLDER,
            "engine": {
                "type": "vllm",
                "image": "v:1",
                "transfer": {
                    "connector": "Nixl",
                    "protocol": "Rdma",
                    "failurePolicy": "Fail",
                    "extraConfig": {"enable_kv_digest": "true"},
                },
            },
        },
    ),
    "gpus": (
        "DecodePool",
        {
            "model": FOLDER,
            "engine": {"type": "vllm", "image": "v:1"},
            "parallelism": {"tensor": 4, "data": 2},
            "template": {"resources": {"limits": {"nvidia.com/gpu": "8"}}},
        },
    ),
    "tensorrt-llm": ("PrefillPool", {"model": FOLDER, "engine": {"type": "tensorrt-llm", "image": "t:1"}}),
    "dynamo": ("DecodePool", {"model": FOLDER, "engine": {"type": "dynamo", "image": "d:1"}}),
    "sglang": ("PrefillPool", {"model": FOLDER, "engine": {"type": "sglang", "image": "s:1"}}),
    "api-keys": ("PrfaaSPolicy", POLICY | {"gateway": {"apiKeysSecretRef": {"name": "gateway-api-keys"}}}),
    "origins": ("PrfaaSPolicy", POLICY | {"gateway": {"corsOrigins": ["https://chat.example", "http://[::1]:80"]}}),
    "gateway-sizes": (
        "PrfaaSPolicy",
        POLICY
        | {"gateway": {"resources": {"limits": {"memory": "4Gi"}}, "schedulerResources": {"limits": {"cpu": 1}}}},
    ),
    "decode-pool": ("DecodePool", POOL | {"clusterName": "", "template": {"resources": {"limits": {"cpu": "500m"}}}}),
    "directory": ("DecodePool", {"model": FOLDER}),
    "policy": ("PrfaaSPolicy", POLICY),
    "auto": ("PrfaaSPolicy", POLICY | {"threshold": {"tokens": 500, "min": 500, "max": 500}, "metrics": METRICS}),
    "default-threshold": (
        "PrfaaSPolicy",
        {key: POLICY[key] for key in POLICY if key != "threshold"} | {"metrics": METRICS},
    ),
    "fixed-outside-bounds": ("PrfaaSPolicy", POLICY | {"threshold": {"mode": "Fixed", "tokens": 1}}),
    "local-only": ("PrfaaSPolicy", {"model": "m", "decodePool": "d", "threshold": {"mode": "Disabled"}}),
    "datacenters": ("PrfaaSPolicy", POLICY | {"datacenters": {"prefer": ["a"], "forbid": ["b", "c"]}}),
    "no-gateway-yet": ("PrfaaSPolicy", POLICY | {"gateway": {"replicas": 0}}),
}


@pytest.fixture(scope="module")
def crds(hub):
    """The hub with the committed CRDs, and a namespace of this file as kubectl's default."""
    hub.install_crds()
    hub.kubectl("create", "namespace", "crds")
    yield hub
    hub.kubectl("delete", "namespace", "crds", "--wait=false")


def manifest(kind: str, name: str, spec: dict[str, Any]) -> str:
    body = {"apiVersion": "prfaas.io/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}
    return json.dumps(body)


def create(cluster, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    body = json.loads(manifest(kind, name, spec))
    return cluster.reader.create(body | {"metadata": {"name": name, "namespace": "crds"}})


def read(cluster, kind: str, name: str) -> dict[str, Any]:
    return cluster.reader.get("crds", kind.lower(), name)


def refusal(cluster, *arguments: str, stdin: str | None = None) -> str:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        cluster.kubectl("-n", "crds", *arguments, stdin=stdin)
    return refused.value.stderr


@pytest.mark.parametrize(("name", "kind", "spec"), [(name, *rest) for name, rest in GOOD.items()], ids=GOOD)
def test_good_object_is_accepted_and_the_model_reads_what_the_server_stored(crds, name, kind, spec):
    model = next(each for each in KINDS if each.kind_name == kind)
    stored = create(crds, kind, name, spec)
    mine = model.model_validate({"metadata": {"name": name}, "spec": spec})
    assert model.model_validate(stored).spec == mine.spec


@pytest.mark.parametrize("name", ["cluster-by-host", "full-pool", "decode-pool", "auto"])
def test_object_survives_the_way_from_model_to_server_and_back(crds, name):
    kind, spec = GOOD[name]
    model = next(each for each in KINDS if each.kind_name == kind)
    sent = model.model_validate({"metadata": {"name": f"{name}-again"}, "spec": spec})
    written = sent.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    received = model.model_validate(create(crds, kind, f"{name}-again", written))
    assert received.spec == sent.spec
    assert received.metadata.generation == 1
    assert received.metadata.uid


def test_examples_are_accepted(crds):
    documents = [body for path in (ROOT / "examples").rglob("*.yaml") for body in yaml.safe_load_all(path.read_text())]
    objects = [body for body in documents if "apiVersion" in body]  # the others are plans
    assert len(objects) >= 20
    for body in objects:
        body["metadata"]["namespace"] = "crds"
        crds.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(body))


def test_stored_object_holds_no_empty_lists_and_maps(crds):
    stored = create(crds, "PrefillPool", "tidy", POOL)["spec"]
    assert stored == {"clusterName": "", "model": POOL["model"], "replicas": 1, "shareWith": ""}


def test_update_that_leaves_optional_fields_unset_is_not_blocked(crds):
    """Every optional field stays unset in the old and the new object while something else changes."""
    for kind, spec, change in (
        ("MemberCluster", CLUSTER, {"link": {"capacityMbps": 200}}),
        ("PrefillPool", POOL, {"replicas": 2}),
        ("DecodePool", POOL, {"replicas": 2}),
        ("PrfaaSPolicy", POLICY, {"decodePool": "other"}),
    ):
        create(crds, kind, "unset", spec)
        crds.kubectl("-n", "crds", "patch", kind, "unset", "--type=merge", "-p", json.dumps({"spec": change}))
        assert read(crds, kind, "unset")["metadata"]["generation"] == 2


@pytest.mark.parametrize(("before", "after"), [("eu", "us"), ("eu", ""), ("eu", None), ("", "eu"), (None, "eu")])
def test_pool_stays_in_its_cluster(crds, before, after):
    name = f"moves-{before}-{after}".lower().replace("-none", "-unset").strip("-") + "-x"
    create(crds, "PrefillPool", name, POOL | ({} if before is None else {"clusterName": before}))
    patch = json.dumps({"spec": {"clusterName": after}})
    message = refusal(crds, "patch", "pfpool", name, "--type=merge", "-p", patch)
    assert "spec.clusterName: Forbidden: clusterName cannot change: create a pool in the other cluster" in message


def test_members_namespace_cannot_change(crds):
    create(crds, "MemberCluster", "settled", CLUSTER)
    patch = json.dumps({"spec": {"namespace": "elsewhere"}})
    message = refusal(crds, "patch", "pmc", "settled", "--type=merge", "-p", patch)
    assert "spec.namespace: Forbidden: namespace cannot change" in message
    assert "register the cluster under another name" in message


@pytest.mark.parametrize("kind", ["PrefillPool", "DecodePool"])
def test_scale_reads_and_writes_replicas(crds, kind):
    create(crds, kind, "scaled", POOL)
    crds.kubectl("-n", "crds", "scale", kind, "scaled", "--replicas=3")
    assert read(crds, kind, "scaled")["spec"]["replicas"] == 3
    status = {"replicas": 2, "selector": "prfaas.io/pool-uid=1"}
    patch_status(crds, kind, "scaled", status)
    scale = json.loads(crds.kubectl("-n", "crds", "get", kind, "scaled", "--subresource=scale", "-o", "json"))
    assert scale["spec"]["replicas"] == 3
    assert scale["status"] == status


def patch_status(cluster, kind: str, name: str, status: dict[str, Any]) -> None:
    assert cluster.reader.patch_status("crds", kind.lower(), name, status)


def condition(status: str = "True", reason: str = "AllReady", **fields: Any) -> dict[str, Any]:
    now = "2026-11-21T12:00:00Z"
    return {"type": "Ready", "status": status, "reason": reason, "lastTransitionTime": now, **fields}


def test_status_and_spec_are_written_apart(crds):
    created = create(crds, "PrfaaSPolicy", "apart", POLICY)
    assert "status" not in created
    patch_status(crds, "PrfaaSPolicy", "apart", {"thresholdTokens": 4096})
    changed = read(crds, "PrfaaSPolicy", "apart")
    assert changed["status"] == {"thresholdTokens": 4096}
    assert changed["metadata"]["generation"] == 1
    ignored = json.dumps({"status": {"thresholdTokens": 1}})
    crds.kubectl("-n", "crds", "patch", "prfaas", "apart", "--type=merge", "-p", ignored)
    assert read(crds, "PrfaaSPolicy", "apart")["status"] == {"thresholdTokens": 4096}


@pytest.mark.parametrize(
    ("status", "where"),
    [
        ({"bandwidth": "Plenty"}, 'supported values: "Scarce", "Abundant"'),
        ({"offloadedPercent": 101}, "should be less than or equal to 100"),
        ({"conditions": [condition(status="Maybe")]}, 'supported values: "True", "False", "Unknown"'),
        ({"conditions": [condition(), condition()]}, 'Duplicate value: {"type":"Ready"}'),
        ({"conditions": [condition(lastTransitionTime="noon")]}, "must be of type date-time"),
    ],
)
def test_status_is_validated_too(crds, status, where):
    crds.kubectl("-n", "crds", "apply", "--server-side", "-f", "-", stdin=manifest("PrfaaSPolicy", "watched", POLICY))
    patch = json.dumps({"status": status})
    assert where in refusal(crds, "patch", "prfaas", "watched", "--subresource=status", "--type=merge", "-p", patch)


@pytest.mark.parametrize(
    ("kind", "spec", "status", "row"),
    [
        (
            "MemberCluster",
            CLUSTER,
            {"serverVersion": "v1.34.4", "conditions": [condition(), condition() | {"type": "Reachable"}]},
            ["True", "v1.34.4", "100", "AllReady"],
        ),
        (
            "PrefillPool",
            POOL | {"clusterName": "eu", "replicas": 4},
            {"readyReplicas": 3, "conditions": [condition("False", "InstancesNotReady")]},
            ["False", "3", "4", "eu", "InstancesNotReady"],
        ),
        ("DecodePool", POOL, {"readyReplicas": 1, "conditions": [condition()]}, ["True", "1", "1", "AllReady"]),
        (
            "PrfaaSPolicy",
            POLICY,
            {
                "thresholdTokens": 2048,
                "bandwidth": "Scarce",
                "linkUtilisationPercent": 91,
                "offloadedPercent": 40,
                "readyPrefill": 2,
                "readyDecode": 1,
                "conditions": [condition()],
            },
            ["True", "2048", "91", "2", "1", "AllReady"],
        ),
    ],
)
def test_columns_answer_whether_it_works(crds, kind, spec, status, row):
    create(crds, kind, "shown", spec)
    patch_status(crds, kind, "shown", status)
    shown = crds.kubectl("-n", "crds", "get", kind, "shown", "--no-headers").split()
    assert shown[1 : 1 + len(row)] == row


@pytest.mark.parametrize("short", ["pmc", "pfpool", "dcpool", "prfaas"])
def test_short_names(crds, short):
    crds.kubectl("-n", "crds", "get", short)


def test_category_lists_all_kinds(crds):
    listed = json.loads(crds.kubectl("-n", "crds", "get", "prfaas-all", "-o", "json"))["items"]
    assert {item["kind"] for item in listed} == {kind.kind_name for kind in KINDS}


@pytest.mark.parametrize("kind", [MemberCluster, PrefillPool, DecodePool, PrfaaSPolicy], ids=lambda kind: kind.plural)
def test_explain_describes_every_kind(crds, kind):
    explained = crds.kubectl("explain", f"{kind.plural}.spec", "--recursive")
    assert "<empty>" not in explained
    assert kind.model_fields["spec"].annotation.__doc__.split()[0] in explained


def test_explain_says_what_a_field_means(crds):
    assert "Declared capacity toward the hub in Mbit/s." in crds.kubectl("explain", "pmc.spec.link.capacityMbps")


def test_unknown_field_without_strictness_is_dropped(crds):
    """An older operator's client keeps working against a newer object; kubectl itself asks for strictness."""
    body = manifest("PrefillPool", "lenient", POOL | {"scaling": {"mode": "Auto"}})
    crds.kubectl("-n", "crds", "create", "--validate=ignore", "-f", "-", stdin=body)
    assert "scaling" not in read(crds, "PrefillPool", "lenient")["spec"]
