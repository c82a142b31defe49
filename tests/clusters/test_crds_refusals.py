"""Proves that a real API server refuses malformed objects with a message that says where, why and what to do.

A line an object: a good one of the kind with one field of its spec (or of metadata) replaced, and what the user reads.
"""

import copy
from typing import Any

import pytest

from .reader import RefusedError

pytestmark = pytest.mark.clusters

GONE = object()
"""Stands for a field that is left out."""

MODEL = {"name": "m", "source": "builtin:m"}
GOOD_SPECS: dict[str, dict[str, Any]] = {
    "MemberCluster": {"kubeconfigSecretRef": {"name": "eu-kubeconfig"}, "link": {"capacityMbps": 100}},
    "PrefillPool": {"model": MODEL},
    "DecodePool": {"model": MODEL},
    "PrfaaSPolicy": {
        "model": "m",
        "decodePool": "d",
        "prefillPools": ["p"],
        "metrics": {"prometheusUrl": "http://prometheus:9090"},
    },
}
VOLUME = {"name": "v", "emptyDir": {}}
MOUNT = {"name": "v", "mountPath": "/v"}
BOTH = {"name": "v", "emptyDir": {}, "secret": {"secretName": "s"}}
POINT = {"tokens": 1024, "prefillMillis": 80}
VLLM = {"type": "vllm", "image": "x"}
SGLANG = {"type": "sglang", "image": "x"}
TOO_MANY = {f"k{i}": "v" for i in range(33)}

