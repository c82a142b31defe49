"""The long loop between custom resources and the capacity model: what holds, who owns replicas, what was cut off."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from prfaas.api import PrfaaSPolicyStatus
from prfaas.capacity.comparison import compare
from prfaas.capacity.longloop import decide
from prfaas.errors import ConfigError
from prfaas_operator.errors import ConflictError
from prfaas_operator.plan import longloop, roles
from prfaas_operator.plan.installation import installation
from prfaas_operator.plan.longloop import PoolSeen
from prfaas_operator.plan_cli import plan_file
from prfaas_operator.reconcile.longloop import PolicyBalancer

NOW = datetime(2026, 5, 1, 12, 0, 0, tzinfo=UTC)
MEASURES = {"prometheusUrl": "http://p:9090"}
SPEC = {
    "metrics": MEASURES,
    "conversion": {"enabled": True},
    "prefillPools": ["offload", "swing"],
    "threshold": {"mode": "Auto"},
}
REPLICAS = {"f:spec": {"f:replicas": {}}}


def at(seconds: float) -> str:
    return (NOW + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def observed(**fields: Any) -> dict[str, Any]:
    """A summary: an instance prefills in a second a prompt and decodes an answer a second; the link carries a lot."""
    points = [
        {"tokens": n, "prefillMicros": 1_000_000 + n // 1024, "cacheBytes": 1000 * n} for n in (1024, 16_384, 131_072)
    ]
    return {
        "time": at(-5),
        "prompts": 500,
        "gatewayArrivalMilliPerSecond": 900,
        "lengthTokens": [500, 1000, 2000, 4000],
        "outputMilliTokens": 1_000_000,
        "decodeStepMicros": 10_000,
        "decodeBatch": 10,
        "links": [{"clusterName": "eu", "effectiveMbps": 10_000}],
        "pools": [{"name": name, "samples": 9, "profile": points} for name in ("decode", "offload")],
        **fields,
    }


def status(ready: int, **conditions: Any) -> dict[str, Any]:
    condition = {"type": "Ready", "status": "True", "reason": "AllReady", "observedGeneration": 3}
    ready_condition = {**condition, "lastTransitionTime": at(-900), **conditions}
    return {"replicas": ready, "readyReplicas": ready, "conditions": [ready_condition]}


@pytest.fixture
def built(make):
    """Return how to build a policy's facts: 3 instances decode and 1 prefills, beside 1 in eu, all of them settled."""

    def build(seen: dict[str, Any] | None, spec: dict[str, Any] | None = None, **plan: Any):
        policy = make.policy(**{**SPEC, **(spec or {})})
        known = {"observed": seen, **({"plan": plan} if plan else {})}
        policy = policy.model_copy(update={"status": PrfaaSPolicyStatus.model_validate(known)})
        decode = made(make.decode_pool(replicas=3), 3)
        pools = [made(make.prefill_pool(replicas=1), 1), made(swing(make), 1)]
        resolved = roles.resolved(pools, {"decode": decode})
        return make.facts(
            policy=policy, decode_pools={"decode": decode}, prefill_pools={one.metadata.name: one for one in resolved}
        )

    return build


def swing(make):
    pool = make.prefill_pool("swing", clusterName="", replicas=1)
    return pool.model_copy(update={"spec": pool.spec.model_copy(update={"share_with": "decode"})})


def made(pool, ready: int, **conditions: Any):
    return type(pool).model_validate(pool.model_dump(by_alias=True) | {"status": status(ready, **conditions)})


def decided(facts, refusals: dict[str, str] | None = None):
    found, seen = installation(facts, refusals or {}), facts.policy.status.observed
    age_seconds = longloop.refreshed(None, seen.time, NOW, 0.0).age_seconds if seen else 0.0
    return decide(longloop.rules(facts.policy), found, longloop.moment(facts, found, NOW, age_seconds))


def test_a_settled_and_measured_policy_converts(built):
    # Two prefill (one at home, one in eu) and three decode; five instances serve 2.5/s at best.
    facts = built(observed(links=[]))
    decision = decided(facts)
    assert (decision.reason, decision.changes) == ("Converting", {"swing": 2, "decode": 2})
    fields = longloop.plan_fields(installation(facts, {}), decision, at(0))
    assert fields == {"prefill": 2, "decode": 2, "replicas": {"decode": 2, "swing": 2}, "lastChangeTime": at(0)}
    assert longloop.condition(decision)[:2] == ("Unknown", "Converting")


