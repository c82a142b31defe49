"""The objects of an evaluated system are those of its scenario, scaled, and what an emulated worker accepts."""

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import yaml

from prfaas.api import DecodePool, PrefillPool, PrfaaSPolicy
from prfaas.capacity.builtin import Builtin
from prfaas.capacity.planfile import PlanSlo
from prfaas.capacity.profile import prefill_seconds
from prfaas.cli.plan import load
from prfaas.errors import ConfigError
from prfaas.evaluate.case import Case, arrivals_of, longest_tokens, rate_per_second, run_seconds, runs_of, scenario_of
from prfaas.evaluate.record import RunKey
from prfaas.schedule import slots_for
from prfaas.simulate.outcome import Tally
from prfaas.simulate.request_process import RequestProcess
from prfaas.simulate.scenario import POLICIES, PolicyName
from prfaas_operator.plan import ownership
from prfaas_sandbox.evaluate.objects import (
    CaseScale,
    check_live,
    instances,
    live_mbps,
    pool_objects,
    profiles_object,
    utilisation_query,
)
from prfaas_worker.cache_spec import CacheGeometry
from prfaas_worker.emulated.instance import EmulatedInstance
from prfaas_worker.emulated.profile import read_profile

ROOT = Path(__file__).parents[3]
SCALE = CaseScale(stretch=4.0, cache_scale=128)
KINDS = {"PrefillPool": PrefillPool, "DecodePool": DecodePool, "PrfaaSPolicy": PrfaaSPolicy}


def cache_mib(case: Case) -> list[int]:
    """Return the memory for the cache of each pool's instances."""
    key = RunKey("threshold", 0.5, 1)
    pools = [one for one in pool_objects(scenario_of(case, key), SCALE, 132_096) if "engine" in one["spec"]]
    flags = [dict(word.split("=", 1) for word in one["spec"]["engine"]["args"]) for one in pools]
    return [int(one["--cache-mib"]) for one in flags]


def case(path: Path = ROOT / "examples/paper.yaml", stretch: float = 4.0) -> Case:
    return Case(name=path.stem, file=load(path), requests=100, stretch=stretch, cache_scale=128)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("threshold", {"prfaas": 4, "pd-prefill": 3, "pd-decode": 5}),
        ("homogeneous", {"pd-prefill": 9, "pd-decode": 3}),
        ("naive", {"prfaas": 4, "pd-decode": 8}),
    ],
)
def test_each_system_has_the_instances_of_table_6(policy: PolicyName, expected: dict[str, int]):
    assert instances(scenario_of(case(), RunKey(policy, 0.5, 1))) == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_the_objects_are_valid_and_offload_only_where_the_system_does(policy: PolicyName):
    scenario = scenario_of(case(), RunKey(policy, 0.5, 1))
    objects = pool_objects(scenario, SCALE, 132_096)
    for one in objects:
        KINDS[one["kind"]].model_validate(one)
    offload = [one for one in objects if one["spec"].get("clusterName")]
    assert bool(offload) == (policy != "homogeneous")
    *_, made = objects
    assert made["spec"]["intervals"] == {"shortSeconds": 1}, "the scheduler itself is as slow as the instances"
    assert made["spec"]["metrics"]["staleAfterSeconds"] == 10


