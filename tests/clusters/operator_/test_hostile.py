"""Proves that hostile custom resources are refused by the API server or become a condition, and harm no other.

Some two hundred are drawn from the schemas of the CRDs themselves, a good object with some fields replaced by the worst
of their type or of another type; the rest are made by hand. All meet one operator at once.
"""

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import yaml
from hypothesis import strategies as st

from prfaas_operator.clusters.client import ClusterClient
from prfaas_operator.clusters.connect import KubeContext, open_context
from prfaas_operator.clusters.kinds import BY_NAME
from prfaas_operator.errors import ClusterUnreachableError, ConflictError, InvalidObjectError

pytestmark = pytest.mark.clusters

CRDS = Path(__file__).parents[3] / "crds"
KINDS = "prfaas,pfpool,dcpool,pmc"
DRAWN = 180
JUDGED_SECONDS = 120.0
MODEL = {"name": "m", "source": "builtin:m"}
GOOD: dict[str, dict[str, Any]] = {
    "MemberCluster": {"kubeconfigSecretRef": {"name": "nobody-kubeconfig"}, "link": {"capacityMbps": 1}},
    "PrefillPool": {"model": MODEL, "replicas": 0},
    "DecodePool": {"model": MODEL, "replicas": 0},
    "PrfaaSPolicy": {"model": "m", "decodePool": "d", "threshold": {"mode": "Disabled"}, "gateway": {"replicas": 0}},
}
SCHEMAS = {
    crd["spec"]["names"]["kind"]: crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    for crd in (yaml.load(path.read_text(), yaml.CSafeLoader) for path in sorted(CRDS.glob("*.yaml")))
}
TEXTS = (
    "", " ", "..", "a" * 63, "a" * 64, "x" * 5000, "ü", "\u202emoc.elpmaxe", "a\nb", "a\x00b", "💥" * 40, "-", "--role",
    "$(POD_IP)", "$(cat /etc/passwd)", "`id`", "; rm -rf /", "' or 1=1", '"}],"x":[{"', "{{ .Values }}", "../../etc",
    "http://169.254.169.254/", "builtin:../../x", "/", "/proc/1", "hub", "kube-system", "1e999", "-1", "true", "null",
)  # fmt: skip
NUMBERS = (-1, 0, 1, 2**31 - 1, 2**31, 2**63 - 1, -(2**63), 10**30)
ANYTHING = st.one_of(
    st.sampled_from(TEXTS), st.sampled_from(NUMBERS), st.booleans(), st.none(), st.just(1.5), st.just([]), st.just({}),
    st.just([[[[]]]]), st.just({"a": {"b": {"c": [{"d": "e"}]}}}),
)  # fmt: skip


