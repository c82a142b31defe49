"""Proves that a policy says what crosses between its clusters unencrypted or unchecked, and what it forbids in vain."""

import pytest
from msgspec.structs import replace
from prometheus_client import REGISTRY
from tests.tables import make_table

from prfaas.wire.routes import Cluster, Instance, PoolRole
from prfaas_operator import metrics
from prfaas_operator.plan.conditions import no
from prfaas_operator.plan.transfers import conditions, pool_conditions


def instance(engine: str, scheme: str = "http", cluster: str = "eu", role: PoolRole = "prefill") -> Instance:
    url = f"{scheme}://10.0.0.1:8000"
    return Instance(name="p-1", pool="offload", cluster=cluster, role=role, url=url, engine=engine)


def reasons(*instances: Instance) -> list[tuple[str, str]]:
    found = conditions(make_table(*instances))
    return [(found[name].status, found[name].reason) for name in ("Encrypted", "IntegrityChecked")]


CASES = [
    ([], ("True", "NothingCrosses"), ("True", "NothingCrosses")),
    ([instance("vllm-nixl", cluster="hub")], ("True", "NothingCrosses"), ("True", "NothingCrosses")),
    ([instance("prfaas", "https")], ("True", "MutualTls"), ("True", "DigestPerFrame")),
    ([instance("prfaas")], ("False", "WithoutCertificate"), ("True", "DigestPerFrame")),
    ([instance("vllm-prfaas", "https")], ("True", "MutualTls"), ("True", "DigestPerFrame")),
    ([instance("vllm-prfaas")], ("False", "WithoutCertificate"), ("True", "DigestPerFrame")),
    ([instance("sglang")], ("False", "PlainTransfers"), ("True", "ChecksumPerRequest")),
    *(
        ([instance(engine)], ("False", "PlainTransfers"), ("False", "CachesNotChecked"))
        for engine in ("vllm-nixl", "vllm-mooncake", "tensorrt-llm", "dynamo")
    ),
    (
        [instance("vllm-prfaas", "https"), instance("prfaas")],
        ("False", "WithoutCertificate"),
        ("True", "DigestPerFrame"),
    ),
    ([instance("sglang"), instance("vllm-nixl")], ("False", "PlainTransfers"), ("False", "CachesNotChecked")),
]


@pytest.mark.parametrize(("instances", "encrypted", "checked"), CASES)
def test_the_worst_instance_gives_the_reason(instances, encrypted, checked):
    assert reasons(*instances) == [encrypted, checked]


@pytest.mark.parametrize(
    ("instances", "wanted"),
    [
        ([], ("True", "NothingCrosses")),
        ([instance("prfaas", "https", "hub")], ("True", "ByCertificate")),
        ([instance("prfaas", "https", "hub"), instance("prfaas", "https")], ("True", "ByCertificate")),
        ([instance("vllm-prfaas", "https", "hub"), instance("prfaas", "https")], ("False", "ApiAsksNobody")),
        ([instance("prfaas", "http", "hub")], ("False", "ApiAsksNobody")),
        ([instance("prfaas", "https"), instance("vllm-prfaas", "https")], ("False", "ApiAsksNobody")),
        ([instance("prfaas")], ("False", "ApiAsksNobody")),
        ([instance("sglang")], ("False", "ApiAsksNobody")),
    ],
)
def test_a_policy_says_whether_apis_ask_who_calls(instances, wanted):
    state = conditions(make_table(*instances))["CallersChecked"]
    assert (state.status, state.reason) == wanted


@pytest.mark.parametrize(
    ("asks_nobody", "said"),
    [
        (instance("vllm-prfaas", "https", "hub", "decode"), "DecodePool offload in hub runs vllm-prfaas"),
        (instance("vllm-nixl"), "PrefillPool offload in eu runs vllm-nixl"),
        (instance("prfaas"), "PrefillPool offload in eu has an instance without certificate"),
    ],
)
def test_the_pool_whose_api_asks_nobody_is_named(asks_nobody, said):
    state = conditions(make_table(instance("prfaas", "https", "hub"), asks_nobody))["CallersChecked"]
    assert state.message.startswith(said)