def test_instances_have_room_for_what_they_keep_beside_what_they_compute():
    plain = case()
    kept = {**plain.file.simulation, "cacheGib": {"hub": 512, "between-datacentres": 256}}
    keeping = msgspec.structs.replace(plain, file=msgspec.structs.replace(plain.file, simulation=kept))
    more = [with_it - without for with_it, without in zip(cache_mib(keeping), cache_mib(plain), strict=True)]
    assert len(more) == 3
    assert all(64 * 1024 // 128 - 512 <= one <= 64 * 1024 // 128 for one in more), "64 GiB of 12 instances, scaled"
    assert max(more) > 0


def test_a_profile_has_the_times_and_the_cache_of_the_case():
    made = profiles_object([scenario_of(case(), RunKey("threshold", 0.5, 1))])
    assert set(made["data"]) == {"prfaas.json", "pd.json"}
    known = msgspec.json.decode(made["data"]["pd.json"], type=Builtin)
    pool = case().file.system.hub[0]
    assert known.profile().token_seconds == pytest.approx(pool.profile.token_seconds, rel=1e-3)
    assert (known.state_bytes, known.token_bytes) == (pool.profile.state_bytes, pool.profile.token_bytes)
    assert known.step_seconds(20) == pool.step_seconds


def test_a_built_in_profile_has_the_steps_of_the_plan():
    path = ROOT / "examples/qwen3.5-397b.yaml"
    scenario = scenario_of(case(path), RunKey("threshold", 0.5, 1))
    made = profiles_object([scenario])["data"]
    for pool in scenario.system.hub:
        known = msgspec.json.decode(made[f"{pool.name}.json"], type=Builtin)
        assert known.cache_model == pool.model
        assert [known.step_seconds(batch) for batch in (1, pool.max_batch)] == [pool.step_seconds] * 2


@pytest.mark.parametrize("path", ["paper", "evaluation", "qwen3.5-397b"])
def test_instances_have_the_times_bytes_and_slots_of_the_simulated_ones(path: str, tmp_path: Path):
    scenario = scenario_of(case(ROOT / f"examples/{path}.yaml"), RunKey("threshold", 0.5, 1))
    scale = CaseScale(stretch=2.0, cache_scale=128)
    profiles = profiles_object([scenario])["data"]
    *pools, _ = pool_objects(scenario, scale, 5000)
    flags = {one["metadata"]["name"]: one["spec"]["engine"]["args"] for one in pools}
    kinds = RequestProcess(scenario, Tally())._kinds()
    for pool in (*scenario.system.offload, *scenario.system.hub):
        (file := tmp_path / "profile.json").write_text(profiles[f"{pool.name}.json"])
        instance = EmulatedInstance(read_profile(str(file)), scale.cache_scale, scale.stretch)
        geometry = CacheGeometry(instance.layers())
        assert geometry.token_bytes * 128 == pytest.approx(pool.profile.token_bytes, rel=0.01)
        assert geometry.state_bytes * 128 == pytest.approx(pool.profile.state_bytes, rel=0.01)
        for tokens in (1000, 30_000):
            expected = 2 * prefill_seconds(pool.profile, tokens)
            assert instance.chunk_seconds(0, tokens, is_first=True) == pytest.approx(expected, rel=0.01)
        for name in (one for one in flags if one in {pool.name, f"{pool.name}-prefill", f"{pool.name}-decode"}):
            assert f"--max-running={kinds[pool.name].running}" in flags[name]
            instance.check_reach(5000, kinds[pool.name].running)


def test_an_instance_has_room_for_the_caches_of_all_its_sequences():
    scenario = scenario_of(case(), RunKey("threshold", 0.5, 1))
    for cache_scale in (128, 8):
        first, *_ = pool_objects(scenario, CaseScale(stretch=4.0, cache_scale=cache_scale), 132_096)
        flags = dict(one.split("=", 1) for one in first["spec"]["engine"]["args"])
        profile = scenario.system.offload[0].profile
        caches = slots_for(int(flags["--max-running"])) * (profile.state_bytes + profile.token_bytes * 132_096)
        assert int(flags["--cache-mib"]) * 2**20 > caches / cache_scale


def test_the_live_link_has_a_whole_rate_near_the_case_s():
    assert live_mbps(case()) == 195
    for stretch in (40_000.0, 300.0):  # 0.02 and 2.6 Mbit/s
        with pytest.raises(ConfigError, match="smaller --stretch or --cache-scale"):
            check_live(case(stretch=stretch), scenario_of(case(stretch=stretch), RunKey("threshold", 0.5, 1)))


def test_a_case_without_a_link_needs_none():
    file = case().file
    system = msgspec.structs.replace(file.system, links=(), offload=())
    alone = msgspec.structs.replace(case(), file=msgspec.structs.replace(file, system=system), cache_scale=10**9)
    assert live_mbps(alone) == 1000


def test_the_window_of_the_query_is_stretched():
    assert "[20s]" in utilisation_query(SCALE)
    assert "[5s]" in utilisation_query(CaseScale(stretch=1.0, cache_scale=1))


def test_a_hub_with_two_decoding_pools_is_refused(tmp_path: Path):
    document = yaml.safe_load((ROOT / "examples/paper.yaml").read_text())
    document["hub"] = [document["hub"][0] | {"name": name, "instances": 4, "minDecode": 1} for name in ("pd", "qd")]
    del document["published"]
    (path := tmp_path / "two.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigError, match="one decode pool, and here pd, qd decode"):
        instances(scenario_of(case(path), RunKey("threshold", 0.5, 1)))


def test_loads_from_90_percent_on_are_repeated():
    wanted = runs_of(case(), ("threshold", "naive"), (0.5, 0.9), 3)
    assert sorted(wanted) == sorted({*wanted})
    assert len(wanted) == 8


def test_first_tokens_are_compared_at_the_same_rate():
    wanted = runs_of(case(), ("threshold", "homogeneous"), (0.9,), 3)
    rates = [rate_per_second(case(), key) for key in wanted if (key.policy, key.load) != ("threshold", 0.9)]
    assert rates == pytest.approx([rate_per_second(case(), RunKey("homogeneous", 0.9, 1))] * 6, rel=1e-3)
    assert len(runs_of(case(), ("threshold", "homogeneous"), (0.5,), 3)) == 2


def test_a_run_has_the_same_requests_each_time_and_others_with_another_seed():
    first, again, other = (list(arrivals_of(case(), RunKey("naive", 0.5, seed), Random)) for seed in (1, 1, 2))
    assert first == again != other
    assert len(first) == 100


def test_a_run_lasts_as_long_as_its_arrivals_at_the_stretch():
    short, long = (run_seconds(case(stretch=stretch), RunKey("naive", 0.5, 1)) for stretch in (1.0, 4.0))
    assert long > 3 * short
    assert case(stretch=1.0).digest != case(stretch=4.0).digest


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"prefixShare": 0.5}, "prefixShare is simulated only"),
        ({"links": [{"name": "between-datacentres", "roundTripMillis": 20}]}, "roundTripMillis of between-datacentres"),
        ({"failures": [{"name": "prfaas-0", "atSeconds": 9, "forSeconds": 9}]}, "failures: prfaas-0 fails in the sim"),
    ],
)
def test_what_no_live_run_does_is_refused(asked: dict[str, Any], says: str, tmp_path: Path):
    document = yaml.safe_load((ROOT / "examples/paper.yaml").read_text())
    del document["published"]
    (path := tmp_path / "case.yaml").write_text(yaml.safe_dump(document | {"simulation": asked}))
    wrong = case(path)
    with pytest.raises(ConfigError, match=f"simulation.*{says}.*leave it out"):
        check_live(wrong, scenario_of(wrong, RunKey("threshold", 0.5, 1)))
    check_live(case(), scenario_of(case(), RunKey("threshold", 0.5, 1)))