def test_an_offload_pool_counts_while_its_link_is_alive(built):
    decision = decided(built(observed()))
    assert decision.changes == {}, "with the one in eu two prefill already"
    assert decision.now is not None
    assert decision.now.lambda_max == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize(
    ("seen", "reason", "words"),
    [
        (None, "NotMeasured", "scheduler has no summary"),
        ({"prompts": 49}, "NotMeasured", "49 prompts"),
        ({"outputMilliTokens": None}, "NotMeasured", "no answer ended"),
        ({"decodeBatch": None}, "NotMeasured", "maxBatch and stepMillis of DecodePool decode"),
        ({"pools": []}, "NotMeasured", "no profile of pool offload"),
        ({"time": at(-121)}, "MetricsStale", "121 s old"),
    ],
)
def test_what_is_not_known_or_old_holds_and_is_named(built, seen, reason, words):
    decision = decided(built(observed(**seen) if seen is not None else None))
    assert (decision.reason, decision.changes) == (reason, {})
    assert words in decision.message


@pytest.mark.parametrize("off_seconds", [-3600, 3600])
def test_a_scheduler_whose_clock_is_off_is_believed_once_its_summaries_are_seen_to_come(off_seconds):
    first = longloop.refreshed(None, at(off_seconds), NOW, 100.0)
    assert first.age_seconds == 3600
    assert longloop.refreshed(first, at(off_seconds), NOW, 130.0) == first
    second = longloop.refreshed(first, at(off_seconds + 30), NOW, 130.0)
    assert (second.age_seconds, second.seen_at_seconds) == (0.0, 130.0)


def test_a_pool_may_declare_what_a_full_instance_does_instead_of_measuring_it(built, make):
    facts = built(observed(links=[], decodeBatch=None, decodeStepMicros=None))
    pool = made(make.decode_pool(replicas=3, maxBatch=10, stepMillis=10), 3)
    assert decided(facts._replace(decode_pools={"decode": pool})).changes == {"swing": 2, "decode": 2}


def test_arrivals_are_those_of_all_gateways(built):
    found = installation(built(observed(), {"gateway": {"replicas": 3}}), {})
    assert found.load is not None
    assert found.load.arrivals_per_second == pytest.approx(2.7)


@pytest.mark.parametrize(
    "unsettled",
    [{"ready": 2}, {"ready": 3, "status": "False", "reason": "RollingOut"}, {"ready": 3, "observedGeneration": 2}],
    ids=["an instance is missing", "a rollout", "a change not looked at"],
)
def test_nothing_is_changed_while_a_pool_is_not_what_its_spec_says(built, make, unsettled):
    facts = built(observed(links=[]))
    pool = made(make.decode_pool(replicas=3), **unsettled)
    decision = decided(facts._replace(decode_pools={"decode": pool}))
    assert (decision.reason, decision.changes) == ("PoolsNotSettled", {})
    assert "DecodePool decode" in decision.message


def test_the_cooldown_counts_from_the_plan_in_the_status(built):
    plan = {"prefill": 1, "decode": 3, "lastChangeTime": at(-299)}
    assert decided(built(observed(links=[]), **plan)).reason == "Cooldown"
    assert decided(built(observed(links=[]), **(plan | {"lastChangeTime": at(-300)}))).reason == "Converting"


def live(name: str, *entries: dict[str, Any], **annotations: str) -> dict[str, Any]:
    prefixed = {f"prfaas.io/{key.replace('_', '-')}": value for key, value in annotations.items()}
    return {
        "metadata": {
            "name": name, "annotations": prefixed, "managedFields": list(entries), "creationTimestamp": at(-9000),
        }
    }  # fmt: skip


def wrote(manager: str, seconds: float = -600, **more: str) -> dict[str, Any]:
    return {"manager": manager, "time": at(seconds), "fieldsV1": REPLICAS, **more}


HPA = wrote("kube-controller-manager", subresource="scale")


