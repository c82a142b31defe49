"""Proves that an instance is routed as what its pod is, while its pool's spec says what the next one will be."""

from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from prfaas.names import ANNOTATION_MODEL, HUB, LABEL_ENGINE, LABEL_POLICY_UID
from prfaas_operator.controller.hub import HubView
from prfaas_operator.controller.queue import ReconcileQueue
from prfaas_operator.errors import AddressingRefusedError, reason_of
from prfaas_operator.plan import roles
from prfaas_operator.plan.certificates import CertificateMode, terms_of
from prfaas_operator.plan.pod_facts import InstanceFacts, project_pod
from prfaas_operator.plan.policy import ObservedCluster, readiness, routing_table
from prfaas_operator.plan.pool_status import Counts, check_addressing
from prfaas_operator.reconcile.certificates import Certificates
from prfaas_operator.render import pool_deployment
from prfaas_operator.render.launch import StartTerms

VLLM = {"type": "vllm", "image": "v:1"}
FOLDER = {"name": "tiny", "source": "/models/tiny"}
OTHER = {"name": "other", "source": "/models/other"}


def running(pool, member=None, **status) -> dict:
    """Return a pod of a pool as the API server would, ready."""
    template = pool_deployment.deployment(pool, member)["spec"]["template"]
    conditions = [{"type": "Ready", "status": "True"}]
    metadata = {"name": f"{pool.metadata.name}-1", **template["metadata"]}
    return {
        "metadata": metadata,
        "spec": template["spec"],
        "status": {"podIP": "10.1.0.4", "hostIP": "192.168.0.9", "conditions": conditions, **status},
    }


def table(make, old, new, pods_member=None, **changes):
    """Return the routing table of a policy whose offload pool was `old` when its pod started, and is `new` now."""
    facts = make.facts(prefill_pools={"offload": new}, **changes)
    seen = ObservedCluster((project_pod(running(old, pods_member)),), reachable=True)
    return facts, routing_table(facts, {"eu": seen, "hub": ObservedCluster((), reachable=True)}, None)


def test_a_pod_says_its_engine_model_ports_and_ranks(make):
    engine = {"engine": VLLM, "model": FOLDER, "parallelism": {"tensor": 2, "data": 4}}
    pod = project_pod(running(make.prefill_pool(**engine)))
    assert pod.instance == InstanceFacts("vllm-prfaas", "tiny", 8001, 4, 2, by_host=False, draft_layers="none")
    assert project_pod(running(make.prefill_pool())).instance == InstanceFacts("prfaas", "tiny", 8001, 1, by_host=False)
    by_host = make.member(addressing="HostIP")
    assert project_pod(running(make.prefill_pool(), by_host)).instance.by_host is True


def test_changed_draft_layers_are_those_of_the_instances_that_have_them(make):
    """A rollout takes its time: an instance of before has the layers that its own flags name."""
    drafts = VLLM | {"args": ["--speculative-config", '{"method": "mtp"}']}
    _, found = table(make, *(make.prefill_pool(engine=engine, model=FOLDER) for engine in (drafts, VLLM)))
    assert [one.draft_layers for one in found.instances] == ["mtp"]


def test_a_changed_engine_is_no_outage_for_the_instances_of_the_old_one(make):
    _, found = table(make, make.prefill_pool(), make.prefill_pool(engine=VLLM, model=FOLDER))
    assert [one.engine for one in found.instances] == ["prfaas"]
    parallelism = {"tensor": 4, "data": 2}
    _, found = table(make, make.prefill_pool(engine=VLLM, model=FOLDER, parallelism=parallelism), make.prefill_pool())
    (one,) = found.instances
    assert (one.engine, one.ranks, one.data_port, one.rank_ports) == ("vllm-prfaas", 2, 8001, 4)


def test_changed_addressing_is_no_outage_for_the_instances_of_the_old_one(make):
    by_host = make.member(addressing="HostIP")
    _, found = table(make, make.prefill_pool(), make.prefill_pool(), make.member(), clusters={"eu": by_host})
    assert [one.url for one in found.instances] == ["http://10.1.0.4:8000"]
    _, found = table(make, make.prefill_pool(), make.prefill_pool(), by_host, clusters={"eu": make.member()})
    assert [one.url for one in found.instances] == ["http://192.168.0.9:8000"]


def test_a_changed_model_leaves_the_instances_of_the_policys_model_in_the_table_and_takes_no_other(make):
    facts, found = table(make, make.prefill_pool(), make.prefill_pool(model=OTHER))
    assert [(one.pool, one.cluster) for one in found.instances] == [("offload", "eu")]
    assert [one.name for one in found.clusters] == ["eu"]
    assert readiness(facts, found, Counts(ready=1)).reason == "PrefillPoolNotFound"  # `local` is not there
    _, found = table(make, make.prefill_pool(model=OTHER), make.prefill_pool())
    assert found.instances == ()


