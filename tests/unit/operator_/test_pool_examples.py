"""Proves that examples with a plan are what the CRDs take, the operator renders, and the plan says.

That an API server takes them with all their rules is proven in tests/clusters/test_pool_manifests.py.
"""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from prfaas.api import DecodePool, PrefillPool
from prfaas.capacity import optimum
from prfaas.capacity.models import MODEL_CACHES
from prfaas.cli.plan import load
from prfaas.routing.drafts import draft_layers
from prfaas_operator.plan.profile import check_profile, seeds
from prfaas_operator.render import pool_deployment
from prfaas_operator.render.launch import StartTerms
from prfaas_vllm.capabilities import TESTED
from prfaas_vllm.settings import read_settings

from .examples import CHECKED, FOLDER, bodies, committed_schemas, faults, objects_in, read

POOLS = sorted(FOLDER.glob("*-pools.yaml"))
OBJECTS = [*objects_in(FOLDER), *objects_in(FOLDER / "engines")]
QWEN, KIMI = FOLDER / "qwen3.5-397b-pools.yaml", FOLDER / "kimi-linear-48b-pools.yaml"
PLAN = re.compile(r"`prfaas plan -f (examples/\S+\.yaml)` plans (\d+)% more ")
LINK = re.compile(r"prfaas cluster join (\S+) --context \S+ --link-mbps (\d+) ")
PORTS = re.compile(r"the ports 8000 to (\d+) ")
OWN_TO_A_SIDE = {"--max-num-batched-tokens", "--max-num-seqs"}

each_example = pytest.mark.parametrize("path", POOLS, ids=lambda path: path.stem)


def head_of(path: Path) -> str:
    """Return the comment on top of a file, as one line."""
    lines = path.read_text().splitlines()
    comment = lines[: next(place for place, line in enumerate(lines) if not line.startswith("#"))]
    return " ".join(line.removeprefix("#").strip() for line in comment)


def plan_of(path: Path) -> Path:
    found = PLAN.search(head_of(path))
    assert found, "the head says which plan it is, and what that gains"
    return FOLDER.parent / found[1]


def own_pools(path: Path) -> dict[str, PrefillPool | DecodePool]:
    """Return the pools that have instances of their own, by name."""
    return {pool.metadata.name: pool for pool in read(path)[1] if not getattr(pool.spec, "share_with", "")}


def rendered(pool: PrefillPool | DecodePool, make) -> dict[str, Any]:
    """Return the pod of a pool, as it is with certificates."""
    cluster = pool.spec.cluster_name
    deployment = pool_deployment.deployment(pool, make.member(cluster) if cluster else None, StartTerms(tls=True))
    return deployment["spec"]["template"]["spec"]


def flags_of(words: list[str]) -> dict[str, str]:
    """Return flags and their values, in either way to write them."""
    flags: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            assert name not in flags, f"{name} stands twice"
            flags[name] = value
        elif name:
            flags[name] = word
    return flags


@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: path.stem)
def test_the_committed_crds_take_every_object_of_an_example(path):
    schemas = committed_schemas()
    assert [fault for body in bodies(path) for fault in faults(body, schemas[body["kind"]])] == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"replicas": "1"}, ".spec.replicas is no integer"),
        ({"replicas": -1}, ".spec.replicas is beyond its maximum"),
        ({"replica": 1}, ".spec.replica is unknown"),
        ({"model": {"name": "m"}}, ".spec.model.source is missing"),
        ({"model": {"name": "a b", "source": "/m"}}, ".spec.model.name must be letters"),
        ({"engine": {"type": "vlm"}}, ".spec.engine.type is none of"),
        ({"engine": {"args": ["x" * 1025]}}, ".spec.engine.args[0] is beyond its maxLength"),
        ({"rollout": {"maxSurge": []}}, ".spec.rollout.maxSurge is neither a number nor a text"),
        ({"profile": {"points": 2 * [{"tokens": 1, "prefillMillis": 1}]}}, ".spec.profile.points names one twice"),
    ],
)
def test_what_a_crd_refuses_is_found(change, fault):
    body = copy.deepcopy(bodies(QWEN)[0])
    body["spec"] |= change
    found = list(faults(body, committed_schemas()["PrefillPool"]))
    assert len(found) == 1
    assert found[0].startswith(fault)