def worst(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return values of a schema's type, most of them outside of what it allows."""
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        return st.fixed_dictionaries({}, optional={name: worst(part) for name, part in schema["properties"].items()})
    if kind == "object":
        return st.dictionaries(st.sampled_from(TEXTS), worst(schema.get("additionalProperties", {})), max_size=3)
    if kind == "array":
        return st.lists(worst(schema["items"]), max_size=3)
    if "enum" in schema:
        return st.sampled_from([*schema["enum"], "Nonsense"])
    by_type = {"string": st.sampled_from(TEXTS), "integer": st.sampled_from(NUMBERS), "boolean": st.booleans()}
    return by_type.get(kind or "", ANYTHING)


@st.composite
def hostile(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a good object of some kind with a few fields of its spec replaced."""
    kind = draw(st.sampled_from(sorted(GOOD)))
    spec = copy.deepcopy(GOOD[kind])
    properties = SCHEMAS[kind]["properties"]
    for name in draw(st.lists(st.sampled_from(sorted(properties)), min_size=1, max_size=2, unique=True)):
        spec[name] = draw(worst(properties[name]) if draw(st.integers(0, 3)) else ANYTHING)
    return {"kind": kind, "spec": spec}


def drawn() -> list[dict[str, Any]]:
    """Return many different hostile objects, the same ones every time."""
    found: dict[str, dict[str, Any]] = {}

    @hypothesis.settings(
        max_examples=DRAWN * 3,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
    )
    @hypothesis.given(hostile())
    def collect(body: dict[str, Any]) -> None:
        found.setdefault(json.dumps(body, sort_keys=True), body)

    collect()
    return list(found.values())[:DRAWN]


def deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = {"x": value}
    return value


def by_hand() -> list[dict[str, Any]]:
    """Return what no schema suggests: hostile metadata, statuses, sizes and depths."""
    odd_names = ("", "A", "a_b", "ü", "a" * 300, "../x", "kubernetes", "1", "-a", "a.b", "a/b", "a%00", "hub")
    pools = [{"kind": "DecodePool", "metadata": {"name": name}} for name in odd_names]
    pools += [{"kind": "MemberCluster", "metadata": {"name": name}} for name in odd_names]
    metadata: list[dict[str, Any]] = [
        {"annotations": {"internal.prfaas.io/last-handled-configuration": "{{"}},
        {"annotations": {"internal.prfaas.io/last-handled-configuration": "[1, 2]"}},
        {"annotations": {"internal.prfaas.io/keep": "{{", "internal.prfaas.io/remove": '{"started": 5}'}},
        {"annotations": {"prfaas.io/paused": "maybe", "prfaas.io/adopt": "\u202e"}},
        {"annotations": {"a": "x" * 300_000}},
        {"labels": {"prfaas.io/pool-uid": "somebody-else", "app.kubernetes.io/managed-by": "prfaas-operator"}},
        {"labels": {"a" * 400: "b"}},
        {"finalizers": ["prfaas.io/cleanup", "prfaas.io/cleanup"]},
        {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "y", "controller": True}]},
        {"generation": -5, "resourceVersion": "", "uid": "chosen", "creationTimestamp": None},
        {"deletionTimestamp": "2000-01-01T00:00:00Z"},
        {"namespace": "kube-system"},
        {"managedFields": [{"manager": "x", "operation": "Apply", "fieldsV1": {"f:spec": {}}}]},
    ]
    pools += [{"kind": kind, "metadata": one} for one in metadata for kind in ("PrefillPool", "PrfaaSPolicy")]
    specs: list[dict[str, Any]] = [
        {"spec": deep(150)},
        {"spec": GOOD["DecodePool"] | {"template": deep(100)}},
        {"spec": GOOD["DecodePool"] | {"engine": {"args": ["x" * 1024] * 64}}},
        {"spec": GOOD["DecodePool"] | {"engine": {"args": ["x"] * 100_000}}},
        {"spec": []}, {"spec": None}, {"spec": "x"}, {},
        {"spec": GOOD["DecodePool"], "status": {"conditions": [{"type": "Ready", "status": "True"}], "replicas": -7}},
        {"spec": GOOD["DecodePool"] | {"model": {"name": "x" * 253, "source": "/" + "y" * 1000}}},
    ]  # fmt: skip
    return pools + [{"kind": kind, **one} for one in specs for kind in ("DecodePool", "PrefillPool")]


def complete(index: int, body: dict[str, Any]) -> dict[str, Any]:
    """Return a body with what an object needs to be looked at: a version, its own name, a spec."""
    kind = body["kind"]
    metadata = {"name": f"h{index}", **body.get("metadata", {})}
    spec = {"spec": GOOD[kind]} if "metadata" in body else {}
    return {"apiVersion": "prfaas.io/v1alpha1", **spec, **body, "metadata": metadata}


async def create(cluster: ClusterClient, bodies: list[dict[str, Any]]) -> int:
    """Try to create all; return how many the API server refused."""
    turn = asyncio.Semaphore(8)

    async def is_refused(body: dict[str, Any]) -> bool:
        async with turn:
            while True:
                try:
                    await cluster.create(BY_NAME[body["kind"]], body)
                except (InvalidObjectError, ConflictError) as error:
                    return isinstance(error, InvalidObjectError)
                except ClusterUnreachableError:  # a busy machine; it may have been taken all the same
                    continue
                return False

    return sum(await asyncio.gather(*map(is_refused, bodies)))


def test_hostile_objects_are_refused_or_judged_and_others_continue(world):
    world.hub.apply(world.pool("DecodePool", "bystander"))
    bodies = [complete(index, body) for index, body in enumerate([*drawn(), *by_hand()])]
    assert len(bodies) >= 200

    async def attack() -> int:
        async with open_context(KubeContext(world.hub.cluster.kubeconfig, None, world.hub.name)) as cluster:
            return await create(cluster, bodies)

    refused = asyncio.run(attack())
    assert 80 <= refused <= len(bodies) - 20, "some are refused, and some are the operator's to judge"

    def unjudged() -> list[str]:
        return [
            f"{live['kind']} {live['metadata']['name']}"
            for live in world.hub.listing(KINDS, "")
            if not any(
                condition["type"] == "Ready" and condition["reason"] != "InternalError"
                for condition in live.get("status", {}).get("conditions", [])
            )
        ]

    world.eventually(lambda: not unjudged(), "every object has a condition", JUDGED_SECONDS, unjudged)
    world.hub.scale("dcpool", "bystander", 2)
    scaled = lambda: world.hub.get("deployment", "bystander")["spec"]["replicas"] == 2  # noqa: E731
    world.eventually(scaled, "others are kept as before")
    world.hub.kubectl("delete", KINDS, "--all", "--wait=false")
    world.eventually(lambda: not world.hub.listing(KINDS, ""), "all can be deleted", JUDGED_SECONDS)
    world.eventually(lambda: not world.children(), "no child is left")
