"""Proves that a real API server takes by server-side apply whatever the operator renders of a pool that it has taken.

Hypothesis makes pools. Names, paths and variables come from few values, those that the operator itself uses among them,
so that they meet. A value that the server refuses in the pool itself proves nothing, and most are good.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from prfaas.api import DecodePool, MemberCluster, PrefillPool
from prfaas_operator.render import pool_deployment, protection
from prfaas_operator.render.launch import StartTerms

from .reader import RefusedError

pytestmark = pytest.mark.clusters

NAMESPACE = "default"
FOLDER_OF_EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLES_OF_OBJECTS = sorted(
    path for form in ("engines/*.yaml", "*-pools.yaml", "rehearsal.yaml") for path in FOLDER_OF_EXAMPLES.glob(form)
)
EXAMPLES = 300
LEAST_TAKEN = 60
EU = MemberCluster.model_validate(
    {
        "metadata": {"name": "eu", "namespace": NAMESPACE, "uid": "uid-eu"},
        "spec": {"kubeconfigSecretRef": {"name": "s-kubeconfig"}, "link": {"capacityMbps": 100}},
    }
)
taken: list[str] = []


def rarely(odd: Any, usual: st.SearchStrategy) -> st.SearchStrategy:
    """Return a strategy that gives an odd value, which the server may refuse, about once in forty times."""
    return st.integers(0, 39).flatmap(lambda number: odd if number == 0 else usual)


texts = st.text(max_size=12)
names = rarely(texts, st.sampled_from(["shm", "tmp", "weights", "a", "v1"]))
volume_names = rarely(st.sampled_from(["prfaas-tmp", "prfaas-shm", "prfaas-tls", "prfaas-connector"]), names)
paths = rarely(
    st.sampled_from(["/prfaas-vllm", "/etc/prfaas/tls", "/etc//prfaas/settings", "/prfaas-copy"]),
    st.sampled_from(["/tmp", "/tmp/", "/dev/shm", "/dev/shm/", "//tmp", "/models", "/x/../tmp", "/a b"]),
)
variable_names = st.sampled_from(
    ["A", "HOME", "USER", "PYTHONPATH", "UCX_TLS", "MC_FORCE_TCP", "VLLM_SSM_CONV_STATE_LAYOUT", "PRFAAS_ENGINE_CONFIG"]
)
keys = rarely(texts | st.sampled_from(["a b", "prfaas.io/role"]), st.sampled_from(["team", "x.example/tier", "A_b.c"]))
resource_names = rarely(
    texts | st.sampled_from(["gpus", "requests.cpu", "kubernetes.io/x", "hugepages-2Mi"]),
    st.sampled_from(["cpu", "memory", "ephemeral-storage", "nvidia.com/gpu", "rdma/hca"]),
)
quantities = rarely(st.sampled_from(["1.5", "500m", 0, "1e3", "0.1m"]), st.sampled_from([1, "1", 2, "8Gi"]))


def some(**fields: st.SearchStrategy) -> st.SearchStrategy:
    """Return a strategy of objects with any of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


def listed(one: st.SearchStrategy, key: str) -> st.SearchStrategy:
    return st.lists(one, max_size=3, unique_by=lambda each: each[key])


