"""Proves that the examples of every engine fit together, use flags that the engines know, and are explained.

That an API server takes them is proven in tests/clusters/test_pool_manifests.py.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from prfaas.api import DecodePool, PrefillPool, PrfaaSPolicy, crd
from prfaas.engines import ENGINES
from prfaas_operator.plan.pod_facts import PodFacts
from prfaas_operator.plan.policy import ObservedCluster, PolicyFacts, readiness, routing_table
from prfaas_operator.plan.pool_status import Counts, role_of

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples" / "engines").glob("*.yaml"))
KNOWN = json.loads((Path(__file__).parent / "engine_arguments.json").read_text())
PAGE = (ROOT / "docs" / "use" / "engines.md").read_text()
EXPERIMENTAL = {name for name, one in ENGINES.items() if one.experimental}

each_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


def read(path: Path) -> tuple[PrfaaSPolicy, list[PrefillPool | DecodePool]]:
    kinds = {"PrefillPool": PrefillPool, "DecodePool": DecodePool, "PrfaaSPolicy": PrfaaSPolicy}
    bodies: list[dict[str, Any]] = list(yaml.safe_load_all(path.read_text()))
    for number, body in enumerate(bodies):
        body["metadata"]["uid"] = f"uid-{number}"
    *pools, policy = (kinds[body["kind"]].model_validate(body) for body in bodies)
    return policy, pools


def test_every_engine_has_an_example():
    shown = {pool.spec.engine.record.name for path in EXAMPLES for pool in read(path)[1]}
    assert shown == ENGINES.keys() - {"prfaas"}


@each_example
def test_a_policy_of_an_example_is_ready_once_its_instances_are(path, make):
    policy, pools = read(path)
    facts = PolicyFacts(
        policy,
        {pool.metadata.name: pool for pool in pools if isinstance(pool, DecodePool)},
        {pool.metadata.name: pool for pool in pools if isinstance(pool, PrefillPool)},
        {"prefill-eu": make.member("prefill-eu")},
    )
    pods: dict[str, list[PodFacts]] = {"hub": [], "prefill-eu": []}
    for pool in pools:
        one = make.pod(f"{pool.metadata.name}-1", "", pool_uid=pool.metadata.uid, role=role_of(pool))
        pods[pool.spec.cluster_name or "hub"].append(one)
    observed = {name: ObservedCluster(tuple(found), reachable=True) for name, found in pods.items()}
    table = routing_table(facts, observed, None)
    assert len(table.instances) == len(pools)
    assert readiness(facts, table, Counts(ready=2)).reason == "AllReady"


@each_example
def test_flags_of_an_example_are_flags_of_its_engine(path):
    for pool in read(path)[1]:
        flags = {word for word in pool.spec.engine.args if word.startswith("--")}
        assert flags <= set(KNOWN[pool.spec.engine.type]["flags"])


@each_example
def test_an_example_is_linked_from_the_page_of_engines(path):
    assert f"(../../examples/engines/{path.name})" in PAGE


def test_the_page_says_of_every_engine_what_it_does_and_what_was_run():
    heading = "| engine | hand-off | loop | integrity | encryption | resume | run for real |"
    table = PAGE[PAGE.index(heading) :].partition("\n\n")[0].splitlines()[2:]
    names = [row.split("|")[1].strip(" `") for row in table]
    assert names == list(ENGINES)
    assert all(cell.strip() for row in table for cell in row.strip("|").split("|"))
    run = [row.strip("|").split("|")[-1].strip() for row in table]
    assert {name for name, what in zip(names, run, strict=True) if what.startswith("*experimental: ")} == set(
        EXPERIMENTAL
    )
    assert not [what for what in run if what.startswith("not run")]


def test_the_schema_calls_the_same_engines_experimental():
    spec = crd.crd(PrefillPool)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    engine = spec["properties"]["engine"]["properties"]
    fields = (engine["type"], engine["transfer"]["properties"]["connector"])
    sentences = [re.findall(r"[^.]* experimental: [^.]*[.]", field["description"]) for field in fields]
    named = {word.strip(" ,.:") for found in sentences for sentence in found for word in sentence.lower().split()}
    assert {name.removeprefix("vllm-") for name in EXPERIMENTAL} <= named
    assert not named & {"prfaas", "vllm", "nixl"}


@each_example
def test_an_engine_that_loads_kimis_tokenizer_may_run_its_code(path):
    """Without it vLLM and SGLang end at once: "requires you to execute the tokenizer file"."""
    for pool in read(path)[1]:
        if "Kimi" in pool.spec.model.source and pool.spec.engine.type in {"vllm", "sglang"}:
            assert "--trust-remote-code" in pool.spec.engine.args