def test_a_pod_of_an_older_operator_is_what_its_pool_says(make):
    pod = running(make.prefill_pool())
    del pod["metadata"]["labels"][LABEL_ENGINE], pod["metadata"]["annotations"][ANNOTATION_MODEL]
    del pod["spec"]["containers"][0]["ports"]
    facts = make.facts(prefill_pools={"offload": make.prefill_pool(engine=VLLM, model=FOLDER)})
    found = routing_table(facts, {"eu": ObservedCluster((project_pod(pod),), reachable=True)}, None)
    assert [(one.engine, one.data_port, one.url) for one in found.instances] == [
        ("vllm-prfaas", 8001, "http://10.1.0.4:8000")
    ]


@pytest.mark.parametrize("label", ["", "an-engine-of-tomorrow"])
def test_an_engine_that_this_version_does_not_know_breaks_no_gateway(make, label):
    pod = running(make.prefill_pool())
    pod["metadata"]["labels"][LABEL_ENGINE] = label
    found = routing_table(make.facts(), {"eu": ObservedCluster((project_pod(pod),), reachable=True)}, None)
    assert [one.engine for one in found.instances] == ["prfaas"]


def test_a_policy_with_another_model_keeps_no_instance_of_the_old_one_in_a_cluster_that_was_never_listed(make):
    pods = (make.pod("o-1", "offload"),)
    before = routing_table(make.facts(), {"eu": ObservedCluster(pods, reachable=True)}, None)
    assert before.instances
    facts = make.facts(policy=make.policy(model="other"), prefill_pools={"offload": make.prefill_pool(model=OTHER)})
    assert routing_table(facts, {}, before).instances == ()


def of_vllm(connector: str) -> dict:
    return {"engine": VLLM | {"transfer": {"connector": connector}}, "model": FOLDER}


def test_an_engine_that_announces_its_pods_address_is_refused_where_nodes_are_addressed(make):
    by_host = make.member(addressing="HostIP")
    for spec in (of_vllm("Nixl"), of_vllm("Mooncake"), {"engine": {"type": "sglang", "image": "s:1"}, "model": FOLDER}):
        with pytest.raises(AddressingRefusedError, match="MemberCluster eu has addressing HostIP") as refused:
            check_addressing(make.prefill_pool(**spec), by_host)
        assert reason_of(refused.value) == "EngineNeedsPodIP"
        check_addressing(make.prefill_pool(**spec), make.member())
    check_addressing(make.prefill_pool(**of_vllm("Prfaas")), by_host)
    check_addressing(make.prefill_pool(), by_host)


def test_instances_of_an_engine_with_one_role_are_not_shared(make):
    sharer = roles.sharer_of(make.prefill_pool("local", clusterName="", shareWith="decode"))
    refused = roles.refusal(sharer, make.decode_pool(**of_vllm("Mooncake")), [sharer])
    assert refused is not None
    assert refused.reason == "EngineHasOneRole"
    assert roles.refusal(sharer, make.decode_pool(**of_vllm("Nixl")), [sharer]) is None


OURS = {"app.kubernetes.io/managed-by": "prfaas-operator"}
GATEWAY = {**OURS, "app.kubernetes.io/component": "gateway", LABEL_POLICY_UID: "p"}


def bare_pod(labels: dict, **annotations: str):
    metadata = {"name": "g", "labels": labels, "annotations": {f"prfaas.io/{k}": v for k, v in annotations.items()}}
    return project_pod({"metadata": metadata, "spec": {}, "status": {"phase": "Running"}})


def deployed(make, *, in_tls: bool) -> dict:
    return pool_deployment.deployment(make.prefill_pool(), make.member(), StartTerms(tls=in_tls))


@pytest.mark.parametrize(
    ("gateways", "was", "tls"),
    [
        ([bare_pod(GATEWAY, scheme="https")], "plain", True),
        ([bare_pod(GATEWAY, scheme="https"), bare_pod(GATEWAY)], "plain", False),
        ([bare_pod(GATEWAY, scheme="https"), bare_pod(OURS)], "plain", True),
        ([bare_pod(GATEWAY)], "in-tls", True),
        ([bare_pod(GATEWAY)], "new", True),
    ],
    ids=["all", "one-not-yet", "a-stranger", "already-inside", "a-new-pool"],
)
async def test_no_strange_pod_takes_instances_out_of_tls(make, gateways, was, tls):
    live = None if was == "new" else deployed(make, in_tls=was == "in-tls")
    hub = HubView(SimpleNamespace(namespace="ns"), ReconcileQueue())
    hub.pods.items.update({str(number): pod for number, pod in enumerate(gateways)})
    found = Certificates(hub, SimpleNamespace(), terms_of(CertificateMode.OPERATOR, "", 2160, 8760, 180))
    found.wait_delivered = AsyncMock()
    assert await found.pool_uses_tls(HUB, AsyncMock(return_value=live)) is tls