@pytest.mark.parametrize(
    ("entries", "annotations", "refusal"),
    [
        ([], {}, ""),
        ([wrote("prfaas-operator")], {}, ""),
        ([wrote("kubectl")], {}, "kubectl annotate decodepools decode prfaas.io/scaled-by-policy=true"),
        ([wrote("kubectl")], {"scaled_by_policy": "true"}, ""),
        ([HPA], {"scaled_by_policy": "true"}, "an autoscaler owns"),
    ],
    ids=["no writer", "the policy did", "a person did", "a person allowed it", "an autoscaler did"],
)
def test_replicas_belong_to_their_last_writer(built, entries, annotations, refusal):
    facts = built(observed())
    seen = PoolSeen(facts.decode_pools["decode"], live("decode", *entries, **annotations))
    found = longloop.refusals(facts.policy, [seen], [facts.policy])
    assert refusal in found.get("decode", "")
    assert bool(found) == bool(refusal)


def test_of_two_policies_with_one_pool_the_older_scales_it(built, make):
    facts = built(observed())
    seen = PoolSeen(facts.decode_pools["decode"], live("decode"))
    older = make.policy("elder", **SPEC)
    older = older.model_copy(update={"metadata": older.metadata.model_copy(update={"name": "a-first"})})
    idle = make.policy("a-idle", metrics=MEASURES)
    assert longloop.refusals(facts.policy, [seen], [facts.policy, idle]) == {}
    assert "PrfaaSPolicy a-first owns" in longloop.refusals(facts.policy, [seen], [facts.policy, older])["decode"]


def test_a_change_that_was_cut_off_between_its_writes_is_finished_and_a_later_one_by_hand_is_not(built):
    plan = {"prefill": 2, "decode": 2, "replicas": {"swing": 2, "decode": 2}, "lastChangeTime": at(-60)}
    facts = built(observed(), **plan)
    decode, swinging = facts.decode_pools["decode"], facts.prefill_pools["swing"]

    by_scale = {"manager": "kubectl", "subresource": "scale", "fieldsV1": REPLICAS}  # of which no time is kept

    def left(writer: dict[str, Any]) -> dict[str, int]:
        return longloop.unfinished(
            facts.policy, [PoolSeen(decode, live("decode", writer)), PoolSeen(swinging, live("swing", by_scale))]
        )

    assert left(wrote("kubectl", -600)) == {"decode": 2}
    assert left(wrote("kubectl", -30)) == {}
    assert left(by_scale) == {}


class ContendedClient:
    """Takes statuses, and refuses new replicas: a pool is deleted when they are written."""

    def __init__(self):
        self.statuses: list[dict[str, Any]] = []

    def now(self) -> datetime:
        return NOW

    async def get(self, *_: Any) -> None:
        return None

    async def apply(self, body: dict[str, Any], *, subresource: str = "") -> dict[str, Any]:
        if subresource != "status":
            raise ConflictError("the object was changed")
        self.statuses.append(body["status"])
        return body


async def test_a_change_whose_writes_are_refused_stays_in_the_status_so_that_it_can_be_finished(built):
    facts = built(observed(links=[]))
    pools = {one.metadata.name: one.model_dump(by_alias=True) for one in facts.named_pools}
    hub = SimpleNamespace(
        client=ContendedClient(), get=lambda ref: pools[ref.name], all=lambda _: [], learn=lambda _: None
    )
    balance = await PolicyBalancer(hub).balance(
        facts, {"kind": "PrfaaSPolicy", **facts.policy.model_dump(by_alias=True)}
    )
    assert balance.conditions["Balanced"].reason == "Conflict"
    (written,) = hub.client.statuses
    assert balance.fields["plan"] == written["plan"]
    assert written["plan"]["replicas"] == {"decode": 2, "swing": 2}


def test_status_fields_are_what_the_custom_resource_declares(built):
    facts = built(observed())
    found, decision = installation(facts, {}), decided(facts)
    fields = {
        "capacity": longloop.capacity_fields(found, decision),
        "plan": longloop.plan_fields(found, decision, at(0)),
    }
    parsed = PrfaaSPolicyStatus.model_validate(fields, extra="forbid")
    assert parsed.capacity is not None
    assert (parsed.capacity.arrival_milli_per_second, parsed.capacity.decode_load_percent) == (900, 30)