MEMBERS = [
    ("metadata.name", "hub", "metadata.name: Invalid value", "and not `hub`, the cluster you are in"),
    ("metadata.name", "a.b", "metadata.name: Invalid value", "must be lower-case letters, digits and '-'"),
    ("metadata.name", "a" * 64, "metadata.name: Too long: may not be more than 63 bytes", ""),
    ("kubeconfigSecretRef", GONE, "spec.kubeconfigSecretRef: Required value", ""),
    ("kubeconfigSecretRef.name", "huggingface", "spec.kubeconfigSecretRef.name", "ends with -kubeconfig"),
    ("kubeconfigSecretRef.name", "A_b-kubeconfig", "spec.kubeconfigSecretRef.name", "ends with -kubeconfig"),
    ("kubeconfigSecretRef.key", "a b", "spec.kubeconfigSecretRef.key", "must be a key of the object's data"),
    ("kubeconfig", "apiVersion: v1", 'unknown field "spec.kubeconfig"', ""),
    ("namespace", "Prefill", "spec.namespace", "must be lower-case letters, digits and '-'"),
    ("datacenter", "Frankfurt 1", "spec.datacenter", "must be letters, digits, '-', '_' and '.'"),
    ("addressing", "NodePort", 'Unsupported value: "NodePort": supported values: "PodIP", "HostIP"', ""),
    ("link", GONE, "spec.link: Required value", ""),
    ("link.capacityMbps", 0, "spec.link.capacityMbps", "should be greater than or equal to 1"),
    ("link.capacityMbps", "1Gbit", "spec.link.capacityMbps", "must be of type integer"),
    ("link.capacityMbps", 1.5, "spec.link.capacityMbps", "must be of type integer"),
    ("link.utilisationQuery", "", "spec.link.utilisationQuery", "should be at least 1 chars long"),
    ("link.utilisationQuery", "x" * 2049, "spec.link.utilisationQuery", "may not be more than 2048 bytes"),
    ("deletionDeadlineSeconds", 86401, "spec.deletionDeadlineSeconds", "should be less than or equal to 86400"),
]
POOLS = [
    ("metadata.name", "1pool", "metadata.name: Invalid value", "start with a letter"),
    ("metadata.name", "a" * 51, "metadata.name: Too long: may not be more than 50 bytes", ""),
    ("clusterName", "EU_1", "spec.clusterName", "must be the name of a MemberCluster"),
    ("model", GONE, "spec.model: Required value", ""),
    ("model.name", "a b", "spec.model.name", "start with a letter or digit"),
    ("model.source", "models/kimi", "spec.model.source", "must be an absolute directory such as /models/kimi"),
    ("model.source", "builtin:", "spec.model.source", "or builtin:NAME"),
    (
        "engine.type",
        "triton",
        'Unsupported value: "triton": supported values: "prfaas", "emulated", "vllm", "sglang"',
        "",
    ),
    ("engine", {"type": "vllm"}, "spec.engine.image: Required value", "name an image of that engine"),
    ("engine", {"type": "sglang", "image": "x"}, "spec.model.source", "run only in that worker"),
    ("engine.connector", "Nixl", 'unknown field "spec.engine.connector"', ""),
    ("engine.transfer", {"protocol": "Rdma"}, "spec.engine.transfer: Forbidden", "leave it out"),
    ("engine", SGLANG | {"transfer": {"connector": "Nixl"}}, "spec.engine.transfer: Forbidden", "belong to type vllm"),
    ("engine", SGLANG | {"transfer": {"extraConfig": {"a": "b"}}}, "spec.engine.transfer.extraConfig", "in args"),
    ("engine", VLLM | {"transfer": {"protocol": "Rdma"}}, "spec.engine.transfer.protocol", "choose connector Nixl"),
    (
        "engine",
        VLLM | {"transfer": {"extraConfig": {"tls_dir": "/x"}}},
        "extraConfig: Forbidden",
        "for connector Prfaas",
    ),
    (
        "engine",
        VLLM | {"transfer": {"connector": "Mooncake", "extraConfig": {"mooncake_protocol": "rdma"}}},
        "spec.engine.transfer.extraConfig: Forbidden",
        "stands in transfer.protocol",
    ),
    ("engine", VLLM | {"args": ["-tp", "8"]}, "spec.engine.args: Forbidden", "spec.parallelism"),
    ("engine", VLLM | {"args": ["--tensor-parallel-size=8"]}, "spec.engine.args: Forbidden", "spec.parallelism"),
    ("engine", VLLM | {"args": ["--data_parallel_size=8"]}, "spec.engine.args: Forbidden", "spec.parallelism"),
    ("engine", {"type": "dynamo", "image": "x"}, "spec.engine.type: Forbidden", "in a DecodePool only"),
    ("parallelism", {"tensor": 2}, "spec.parallelism: Forbidden", "runs on one device"),
    (
        "engine",
        {"type": "vllm", "image": "x", "args": ["--kv_transfer_config={}"]},
        "spec.engine.args: Forbidden",
        "what the operator sets for other engines",
    ),
    (
        "engine",
        {"type": "vllm", "image": "x", "args": ["--kv-transfer-config.kv_role", "kv_producer"]},
        "spec.engine.args: Forbidden",
        "what the operator sets for other engines",
    ),
    (
        "engine",
        {"type": "vllm", "image": "x", "args": ["--kv-transfer", "{}"]},
        "spec.engine.args: Forbidden",
        "what the operator sets for other engines",
    ),
    ("engine", {"type": "emulated"}, "spec.engine.args", "such as --emulate=qwen3.5-397b-fp8-8xh200"),
    ("engine.args", ["--emulate=p"], "spec.engine.args", "type emulated, and no other"),
    ("engine.image", "my image", "spec.engine.image", "without spaces"),
    ("engine.args", ["--host=0.0.0.0"], "spec.engine.args: Forbidden", "change the pool's own fields"),
    ("engine.args", ["--role", "decode"], "spec.engine.args: Forbidden", "change the pool's own fields"),
    ("engine.args", "--threads 2", "spec.engine.args", "must be of type array"),
    ("engine.args", ["x"] * 65, "spec.engine.args", "must have at most 64 items"),
    ("replicas", -1, "spec.replicas", "should be greater than or equal to 0"),
    ("replicas", "2", "spec.replicas", "must be of type integer"),
    ("profile", {}, "spec.profile.points: Required value", "give builtin, or points"),
    ("profile", {"builtin": "b", "tokenBytes": 5}, "spec.profile.builtin: Forbidden", "a built-in profile has points"),
    ("profile.builtin", "No Name", "spec.profile.builtin", "a name that `prfaas profile list` shows"),
    ("profile.points", [POINT], "spec.profile.points", "points holds one length"),
    ("profile.points", [POINT, POINT], "spec.profile.points[1]: Duplicate value", ""),
    ("profile.points", [POINT, {"tokens": 2048, "prefillMillis": 79}], "spec.profile.points", "never takes less"),
    ("profile.points", [POINT | {"tokens": 0}], "spec.profile.points[0].tokens", "greater than or equal to 1"),
    ("profile", {"stateBytes": 5}, "spec.profile.tokenBytes: Required value", "needs tokenBytes beside it"),
    ("profile.tokenBytes", 1.5, "spec.profile.tokenBytes", "must be of type integer"),
    ("drainSeconds", 3601, "spec.drainSeconds", "should be less than or equal to 3600"),
    ("rollout.maxSurge", -1, "spec.rollout.maxSurge", "must be a number of instances such as 1, or a percentage"),
    ("rollout.maxSurge", "101%", "spec.rollout.maxSurge", "up to 100% such as 25%"),
    ("rollout.maxUnavailable", "3", "spec.rollout.maxUnavailable", "must be a number of instances such as 1"),
    ("rollout", {"maxSurge": "0%"}, "spec.rollout.maxSurge", "cannot both be 0"),
    ("template.hostNetwork", True, 'unknown field "spec.template.hostNetwork"', ""),
    ("template.labels", {"prfaas.io/role": "decode"}, "spec.template.labels: Forbidden", "use another prefix"),
    ("template.labels", {"a": "b c"}, "spec.template.labels[a]", "must be a label value"),
    ("template.labels", {"a b": "c"}, "spec.template.labels", "keys must be NAME or PREFIX/NAME"),
    ("template.labels", TOO_MANY, "spec.template.labels", "must have at most 32 items"),
    ("template.nodeAffinity", [{"key": "a b", "values": ["x"]}], "nodeAffinity[0].key", "must be NAME or PREFIX/NAME"),
    ("template.nodeAffinity", [{"key": "a"}], "nodeAffinity[0].values", "In, NotIn, Gt and Lt need values"),
    ("template.nodeAffinity", [{"key": "a", "operator": "Gt", "values": ["x"]}], "nodeAffinity[0].values", "one value"),
    ("template.topologySpread", [{"topologyKey": ""}], "topologySpread[0].topologyKey", "at least 1 chars long"),
    ("template.topologySpread", [{"topologyKey": "z", "maxSkew": 0}], "maxSkew", "greater than or equal to 1"),
    ("template.schedulerName", "My Scheduler", "template.schedulerName", "must be the name of an object"),
    ("template.resources.requests", {"cpu": "lots"}, "requests[cpu]", "such as 2, 500m or 8Gi"),
    ("template.resources.requests", {"cpu": "-1"}, "requests[cpu]", "must be a quantity of zero or more"),
    ("template.resources", {"requests": {"cpu": 2}, "limits": {"cpu": "500m"}}, "requests", "raise limits"),
    ("template.resources.requests", {"nvidia.com/gpu": 1}, "resources.limits", "same value in limits as in requests"),
    ("template.connectorResources.limits", {"cpu": "x"}, "connectorResources.limits[cpu]", "must be a quantity"),
    ("template.tolerations", [{"value": "v"}], "tolerations[0].operator", "set it, or name a key"),
    ("template.tolerations", [{"key": "k", "tolerationSeconds": 3}], "tolerations[0].effect", "needs effect NoExecute"),
    ("template.tolerations", [{"operator": "Exists", "value": "v"}], "tolerations[0].value", "remove value"),
    ("template.volumes", [{"name": "v"}], "spec.template.volumes[0]", "a volume needs exactly one of"),
    ("template.volumes", [BOTH], "spec.template.volumes[0]", "a volume needs exactly one of"),
    ("template.volumes", [VOLUME | {"name": "prfaas-tmp"}], "volumes[0].name: Forbidden", "belong to the operator"),
    ("template.volumes", [VOLUME, VOLUME], 'spec.template.volumes[1]: Duplicate value: {"name":"v"}', ""),
    ("template.volumes", [{"name": "v", "hostPath": {"path": "/"}}], "unknown field", "volumes[0].hostPath"),
    ("template.volumeMounts", [MOUNT], "spec.template.volumeMounts", "must name an entry of volumes"),
    ("template", {"volumes": [VOLUME], "volumeMounts": [MOUNT | {"mountPath": "v"}]}, "mountPath", "absolute path"),
    (
        "template",
        {"volumes": [VOLUME], "volumeMounts": [MOUNT | {"mountPath": "/etc//prfaas/tls"}]},
        "mountPath: Forbidden",
        "mount elsewhere",
    ),
    ("template.annotations", {"prfaas.io/scheme": "https"}, "spec.template.annotations: Forbidden", "another prefix"),
    (
        "template.env",
        [{"name": "PYTHONPATH", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
        "env[0].valueFrom: Forbidden",
        "use value",
    ),
    ("template.env", [{"name": "A"}], "spec.template.env[0]", "exactly one of value, valueFrom"),
    ("template.env", [{"name": "A", "valueFrom": {}}], "env[0].valueFrom", "exactly one of secretKeyRef"),
    ("template.env", [{"name": "POD_IP", "value": "::1"}], "env[0].name: Forbidden", "use another name"),
    ("template.env", [{"name": "1A", "value": "1"}], "env[0].name", "must be letters, digits and '_'"),
]
FOLDER = {"name": "m", "source": "/m"}
DECODE_POOLS = [
    ("parallelism", {"tensor": 8}, "spec.parallelism: Forbidden", "runs on one device"),
    ("", {"model": FOLDER, "engine": VLLM, "parallelism": {"pipeline": 2}}, "parallelism.pipeline", "connector Nixl"),
    ("", {"model": FOLDER, "engine": VLLM, "parallelism": {"tensor": 32, "data": 2}}, "parallelism", "at most 32"),
    (
        "",
        {"model": FOLDER, "engine": {"type": "tensorrt-llm", "image": "x"}, "parallelism": {"data": 2}},
        "spec.parallelism.data: Forbidden",
        "raise replicas",
    ),
    (
        "",
        {
            "model": FOLDER,
            "engine": VLLM,
            "parallelism": {"tensor": 4},
            "template": {"resources": {"limits": {"nvidia.com/gpu": "8"}}},
        },
        "spec.template.resources.limits",
        "tensor * pipeline * data GPUs",
    ),
    ("clusterName", "eu", "spec.clusterName: Forbidden", "leave clusterName empty"),
    ("maxBatch", 8, "spec.maxBatch: Required value", "give both"),
    ("stepMillis", 30, "spec.maxBatch: Required value", "give both"),
]
POLICIES = [
    ("metadata.name", "9", "metadata.name: Invalid value", "start with a letter"),
    ("model", "", "spec.model", "start with a letter or digit"),
    ("decodePool", GONE, "spec.decodePool: Required value", ""),
    ("decodePool", "D_1", "spec.decodePool", "must be lower-case letters, digits and '-'"),
    ("prefillPools", [], "spec.prefillPools: Required value", "name one, or set threshold.mode to Disabled"),
    ("prefillPools", GONE, "spec.prefillPools: Required value", "name one, or set threshold.mode to Disabled"),
    ("prefillPools", ["p", "p"], 'spec.prefillPools[1]: Duplicate value: "p"', ""),
    ("prefillPools", [f"p{i}" for i in range(17)], "spec.prefillPools", "must have at most 16 items"),
    ("threshold.mode", "auto", 'supported values: "Auto", "Priced", "Fixed", "Disabled"', ""),
    ("threshold", {"min": 5000, "max": 4000}, "spec.threshold.min", "lower min or raise max"),
    ("threshold", {"max": 1024}, "spec.threshold.tokens", "threshold.tokens (default 2048) must lie between"),
    ("threshold.tokens", -1, "spec.threshold.tokens", "should be greater than or equal to 0"),
    ("link", {"highUtilisationPercent": 50}, "spec.link.lowUtilisationPercent", "must be below"),
    ("link.highUtilisationPercent", 101, "spec.link.highUtilisationPercent", "should be less than or equal to 100"),
    ("intervals.shortSeconds", 0, "spec.intervals.shortSeconds", "should be greater than or equal to 1"),
    ("intervals.shortSeconds", 20, "spec.metrics.staleAfterSeconds", "must be at least intervals.shortSeconds"),
    ("metrics", GONE, "spec.metrics: Required value", "set it, or use mode Fixed"),
    ("metrics", {}, "spec.metrics.prometheusUrl: Required value", ""),
    (
        "metrics.prometheusUrl",
        "prometheus:9090",
        "spec.metrics.prometheusUrl",
        "must be an http:// or https:// address",
    ),
    ("metrics.prometheusUrl", "http://u:p@prometheus:9090", "spec.metrics.prometheusUrl", "no user and no password"),
    ("metrics.prometheusUrl", "http://", "spec.metrics.prometheusUrl", "must be an http:// or https:// address"),
    ("onOffloadFailure", "Retry", 'supported values: "PrefillLocally", "Reject"', ""),
    ("datacenters", {"prefer": ["a"], "forbid": ["a"]}, "spec.datacenters.prefer", "remove it from one"),
    ("datacenters", {"prefer": ["EU-west"], "forbid": ["eu"]}, "spec.datacenters.prefer", "remove it from one"),
    ("datacenters.forbid", [""], "spec.datacenters.forbid[0]", "must be letters, digits"),
    ("gateway.apiKeysSecretRef", {}, "spec.gateway.apiKeysSecretRef.name: Required value", ""),
    ("gateway.apiKeysSecretRef.name", "prfaas-ca", "spec.gateway.apiKeysSecretRef.name", "ends with -api-keys"),
    ("gateway.image", "evil.example/exfil:1", 'unknown field "spec.gateway.image"', ""),
    ("gateway.corsOrigins", ["https://chat.example/x"], "spec.gateway.corsOrigins[0]", "must be *, or an origin"),
    ("gateway.corsOrigins", ["*.example"], "spec.gateway.corsOrigins[0]", "must be *, or an origin"),
    ("gateway.replicas", 101, "spec.gateway.replicas", "should be less than or equal to 100"),
    ("gateway.resources.limits", {"cpu": "x"}, "spec.gateway.resources.limits[cpu]", "must be a quantity"),
    ("gateway.schedulerResources.limits", {"cpu": "x"}, "schedulerResources.limits[cpu]", "must be a quantity"),
    ("autoscaling", {}, 'unknown field "spec.autoscaling"', ""),
    ("conversion.minDecode", 0, "spec.conversion.minDecode", "should be greater than or equal to 1"),
    ("scaling.mode", "Hpa", 'supported values: "None", "Auto"', ""),
    ("scaling.targetLoadPercent", 101, "spec.scaling.targetLoadPercent", "should be less than or equal to 100"),
    ("intervals.longSeconds", 9, "spec.intervals.longSeconds", "should be greater than or equal to 10"),
    ("slo.ttftMillis", 0, "spec.slo.ttftMillis", "should be greater than or equal to 1"),
]
LINES = [
    (kind, *line)
    for kind, lines in (
        ("MemberCluster", MEMBERS),
        ("PrefillPool", POOLS),
        ("DecodePool", DECODE_POOLS),
        ("PrfaaSPolicy", POLICIES),
    )
    for line in lines
]


@pytest.fixture(scope="module")
def crds(hub):
    """The hub with the committed CRDs."""
    hub.install_crds()
    return hub


def manifest(kind: str, path: str, value: Any) -> dict[str, Any]:
    """Return a good object of a kind with one field replaced."""
    body = {
        "apiVersion": "prfaas.io/v1alpha1",
        "kind": kind,
        "metadata": {"name": "a", "namespace": "default"},
        "spec": copy.deepcopy(GOOD_SPECS[kind]),
    }
    if not path:
        return body | {"spec": value}
    *parents, last = path.split(".")
    target: dict[str, Any] = body if path.startswith("metadata") else body["spec"]
    for name in parents:
        target = target.setdefault(name, {})
    if value is GONE:
        del target[last]
    else:
        target[last] = value
    return body


@pytest.mark.parametrize("kind", GOOD_SPECS)
def test_the_object_that_the_lines_change_is_good(crds, kind):
    """Without this the lines below could all be refused for a reason that they do not mean."""
    assert crds.reader.create(manifest(kind, "metadata.name", "a"), is_dry_run=True)


@pytest.mark.parametrize("kind", ["PrefillPool", "DecodePool"])
def test_a_profile_of_sixteen_points_is_good(crds, kind):
    points = [{"tokens": 1 << n, "prefillMillis": n} for n in range(1, 17)]
    for value in ({"points": points, "tokenBytes": 17_143, "stateBytes": 180_358_647}, {"tokenBytes": 0}):
        assert crds.reader.create(manifest(kind, "profile", value), is_dry_run=True)


@pytest.mark.parametrize(
    ("kind", "path", "value", "where", "advice"), LINES, ids=lambda each: "left out" if each is GONE else str(each)[:24]
)
def test_refused(crds, kind, path, value, where, advice):
    with pytest.raises(RefusedError) as refused:
        crds.reader.create(manifest(kind, path, value), is_dry_run=True)
    text = str(refused.value)
    assert any(where in line and advice in line for line in text.splitlines()), text
