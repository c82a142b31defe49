"""Proves that a policy says what crosses between its clusters unencrypted, or unchecked."""

from collections.abc import Iterable

import pytest

from prfaas.wire.routes import Instance, LinkWatermarks, RoutingTable, Threshold
from prfaas_operator.plan.transfers import conditions


def table(instances: Iterable[Instance]) -> RoutingTable:
    return RoutingTable(
        policy="kimi",
        namespace="ns",
        generation=1,
        model="tiny",
        on_offload_failure="PrefillLocally",
        threshold=Threshold(mode="Fixed", tokens=1, min_tokens=1, max_tokens=1),
        watermarks=LinkWatermarks(high_percent=90, low_percent=60),
        short_interval_seconds=1,
        instances=tuple(instances),
    )


def instance(engine: str, scheme: str = "http", cluster: str = "eu") -> Instance:
    url = f"{scheme}://10.0.0.1:8000"
    return Instance(name="p-1", pool="offload", cluster=cluster, role="prefill", url=url, engine=engine)


def reasons(*instances: Instance) -> list[tuple[str, str]]:
    return [(state.status, state.reason) for state in conditions(table(instances)).values()]


CASES = [
    ([], ("True", "NothingCrosses"), ("True", "NothingCrosses")),
    ([instance("vllm-nixl", cluster="hub")], ("True", "NothingCrosses"), ("True", "NothingCrosses")),
    ([instance("prfaas", "https")], ("True", "MutualTls"), ("True", "DigestPerFrame")),
    ([instance("prfaas")], ("False", "WithoutCertificate"), ("True", "DigestPerFrame")),
    ([instance("vllm-prfaas", "https")], ("False", "PlainCacheEvents"), ("True", "DigestPerFrame")),
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


def test_a_reason_names_the_pool_the_cluster_and_the_cure():
    for state in conditions(table([instance("vllm-nixl")])).values():
        assert state.message.startswith("PrefillPool offload in eu runs vllm-nixl")
        assert "vllm with connector Prfaas" in state.message
