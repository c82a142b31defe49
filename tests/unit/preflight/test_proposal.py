"""Proves that the proposed file is what was measured, in the words of our kinds, and that no figure is made up."""

import pytest
import yaml

from prfaas.api import DecodePool, PrefillPool, PrfaaSPolicy
from prfaas_operator.preflight import proposal
from prfaas_operator.preflight.facts import Scrape
from prfaas_operator.preflight.proposal import Target

from .conftest import H20, H200, WELL, devices, path

KINDS = {kind.kind_name: kind for kind in (DecodePool, PrefillPool, PrfaaSPolicy)}
FAST = path(mbps={"1": 9000.0, "4": 24_000.4})


def target(**changed) -> Target:
    return Target("home", "prefill-eu", None, "http://prometheus:9090", WELL)._replace(**changed)


def objects(text: str) -> dict:
    """Return the objects of a file by name, as our kinds read them: unknown fields and wrong values raise."""
    return {
        one["metadata"]["name"]: KINDS[one["kind"]].model_validate(
            {"metadata": one["metadata"], "spec": one["spec"]}, extra="forbid"
        )
        for one in yaml.safe_load_all(text)
    }


def test_without_known_accelerators_the_file_is_the_small_example_with_what_was_measured():
    text = proposal.manifests(target(), None)
    found = objects(text)
    assert "prfaas cluster join prefill-eu --hub-context home --context prefill-eu --link-mbps 944" in text
    assert "--round-trip-millis 20" in text
    assert found["offload"].spec.cluster_name == "prefill-eu"
    assert found["two-clusters"].spec.prefill_pools == ["offload", "local"]
    assert found["two-clusters"].spec.metrics.prometheus_url == "http://prometheus:9090"
    assert found["two-clusters"].spec.threshold.tokens == 1024
    assert "staleAfterSeconds" not in text


def test_the_command_is_quoted_and_the_precision_is_said():
    odd = target()._replace(hub_context="my hub", member_context="b$(id)", server="https://10.0.0.1:6443")
    assert "--hub-context 'my hub' --context 'b$(id)' --server https://10.0.0.1:6443" in proposal.join_command(odd)


def test_a_slow_scrape_is_waited_for():
    slow = target(path=path(prometheus=Scrape(interval="15s")))
    assert objects(proposal.manifests(slow, None))["two-clusters"].spec.metrics.stale_after_seconds == 90


@pytest.mark.parametrize(
    ("context", "name"),
    [("prefill-eu", "prefill-eu"), ("arn:aws:eks:eu:1:cluster/Prod_EU", "prod-eu"), ("hub", "member"), ("_", "member")],
)
def test_the_members_name_is_one_that_a_member_may_have(context, name):
    assert target(member_context=context).cluster_name == name


def test_known_accelerators_are_planned_with_the_link_that_was_measured():
    planned = proposal.expect(H20, H200, FAST)
    assert not isinstance(planned, str)
    assert planned.document["links"][0]["capacityMbps"] == 24_000.4
    assert (planned.hub.name, planned.member.name) == ("qwen3.5-397b-fp8-8xh20-141", "qwen3.5-397b-fp8-8xh200")
    assert (planned.document["hub"][0]["instances"], planned.document["offloadPools"][0]["instances"]) == (6, 2)
    assert planned.result.verdict.sentence in planned.sentence
    assert "an assumption" in planned.sentence
    found = objects(proposal.manifests(target(path=FAST), planned))
    assert found["offload"].spec.replicas == 2
    assert found["local"].spec.replicas + found["decode"].spec.replicas == 6
    assert found["offload"].spec.template.resources.limits == {"nvidia.com/gpu": 8}
    assert found["offload"].spec.profile.builtin == planned.member.name
    assert found["two-clusters"].spec.threshold.tokens == planned.result.verdict.from_tokens


def test_a_batch_that_does_not_fit_is_made_smaller():
    planned = proposal.expect(devices("NVIDIA-L40S", 4), devices("NVIDIA-L40S", 4), FAST)
    assert not isinstance(planned, str)
    assert planned.document["hub"][0]["maxBatch"] in proposal.BATCHES


@pytest.mark.parametrize(
    ("hub", "member", "says"),
    [
        ((), H200, "the hub has no accelerators"),
        (H200, None, "the member has no accelerators"),
        (devices("NVIDIA-A100-SXM4-40GB", 8, mib=40_960), H200, "the hub has NVIDIA-A100-SXM4-40GB, which the planner"),
        (H200, devices("", 8), "the member has nvidia.com/gpu without a name"),
        (devices("NVIDIA-H20", 8), devices("NVIDIA-L40S", 8), "no model has a built-in profile on both h20 and l40s"),
        (devices("NVIDIA-H200", 8), devices("NVIDIA-L40S", 0), "no model has a built-in profile"),
    ],
)
def test_what_is_missing_for_a_plan_is_said_without_a_figure(hub, member, says):
    found = proposal.expect(hub, member, FAST)
    assert isinstance(found, str)
    assert says in found
    assert "requests/s" not in found