def test_no_limit_of_the_crds_is_overlooked():
    told = {"description", "default", "format", "x-kubernetes-list-type", "pattern"}

    def keywords(schema: dict[str, Any]) -> set[str]:
        children = [*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")]
        return set(schema).union(*(keywords(child) for child in children if isinstance(child, dict)))

    specs = [schema["properties"]["spec"] for schema in committed_schemas().values()]
    assert set().union(*map(keywords, specs)) - told <= CHECKED


@each_example
def test_the_head_says_what_the_plan_gains_over_which_link(path, make):
    head, file = head_of(path), load(plan_of(path))
    join, ports = LINK.search(head), PORTS.search(head)
    # That the plan gains so much is proven in tests/unit/capacity/test_plan_examples.py.
    assert f"\n# Plans {PLAN.search(head)[2]}% more " in plan_of(path).read_text()
    offload = own_pools(path)["offload"]
    assert join.groups() == (offload.spec.cluster_name, f"{file.system.links[0].capacity_mbps:.0f}")
    assert f"-f examples/{path.name}" in head
    (container,) = rendered(offload, make)["containers"]
    assert {one["containerPort"] for one in container["ports"]} == set(range(8000, int(ports[1]) + 1))


@each_example
def test_the_pools_have_the_instances_that_the_plan_has(path):
    file = load(plan_of(path))
    policy, pools = read(path)
    replicas = {pool.metadata.name: pool.spec.replicas for pool in pools}
    (away,), (hub,), figures = file.system.offload, file.system.hub, optimum.best(file.system, file.workload)
    assert replicas.pop("offload") == away.instances
    assert replicas.pop("decode") == figures.n_d
    assert sum(replicas.values()) == figures.n_p
    assert figures.n_p + figures.n_d == hub.instances
    threshold = policy.spec.threshold
    # Without a threshold all prompts go away, and Auto starts below most of them.
    assert threshold.tokens == figures.threshold_tokens or file.workload.quantile(0.05) > threshold.tokens
    decode = own_pools(path)["decode"]
    assert (decode.spec.max_batch, decode.spec.step_millis) == (hub.max_batch, 1000 * hub.step_seconds)
    assert flags_of(decode.spec.engine.args)["--max-num-seqs"] == str(hub.max_batch)


@each_example
def test_the_pools_say_of_themselves_what_the_plan_says(path):
    file = load(plan_of(path))
    pools = own_pools(path)
    planned = {one.name: one for one in (*file.system.offload, *file.system.hub)}
    found = seeds(pools.values())
    assert found.keys() == planned.keys()
    for name, seed in found.items():
        check_profile(pools[name])
        wanted = planned[name]
        assert seed.state_bytes == pytest.approx(wanted.profile.state_bytes, rel=1e-4)
        assert seed.token_bytes == pytest.approx(wanted.profile.token_bytes, rel=1e-4)
        assert seed.token_seconds == pytest.approx(wanted.profile.token_seconds, rel=0.02)
        spec = pools[name].spec
        assert spec.parallelism.gpus == wanted.memory.devices
        assert spec.template.node_selector == {"nvidia.com/gpu.product": f"NVIDIA-{wanted.memory.device.upper()}"}


@each_example
def test_an_instance_gets_its_gpus_and_our_connector(path, make):
    for pool in own_pools(path).values():
        pod, gpus = rendered(pool, make), pool.spec.parallelism.gpus
        (container,) = pod["containers"]
        assert (container["resources"]["limits"]["nvidia.com/gpu"], gpus) == (gpus, pool.spec.parallelism.tensor)
        flags = flags_of(container["args"])
        assert container["args"][:2] == ["serve", pool.spec.model.source]
        assert (flags["--tensor-parallel-size"], flags["--served-model-name"]) == (str(gpus), pool.spec.model.name)
        transfer = json.loads(flags["--kv-transfer-config"])
        assert (transfer["kv_connector"], transfer["kv_role"]) == ("PrfaasConnector", "kv_both")
        assert transfer["kv_load_failure_policy"] == "recompute"
        settings = read_settings(transfer["kv_connector_extra_config"])
        assert (settings.movers, settings.cluster) == (gpus, pool.spec.cluster_name or "hub")
        assert settings.tls_dir
        assert any(container["image"].partition(":v")[2].startswith(f"{version}.") for version in TESTED)
        assert [one["name"] for one in pod["initContainers"]] == ["connector", "version"]
        assert pod["nodeSelector"] == dict(pool.spec.template.node_selector)
        mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
        assert pool.spec.model.source.startswith("/models/")
        assert (mounts["/models"], mounts["/dev/shm"]) == ("models", "shm")


@each_example
def test_both_sides_get_all_flags_but_those_of_a_sides_own_work(path):
    offload, decode = (flags_of(own_pools(path)[name].spec.engine.args) for name in ("offload", "decode"))
    differing = {name for name in offload.keys() | decode.keys() if offload.get(name) != decode.get(name)}
    assert differing <= OWN_TO_A_SIDE


def test_qwens_weights_and_caches_are_in_fp8_and_its_own_layer_drafts_on_both_sides(make):
    for pool in own_pools(QWEN).values():
        (container,) = rendered(pool, make)["containers"]
        flags = flags_of(container["args"])
        assert pool.spec.model.source.endswith("-FP8")
        assert flags["--kv-cache-dtype"] == "fp8"
        assert draft_layers("--speculative-config", container["args"]) == "mtp"
        assert json.loads(flags["--speculative-config"]) == {"method": "mtp", "num_speculative_tokens": 1}
        assert "--enable-expert-parallel" in flags


def test_qwens_cache_is_of_fp8_rows_with_the_layer_that_drafts():
    """15 attention layers and one more, a byte an element; the states stay as they are."""
    known = MODEL_CACHES["qwen3.5-397b"]
    for pool in own_pools(QWEN).values():
        assert pool.spec.profile.token_bytes == (known.attention_layers + 1) * known.token_elements
        assert pool.spec.profile.state_bytes == known.state_bytes


def test_kimi_drafts_nothing_and_its_hub_shares_instances(make):
    pools = read(KIMI)[1]
    for pool in own_pools(KIMI).values():
        assert draft_layers("--speculative-config", pool.spec.engine.args) == "none"
        assert pool.spec.profile.token_bytes == MODEL_CACHES["kimi-linear-48b"].token_bytes
    assert [pool.spec.share_with for pool in pools if isinstance(pool, PrefillPool)] == ["", "decode"]
    plain = pool_deployment.deployment(own_pools(KIMI)["decode"], None, StartTerms(tls=True))
    template = pool_deployment.shared_deployment(plain)["spec"]["template"]
    assert "prfaas.io/role" not in template["metadata"]["labels"]
    assert template["spec"]["containers"] == plain["spec"]["template"]["spec"]["containers"]
