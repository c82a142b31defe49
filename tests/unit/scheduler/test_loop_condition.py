"""A sentence names what an engine lacks and its cure; no threshold stays silently where it is."""

import pytest

from prfaas.engines import ENGINES
from prfaas.errors import UnreachableError
from prfaas.routing.links import LinkSample
from prfaas.wire.profile import PoolProfile, Profile
from prfaas.wire.routes import Instance, Threshold
from prfaas_scheduler.conditions import LoopCondition, caches_fit, lacking
from prfaas_scheduler.measure import CacheSizes, Measurements

PROFILE = Profile(state_bytes=1, token_bytes=2, token_seconds=1e-3, samples=9)
BOTH = ("eu", "hub")


def of_engine(table, engine, **more):
    pools = (("offload", "eu", "prefill"), ("local", "hub", "prefill"), ("decode", "hub", "decode"))
    instances = tuple(
        Instance(name=f"{pool}-0", pool=pool, cluster=cluster, role=role, url="http://192.0.2.1:8000", engine=engine)
        for pool, cluster, role in pools
    )
    return table(instances=instances, prometheus_url="http://p:9090", stale_after_seconds=10, **more)


def measured(facts=("instances_sampled_at_seconds", "waiting_prefills"), **changes) -> Measurements:
    found = {(fact, cluster) for fact in facts for cluster in BOTH}
    more = {("sampled_at_seconds", "eu")} if changes.pop("counted", True) else set()
    sample = LinkSample(sampled_at_seconds=1.0, age_seconds=0.0, traffic_mbps=changes.pop("traffic_mbps", 5.0))
    defaults = {
        "samples": {"eu": sample},
        "profiles": {("eu", "offload"): PROFILE, ("hub", "local"): PROFILE},
        "cache_sizes": {("eu", "offload"): CacheSizes(1, 2)},
    }
    return Measurements(**{"hub_measured": True, "errors": (), "facts": frozenset(found | more), **defaults, **changes})


@pytest.mark.parametrize("engine", ENGINES)
def test_reports_nothing_where_everything_is_measured(table, engine):
    assert list(lacking(of_engine(table, engine), measured())) == []


@pytest.mark.parametrize(
    ("engine", "changes", "words"),
    [
        ("vllm-nixl", {"facts": ()}, ["no instance of vllm-nixl in eu is measured", "in hub is measured", "port api"]),
        ("prfaas", {"facts": ()}, ["no instance of prfaas in eu is measured", "port admin"]),
        ("prfaas", {"counted": False}, ["counted and not scraped", "port admin"]),
        ("vllm-prfaas", {"counted": False}, ["counted and not scraped", "port link-metrics"]),
        ("vllm-nixl", {"counted": False, "traffic_mbps": None}, ["utilisationQuery answers nothing", "a router"]),
        ("sglang", {"counted": False}, ["does not say what waits", "link.capacityMbps looks idle"]),
        ("tensorrt-llm", {"facts": ("instances_sampled_at_seconds",)}, ["enable_iter_perf_stats"]),
        ("vllm-nixl", {"profiles": {}, "cache_sizes": {}}, ["set profile.tokenBytes and stateBytes of pool offload"]),
        ("vllm-nixl", {"profiles": {}}, ["prefill times of pool offload", "of pool local", "set profile.points"]),
        ("sglang", {"profiles": {}}, ["SGLang counts seconds and tokens of a prefill at different moments"]),
        ("dynamo", {"profiles": {}}, ["Dynamo publishes no prefill times"]),
    ],
)
def test_each_missing_fact_has_its_cure(table, engine, changes, words):
    message = ". ".join(lacking(of_engine(table, engine), measured(**changes)))
    assert [word for word in words if word not in message] == []


def test_what_a_pool_says_is_not_missing(table):
    declared = tuple(PoolProfile(cluster=cluster, pool=pool, profile=PROFILE) for cluster, pool in measured().profiles)
    partial = measured(cache_sizes={}, prefills={})
    assert list(lacking(of_engine(table, "vllm-nixl", profiles=declared), partial)) == []


def test_a_policy_that_offloads_nothing_needs_no_link(table):
    off = Threshold(mode="Disabled", tokens=1024, min_tokens=512, max_tokens=32768)
    table_off = of_engine(table, "vllm-nixl", threshold=off)
    assert list(lacking(table_off, measured(counted=False, traffic_mbps=None))) == []


def test_the_condition_changes_only_for_what_stays(table):
    condition, wanted = LoopCondition(), of_engine(table, "vllm-prfaas")
    assert condition.state(0.0, wanted, measured()).status == "Unknown"
    assert condition.state(10.0, wanted, measured())[:2] == ("True", "Measured")
    assert condition.state(11.0, wanted, measured(counted=False)).status == "True", "one lost scrape is no lack"
    assert condition.state(12.0, wanted, measured()).status == "True"
    assert condition.state(13.0, wanted, measured(counted=False)).status == "True"
    state = condition.state(23.0, wanted, measured(counted=False))
    assert state[:2] == ("False", "LoopNotMeasured")
    assert "link-metrics" in state.message


def test_failed_queries_say_nothing_new(table):
    condition, wanted = LoopCondition(), of_engine(table, "vllm-prfaas")
    for now in (0.0, 10.0):
        condition.state(now, wanted, measured())
    blind = measured(facts=(), counted=False, errors=(UnreachableError("slow"),))
    for now in (11.0, 60.0):
        assert condition.state(now, wanted, blind)[:2] == ("True", "Measured")


def test_without_prometheus_there_is_nothing_to_measure(table):
    assert LoopCondition().state(0.0, table(), measured())[:2] == ("Unknown", "NotConfigured")


def test_refused_caches_are_a_condition_with_the_reason_until_none_is_refused(table):
    own = of_engine(table, "vllm-prfaas")
    reason = "manifest field groups[1].row_tokens is 16, this instance needs 64: ..."
    fits = caches_fit(own, measured(), None)
    assert (fits.status, fits.reason) == ("True", "NoneRefused")
    differ = caches_fit(own, measured(mismatches=(("hub", reason), ("hub", "another"))), fits)
    assert (differ.status, differ.reason) == ("False", "CachesDiffer")
    assert reason in differ.message
    assert "in hub" in differ.message
    assert differ.message.endswith("(and 1 more)")
    failed = measured(errors=(UnreachableError("no Prometheus"),))
    assert caches_fit(own, failed, differ) == differ, "nothing new is known"
    assert caches_fit(own, failed, None).status == "Unknown"
    assert caches_fit(table(prometheus_url=""), measured(), None).reason == "NotConfigured"