def test_a_running_installation_is_planned_like_a_file(built):
    planned = plan_file(built(observed()))
    assert [(pool.name, pool.instances) for pool in planned.system.offload] == [("offload", 1)]
    (hub,) = planned.system.hub
    assert (hub.name, hub.instances, hub.min_prefill, hub.min_decode) == ("decode", 4, 0, 0)
    result = compare(planned)
    assert result.prfaas_pd is not None
    assert (result.prfaas_pd.n_prfaas, result.prfaas_pd.n_p + result.prfaas_pd.n_d) == (1, 4)


PROFILE = {"points": [{"tokens": 1024, "prefillMillis": 1000}, {"tokens": 131_072, "prefillMillis": 1001}]}
SIZES = {"tokenBytes": 1000, "stateBytes": 0}


def declare(facts, **profiles: Any):
    """Return the facts, with profiles in the specs of pools."""
    pools = {**facts.decode_pools, **facts.prefill_pools}
    changed = {
        name: type(pool).model_validate(
            pool.model_dump(by_alias=True) | {"spec": pool.spec.model_dump(by_alias=True) | {"profile": profiles[name]}}
        )
        for name, pool in pools.items()
        if name in profiles
    }
    return facts._replace(
        decode_pools={name: changed.get(name, one) for name, one in facts.decode_pools.items()},
        prefill_pools={name: changed.get(name, one) for name, one in facts.prefill_pools.items()},
    )


def test_what_pools_say_stands_in_for_what_was_not_measured(built):
    """No instance was measured, as with engines that publish no times: the policy converts as if they had been."""
    measured, silent = built(observed(links=[])), built(observed(links=[], pools=[]))
    assert decided(silent).reason == "NotMeasured"
    declared = declare(silent, decode=PROFILE | SIZES)
    assert decided(declared).changes == decided(measured).changes == {"swing": 2, "decode": 2}
    assert decided(declared).now.lambda_max == pytest.approx(decided(measured).now.lambda_max, rel=0.01)


def test_a_measured_profile_wins(built):
    slow = {"points": [{"tokens": 1024, "prefillMillis": 90_000}, {"tokens": 131_072, "prefillMillis": 99_000}]}
    facts = built(observed(links=[]))
    assert decided(declare(facts, decode=slow | SIZES)).now == decided(facts).now


def test_the_size_of_a_cache_is_the_models_and_without_any_a_members_pool_cannot_be_planned(built):
    silent = built(observed(pools=[]))
    without = declare(silent, offload=PROFILE, decode=PROFILE)
    assert decided(without).message.startswith("no profile of pool offload is known")
    assert "profile in its spec stands in" in decided(without).message
    pools = {one.name: one.profile for one in installation(declare(silent, offload=PROFILE, decode=SIZES), {}).pools}
    assert pools["offload"].token_bytes == 1000, "what the decode pool says holds for all"
    assert pools["decode"] is None, "a size without a curve is no profile"


@pytest.mark.parametrize("args", [["--max-num-seqs", "4"], ["--max-num-seqs=4"], ["--max_num_seqs=4", "--port=1"]])
def test_a_flag_bounds_how_many_requests_an_instance_decodes(built, make, args):
    engine = {"type": "vllm", "image": "vllm:1", "args": args}
    limited = made(make.decode_pool(replicas=3, engine=engine), 3)
    for seen, batch in ((10, 4), (3, 3), (None, 4)):
        facts = built(observed(links=[], decodeBatch=seen))._replace(decode_pools={"decode": limited})
        assert installation(facts, {}).load.max_batch == batch


def test_an_installation_of_vllm_pools_is_planned_by_what_they_say_and_what_vllm_counts(built, make):
    facts = declare(built(observed(pools=[])), decode=PROFILE | SIZES, offload=PROFILE)
    planned = plan_file(facts)
    assert [(pool.name, pool.instances) for pool in planned.system.offload] == [("offload", 1)]
    assert compare(planned).prfaas_pd.n_prfaas == 1


def test_an_installation_that_is_not_measured_yet_is_no_plan(built):
    with pytest.raises(ConfigError, match="scheduler has no summary"):
        plan_file(built(None))
