"""What a pool says of itself becomes the seed of the loop, under the name that its instances are measured by."""

import pytest

from prfaas.capacity.builtin import read_builtin
from prfaas.capacity.profile import cache_bytes, prefill_seconds
from prfaas_operator.errors import ProfileNotFoundError, reason_of
from prfaas_operator.plan.policy import routing_table
from prfaas_operator.plan.profile import check_profile, seeds

H200 = "qwen3.5-397b-fp8-8xh200"
POINTS = [{"tokens": n, "prefillMillis": round(300 + n * 0.04)} for n in (1024, 8192, 65_536)]


def test_points_and_sizes_are_a_curve(make):
    pool = make.prefill_pool(profile={"points": POINTS, "tokenBytes": 17_143, "stateBytes": 180_000_000})
    seed = seeds([pool])["offload"]
    for point in POINTS:
        assert prefill_seconds(seed, point["tokens"]) == pytest.approx(point["prefillMillis"] / 1000, rel=0.01)
    assert cache_bytes(seed, 1000) == 180_000_000 + 17_143_000
    assert (seed.samples, seed.max_tokens) == (3, 65_536)


def test_distinguishes_sizes_without_a_curve_from_a_curve_of_no_time(make):
    seed = seeds([make.decode_pool(profile={"tokenBytes": 5})])["decode"]
    assert (seed.samples, seed.token_bytes, seed.state_bytes) == (0, 5, 0)


def test_the_size_that_one_pool_says_is_that_of_all_which_say_none(make):
    profiles = seeds(
        [
            make.decode_pool(profile={"tokenBytes": 5, "stateBytes": 6}),
            make.prefill_pool(profile={"points": POINTS}),
            make.prefill_pool("local", profile={"points": POINTS, "tokenBytes": 7}),
            make.prefill_pool("silent"),
        ]
    )
    assert {name: (one.token_bytes, one.state_bytes) for name, one in profiles.items()} == {
        "decode": (5, 6),
        "offload": (5, 6),
        "local": (7, 0),
    }


def test_the_routing_table_carries_seeds_and_the_namespace_of_each_cluster(make):
    pools = {"offload": make.prefill_pool(profile={"points": POINTS, "tokenBytes": 7})}
    facts = make.facts(prefill_pools=pools, clusters={"eu": make.member(namespace="prefill")})
    table = routing_table(facts, {}, None)
    assert [(one.cluster, one.pool, one.profile.token_bytes) for one in table.profiles] == [("eu", "offload", 7)]
    assert [one.namespace for one in table.clusters] == ["prefill"]
    assert routing_table(make.facts(), {}, None).profiles == ()


def test_a_built_in_profile_is_the_seed_and_gives_other_pools_its_sizes(make):
    pools = [make.prefill_pool(profile={"builtin": H200}), make.decode_pool(profile={"points": POINTS})]
    wanted = read_builtin("name", H200).profile()
    found = seeds(pools)
    assert found["offload"] == wanted
    assert cache_bytes(found["decode"], 1000) == cache_bytes(wanted, 1000)
    check_profile(pools[0])


def test_an_unknown_built_in_profile_is_refused_and_leaves_other_pools_their_seeds(make):
    unknown = make.prefill_pool(profile={"builtin": f"{H200}0"})
    with pytest.raises(ProfileNotFoundError, match=f"spec.profile.builtin is .*; near it are {H200}") as refused:
        check_profile(unknown)
    assert reason_of(refused.value) == "ProfileNotFound"
    assert list(seeds([unknown, make.decode_pool(profile={"tokenBytes": 5})])) == ["decode"]
    check_profile(make.prefill_pool(profile={"points": POINTS}))
    check_profile(make.prefill_pool())
