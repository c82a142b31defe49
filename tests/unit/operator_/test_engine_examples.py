"""Proves that the examples of every engine fit together, use flags that the engines know, and are explained.

That an API server takes them is proven in tests/clusters/test_pool_manifests.py.
"""

import json
import re
from pathlib import Path

import pytest

from prfaas.api import DecodePool, PrefillPool, crd
from prfaas.engines import ENGINES
from prfaas_operator.plan.pod_facts import PodFacts
from prfaas_operator.plan.policy import ObservedCluster, PolicyFacts, readiness, routing_table
from prfaas_operator.plan.pool_status import Counts, role_of
from prfaas_operator.plan.roles import resolved
from prfaas_worker.options import Options

from .examples import FOLDER, ROOT, read

OF_ENGINES = [FOLDER / "rehearsal.yaml", *sorted((FOLDER / "engines").glob("*.yaml"))]
EXAMPLES = [*OF_ENGINES, *sorted(FOLDER.glob("*-pools.yaml"))]
KNOWN = json.loads((Path(__file__).parent / "engine_arguments.json").read_text())
PAGE = (ROOT / "docs" / "use" / "engines.md").read_text()
OF_OUR_WORKER = {f"--{field.replace('_', '-')}" for field in Options.__struct_fields__}
EXPERIMENTAL = {name for name, one in ENGINES.items() if one.experimental}

each_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


def test_every_engine_has_an_example():
    shown = {pool.spec.engine.record.name for path in OF_ENGINES for pool in read(path)[1]}
    assert shown == ENGINES.keys() - {"prfaas"}


def facts_of(policy, pools, make) -> PolicyFacts:
    """Return an example's objects as the operator sees them."""
    decode = {pool.metadata.name: pool for pool in pools if isinstance(pool, DecodePool)}
    prefill = resolved((pool for pool in pools if isinstance(pool, PrefillPool)), decode)
    members = {"prefill-eu": make.member("prefill-eu")}
    return PolicyFacts(policy, decode, {pool.metadata.name: pool for pool in prefill}, members)


@each_example
def test_a_policy_of_an_example_is_ready_once_its_instances_are(path, make):
    policy, pools = read(path)
    facts = facts_of(policy, pools, make)
    pods: dict[str, list[PodFacts]] = {"hub": [], "prefill-eu": []}
    for pool in pools:
        uid = facts.pods_pool_uid(pool)
        one = make.pod(f"{pool.metadata.name}-1", "", pool_uid=uid, role=role_of(pool))
        pods[pool.spec.cluster_name or "hub"].append(one)
    observed = {name: ObservedCluster(tuple(found), reachable=True) for name, found in pods.items()}
    table = routing_table(facts, observed, None)
    assert len(table.instances) == len(pools)
    assert readiness(facts, table, Counts(ready=2)).reason == "AllReady"


def test_an_example_whose_decode_pool_drafts_nothing_would_be_refused(make):
    policy, pools = read(FOLDER / "qwen3.5-397b-pools.yaml")
    offload, decode = pools
    engine = decode.spec.engine
    args = [word for word in engine.args if not word.startswith("--speculative-config")]
    spec = decode.spec.model_copy(update={"engine": engine.model_copy(update={"args": args})})
    without = decode.model_copy(update={"spec": spec})
    refused = readiness(facts_of(policy, [offload, without], make), routing_table(make.facts(), {}, None), Counts())
    assert refused.reason == "EngineMismatch"
    assert "draft layers" in refused.message


@each_example
def test_flags_of_an_example_are_flags_of_its_engine(path):
    for pool in read(path)[1]:
        flags = {word.partition("=")[0] for word in pool.spec.engine.args if word.startswith("--")}
        assert flags <= (
            OF_OUR_WORKER if pool.spec.engine.record.is_ours else set(KNOWN[pool.spec.engine.type]["flags"])
        )


@each_example
def test_an_example_is_linked_from_the_page_of_engines(path):
    assert f"(../../{path.relative_to(ROOT)})" in PAGE


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