sources = st.sampled_from(
    [
        {"emptyDir": {}},
        {"emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        {"secret": {"secretName": "s"}},
        {"configMap": {"name": "c"}},
        {"persistentVolumeClaim": {"claimName": "p"}},
    ]
)
values = st.sampled_from([{"value": "x"}, {"value": ""}, {"valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}])
labels = st.dictionaries(keys, rarely(texts, st.sampled_from(["a", ""])), max_size=2)
amounts = st.dictionaries(resource_names, quantities, max_size=2)


@st.composite
def templates(draw: st.DrawFn) -> dict[str, Any]:
    """Return templates whose mounts name their volumes."""
    volumes = draw(listed(st.builds(lambda name, source: {"name": name, **source}, volume_names, sources), "name"))
    mounts = []
    if volumes:
        mount = st.fixed_dictionaries({"name": st.sampled_from([one["name"] for one in volumes]), "mountPath": paths})
        mounts = draw(listed(mount, "mountPath"))
    env = draw(listed(st.builds(lambda name, value: {"name": name, **value}, variable_names, values), "name"))
    limits = draw(amounts)
    toleration = some(
        key=keys,
        operator=st.sampled_from(["Exists", "Equal"]),
        value=rarely(texts, st.just("v")),
        effect=st.sampled_from(["NoSchedule", "NoExecute"]),
        tolerationSeconds=st.just(5),
    )
    requirement = st.fixed_dictionaries({"key": keys, "operator": st.just("In"), "values": st.just(["a"])})
    spread = st.fixed_dictionaries({"topologyKey": keys})
    rest = draw(
        some(
            labels=labels,
            annotations=labels,
            nodeSelector=labels,
            tolerations=st.lists(toleration, max_size=2),
            nodeAffinity=st.lists(requirement, max_size=2),
            topologySpread=listed(spread, "topologyKey"),
            imagePullSecrets=listed(st.fixed_dictionaries({"name": names}), "name"),
            priorityClassName=names,
            serviceAccountName=names,
            runtimeClassName=names,
            schedulerName=names,
        )
    )
    return {**rest, "volumes": volumes, "volumeMounts": mounts, "env": env, "resources": {"limits": limits}}


transfers = some(
    protocol=st.sampled_from(["Tcp", "Rdma"]),
    extraConfig=st.dictionaries(rarely(texts, st.sampled_from(["compression", "timeout"])), texts, max_size=2),
)
of_vllm = st.builds(
    lambda connector, transfer: {"connector": connector, **transfer},
    st.sampled_from(["Prfaas", "Nixl", "Mooncake"]),
    transfers,
)
computing = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"type": st.just("vllm"), "image": st.just("v:1")}, optional={"transfer": of_vllm}),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["sglang", "tensorrt-llm"]), "image": st.just("i:1")}, optional={"transfer": transfers}
    ),
    st.just({"type": "dynamo", "image": "d:1"}),
).flatmap(
    lambda engine: st.fixed_dictionaries(
        {name: st.just(value) for name, value in engine.items()}, optional={"args": st.lists(texts, max_size=2)}
    )
)
engines = computing | st.just({"type": "emulated", "args": ["--emulate=p"]})
specs = st.fixed_dictionaries(
    {"model": st.just({"name": "org/m", "source": "/models/m"}), "engine": engines, "template": templates()},
    optional={
        "parallelism": some(tensor=st.sampled_from([1, 2, 8]), data=st.sampled_from([1, 2, 16])),
        "replicas": st.integers(0, 3),
        "drainSeconds": st.sampled_from([0, 1, 3600]),
        "rollout": some(maxSurge=st.sampled_from([0, 1, "25%"]), maxUnavailable=st.sampled_from([0, "100%"])),
    },
)


@pytest.fixture(scope="module")
def crds(hub):
    hub.install_crds()
    return hub


def accepted(cluster, kind: str, spec: dict[str, Any]) -> dict[str, Any] | None:
    """Return a pool as the server would store it; None if it refuses it."""
    body = {"apiVersion": "prfaas.io/v1alpha1", "kind": kind, "metadata": {"name": "p", "namespace": NAMESPACE}}
    try:
        return cluster.reader.create({**body, "spec": spec}, is_dry_run=True)
    except RefusedError:
        return None


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(spec=specs, is_decode=st.booleans(), is_remote=st.booleans(), tls=st.booleans())
def test_an_accepted_pool_is_rendered_into_accepted_objects(crds, spec, is_decode, is_remote, tls):
    stored = accepted(crds, "DecodePool" if is_decode else "PrefillPool", spec)
    if stored is None:
        return
    taken.append(spec["engine"].get("type", "prfaas"))
    member = EU if is_remote and not is_decode else None
    pool = (DecodePool if is_decode else PrefillPool).model_validate(stored)
    deployment = pool_deployment.deployment(pool, member, StartTerms("c:1", "w:1", tls))
    rendered = [deployment, protection.pool_budget(deployment, {"metadata": {"uid": "1"}})]
    rendered += (
        [pool_deployment.shared_deployment(deployment)] if is_decode else [pool_deployment.settings(pool, member)]
    )
    for manifest in rendered:
        note(f"{manifest['kind']}: {manifest}")
        manifest["metadata"]["namespace"] = NAMESPACE
        crds.reader.apply(NAMESPACE, manifest, is_dry_run=True)


@pytest.mark.parametrize("path", EXAMPLES_OF_OBJECTS, ids=lambda path: path.stem)
def test_an_example_and_its_rendered_objects_are_accepted(crds, path):
    for body in yaml.safe_load_all(path.read_text()):
        body["metadata"]["namespace"] = NAMESPACE
        stored = crds.reader.create(body, is_dry_run=True)
        kind = {"PrefillPool": PrefillPool, "DecodePool": DecodePool}.get(body["kind"])
        if kind is None:
            continue
        pool = kind.model_validate(stored)
        if not pool.spec.model.name:  # it shares the decode pool's instances
            continue
        deployment = pool_deployment.deployment(
            pool, EU if pool.spec.cluster_name else None, StartTerms("c:1", "w:1", tls=True)
        )
        deployment["metadata"]["namespace"] = NAMESPACE
        crds.reader.apply(NAMESPACE, deployment, is_dry_run=True)


def test_enough_pools_of_every_engine_were_accepted():
    """Without this the test above could pass because the server refused every pool."""
    assert len(taken) >= LEAST_TAKEN
    assert set(taken) == {"prfaas", "emulated", "vllm", "sglang", "tensorrt-llm", "dynamo"}