LONG_LOOP = case(ROOT / "examples/longloop.yaml")


def test_where_the_long_loop_acts_roles_are_shared_and_the_member_is_scaled_by_stretched_times():
    scenario = scenario_of(LONG_LOOP, RunKey("threshold", 0.5, 1))
    check_live(LONG_LOOP, scenario)
    objects = pool_objects(scenario, SCALE, longest_tokens(LONG_LOOP, RunKey("threshold", 0.5, 1)))
    for one in objects:
        KINDS[one["kind"]].model_validate(one)
    specs = {one["metadata"]["name"]: one["spec"] for one in objects}
    prefills = scenario.prefill_instances["pd"]

    assert specs["pd-prefill"] == {"shareWith": "pd-decode", "replicas": prefills}
    assert specs["pd-decode"]["replicas"] == 8 - prefills
    assert (specs["prfaas"]["minReplicas"], specs["prfaas"]["maxReplicas"]) == (1, 4)
    assert specs["prfaas"]["drainSeconds"] > 0 == specs["pd-decode"]["drainSeconds"]
    policy = specs["evaluation"]
    assert policy["intervals"] == {"shortSeconds": 1, "longSeconds": 30 * 4}
    assert policy["conversion"] == {"enabled": True, "minPrefill": 1, "minDecode": 1, "cooldownSeconds": 90 * 4}
    assert policy["scaling"] == {"mode": "Auto", "targetLoadPercent": 70, "cooldownSeconds": 90 * 4}
    pools = objects[:-1]
    assert all(one["metadata"]["annotations"] == {ownership.SCALED_BY_POLICY: "true"} for one in pools)


def test_a_policy_without_the_long_loop_changes_no_pool():
    objects = pool_objects(scenario_of(LONG_LOOP, RunKey("static", 0.5, 1)), SCALE, 9000)
    assert not any({"shareWith", "maxReplicas", "scaling"} & {*one["spec"]} for one in objects)
    assert not any("annotations" in one["metadata"] for one in objects)


def test_a_long_loop_without_prefills_or_with_a_promise_is_refused():
    key = RunKey("threshold", 0.5, 1)
    file = msgspec.structs.replace(LONG_LOOP.file, slo=PlanSlo(ttft_millis=5000))
    promising = msgspec.structs.replace(LONG_LOOP, file=file)
    with pytest.raises(ConfigError, match=r"slo\.ttftMillis.*leave one of them out"):
        check_live(promising, scenario_of(promising, key))
    without = msgspec.structs.replace(scenario_of(LONG_LOOP, key), prefill_instances={})
    with pytest.raises(ConfigError, match="the plan has none there"):
        check_live(LONG_LOOP, without)


def test_steps_and_the_longest_prompt_are_those_of_the_file():
    scenario = msgspec.structs.replace(scenario_of(case(), RunKey("threshold", 0.5, 1)), step_tokens=4096)
    first, *_ = pool_objects(scenario, SCALE, 132_096)
    assert {"--step-tokens=4096", "--max-context=132097"} <= {*first["spec"]["engine"]["args"]}