def test_an_api_that_asks_nobody_is_a_metric_of_its_policy_until_the_policy_is_gone():
    def checked() -> float | None:
        return REGISTRY.get_sample_value("prfaas_operator_policy_callers_checked", {"name": "kimi"})

    for scheme, wanted in (("http", 0), ("https", 1)):
        metrics.judged("PrfaaSPolicy", "kimi", conditions(make_table(instance("prfaas", scheme, "hub"))))
        assert checked() == wanted
    metrics.forget_object("PrfaaSPolicy", "kimi")
    assert checked() is None


def test_a_reason_names_the_pool_the_cluster_and_the_cure():
    for name in ("Encrypted", "IntegrityChecked"):
        state = conditions(make_table(instance("vllm-nixl")))[name]
        assert state.message.startswith("PrefillPool offload in eu runs vllm-nixl")
        assert "vllm with connector Prfaas" in state.message


@pytest.mark.parametrize(
    ("datacenters", "forbidden", "wanted"),
    [
        (("us-east-1", "eu"), ("US", "eu"), ("True", "AllKnown")),
        ((), ("us",), ("True", "AllKnown")),
        (("us-east-1",), ("us-eats",), ("False", "UnknownDatacenter")),
        (("us-east-1", ""), ("us",), ("False", "ClusterWithoutDatacenter")),
        (("us-east-1", ""), ("us", "ue"), ("False", "UnknownDatacenter")),
    ],
)
def test_a_policy_says_whether_it_knows_the_places_that_it_forbids(datacenters, forbidden, wanted):
    clusters = tuple(
        Cluster(name=f"m{number}", datacenter=place, capacity_mbps=1, utilisation_query="")
        for number, place in enumerate(datacenters)
    )
    state = conditions(make_table(clusters=clusters, forbid_datacenters=forbidden))["PlacesKnown"]
    assert (state.status, state.reason) == wanted
    assert "PlacesKnown" not in conditions(make_table(clusters=clusters))


def test_a_place_of_a_member_cluster_that_the_policy_does_not_use_is_known():
    cluster = Cluster(name="m", datacenter="us-east-1", capacity_mbps=1, utilisation_query="")
    table = make_table(clusters=(cluster,), forbid_datacenters=("cn",), datacenters=("cn-north", "us-east-1"))
    assert conditions(table)["PlacesKnown"].reason == "AllKnown"


def test_the_places_of_a_policy_are_a_metric_while_it_forbids_any():
    def known() -> float | None:
        return REGISTRY.get_sample_value("prfaas_operator_policy_places_known", {"name": "kimi"})

    wrong = make_table(
        clusters=(Cluster(name="m", datacenter="us", capacity_mbps=1, utilisation_query=""),),
        forbid_datacenters=("cn",),
    )
    metrics.judged("PrfaaSPolicy", "kimi", conditions(wrong))
    assert known() == 0
    metrics.judged("PrfaaSPolicy", "kimi", {"Ready": no("InternalError", "")})
    assert known() == 0, "a reconcile that failed changes nothing"
    metrics.judged("PrfaaSPolicy", "kimi", conditions(replace(wrong, forbid_datacenters=("us",))))
    assert known() == 1
    metrics.judged("PrfaaSPolicy", "kimi", conditions(replace(wrong, forbid_datacenters=())))
    assert known() is None


@pytest.mark.parametrize(
    ("schemes", "wanted"),
    [
        ((), ("True", "NothingCrosses")),
        (("https",), ("True", "MutualTls")),
        (("https", "http"), ("False", "WithoutCertificate")),
    ],
)
def test_a_pool_in_a_member_says_the_same_of_its_pods(make, schemes, wanted):
    pods = [make.pod(f"o-{number}", "offload", scheme=scheme) for number, scheme in enumerate(schemes)]
    state = pool_conditions(make.prefill_pool(), pods)["Encrypted"]
    assert (state.status, state.reason) == wanted
    assert pool_conditions(make.prefill_pool(clusterName=""), pods) == {}
