"""Proves that manifests say what operator, workers and gateway agreed on, and nothing that owners may not say."""

import json

import pytest

from prfaas_operator.render import access, gateway, pool, protection, service
from prfaas_operator.render.common import PART_OF

OWN_LABELS = {
    **PART_OF,
    "app.kubernetes.io/component": "worker",
    "prfaas.io/pool": "offload",
    "prfaas.io/pool-uid": "uid-offload",
    "prfaas.io/role": "prefill",
    "prfaas.io/cluster": "eu",
    "prfaas.io/cluster-uid": "uid-eu",
}


def pod_of(manifest: dict) -> dict:
    return manifest["spec"]["template"]["spec"]


def worker_of(manifest: dict) -> dict:
    return pod_of(manifest)["containers"][0]


def flags_of(container: dict) -> dict[str, str]:
    words = container["args"]
    return dict(zip(words[::2], words[1::2], strict=True))


def test_a_worker_is_started_with_the_flags_of_its_pool(make):
    worker = worker_of(pool.deployment(make.prefill_pool(drainSeconds=45), make.member()))
    assert worker["command"] == ["prfaas-worker"]
    assert flags_of(worker) == {
        "--model-source": "builtin:tiny",
        "--model-name": "tiny",
        "--host": "$(POD_IP)",
        "--api-port": "8000",
        "--data-port": "8001",
        "--instance": "$(POD_NAME)",
        "--cluster": "eu",
        "--pool": "offload",
        "--role": "prefill",
        "--drain-seconds": "45",
    }
    assert {port["name"]: port["containerPort"] for port in worker["ports"]} == {"api": 8000, "data": 8001}
    assert [variable["name"] for variable in worker["env"]] == ["POD_IP", "POD_NAME", "POD_NAMESPACE"]
    assert (worker["readinessProbe"]["httpGet"]["path"], worker["livenessProbe"]["httpGet"]["path"]) == (
        "/readyz",
        "/healthz",
    )


def test_engine_arguments_come_after_our_own(make):
    worker = worker_of(pool.deployment(make.decode_pool(engine={"args": ["--max-running", "4"]}), None))
    assert worker["args"][-2:] == ["--max-running", "4"]
    assert flags_of(worker)["--cluster"] == "hub"


def test_a_worker_is_hardened_and_has_no_account(make):
    pod = pod_of(pool.deployment(make.prefill_pool(), make.member()))
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    security = pod["containers"][0]["securityContext"]
    assert security == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"name": "prfaas-tmp", "mountPath": "/tmp"} in pod["containers"][0]["volumeMounts"]


def test_the_kubelet_waits_longer_than_the_worker_drains(make):
    assert pod_of(pool.deployment(make.prefill_pool(drainSeconds=30), None))["terminationGracePeriodSeconds"] == 40


def test_labels_of_the_operator_win_over_those_of_the_owner(make):
    wanted = {"labels": {"team": "a", "prfaas.io/role": "decode", "prfaas.io/pool-uid": "x"}}
    manifest = pool.deployment(make.prefill_pool(template=wanted), make.member())
    assert manifest["spec"]["template"]["metadata"]["labels"] == {"team": "a", **OWN_LABELS}
    assert manifest["metadata"]["labels"] == OWN_LABELS


def test_the_selector_is_what_scale_reports(make):
    manifest = pool.deployment(make.prefill_pool(), None)
    assert manifest["spec"]["selector"]["matchLabels"] == {
        "prfaas.io/pool-uid": "uid-offload",
        "prfaas.io/role": "prefill",
    }
    assert pool.scale_selector(make.prefill_pool()) == "prfaas.io/pool-uid=uid-offload,prfaas.io/role=prefill"


def test_only_hub_children_have_an_owner(make):
    assert "ownerReferences" not in pool.deployment(make.prefill_pool(), make.member())["metadata"]
    (owner,) = pool.deployment(make.prefill_pool(), None)["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("PrefillPool", "uid-offload")


def test_host_addressing_takes_the_nodes_ports_and_never_surges(make):
    manifest = pool.deployment(make.prefill_pool(), make.member(addressing="HostIP"))
    assert [port["hostPort"] for port in worker_of(manifest)["ports"]] == [8000, 8001]
    assert manifest["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    plain = pool.deployment(make.prefill_pool(), make.member())
    assert all("hostPort" not in port for port in worker_of(plain)["ports"])
    assert "strategy" not in plain["spec"]


def test_the_whole_template_reaches_the_pod(make):
    template = {
        "annotations": {"a": "b"},
        "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "80Gi"}},
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "volumes": [
            {"name": "weights", "persistentVolumeClaim": {"claimName": "w"}},
            {"name": "tokens", "secret": {"secretName": "t"}},
            {"name": "scratch", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
            {"name": "settings", "configMap": {"name": "c"}},
        ],
        "volumeMounts": [
            {"name": "weights", "mountPath": "/weights"},
            {"name": "scratch", "mountPath": "/tmp", "readOnly": False},
        ],
        "env": [{"name": "A", "value": ""}, {"name": "B", "valueFrom": {"secretKeyRef": {"name": "t", "key": "k"}}}],
        "imagePullSecrets": [{"name": "pull"}],
        "priorityClassName": "high",
    }
    manifest = pool.deployment(make.prefill_pool(template=template), None)
    pod, worker = pod_of(manifest), worker_of(manifest)
    assert manifest["spec"]["template"]["metadata"]["annotations"] == {"a": "b"}
    assert worker["resources"] == {"limits": {"nvidia.com/gpu": 1, "memory": "80Gi"}}
    assert (pod["nodeSelector"], pod["priorityClassName"]) == ({"gpu": "h200"}, "high")
    assert pod["tolerations"] == template["tolerations"]
    assert pod["imagePullSecrets"] == [{"name": "pull"}]
    assert pod["volumes"] == [
        {"name": "weights", "persistentVolumeClaim": {"claimName": "w", "readOnly": True}},
        *template["volumes"][1:],
    ]
    assert worker["volumeMounts"] == [
        {"name": "weights", "mountPath": "/weights", "readOnly": True},
        {"name": "scratch", "mountPath": "/tmp", "readOnly": False},
    ], "an owner's own /tmp takes the place of ours"
    assert worker["env"][3:] == template["env"]


def test_the_gateway_pod_has_router_and_scheduler_on_one_socket(make):
    manifest = gateway.deployment(make.policy(gateway={"replicas": 3, "image": "reg/g:1"}))
    router, scheduler = pod_of(manifest)["containers"]
    assert (router["command"], scheduler["command"]) == (["prfaas-gateway"], ["prfaas-scheduler"])
    assert flags_of(router) == {
        "--host": "$(POD_IP)",
        "--port": "8080",
        "--policy": "kimi",
        "--namespace": "$(POD_NAMESPACE)",
        "--control-socket": "/run/prfaas/control.sock",
    }
    assert flags_of(scheduler) == {
        "--control-socket": "/run/prfaas/control.sock",
        "--policy": "kimi",
        "--namespace": "$(POD_NAMESPACE)",
        "--identity": "$(POD_NAME)",
        "--host": "$(POD_IP)",
        "--metrics-port": "9091",
    }
    assert (router["ports"][0]["name"], scheduler["ports"][0]["name"]) == ("http", "metrics")
    assert {router["image"], scheduler["image"]} == {"reg/g:1"}
    assert (manifest["metadata"]["name"], manifest["spec"]["replicas"]) == ("kimi-gateway", 3)
    assert pod_of(manifest)["serviceAccountName"] == "kimi-gateway"


def test_the_gateways_selectors_match_its_pods(make):
    policy = make.policy(gateway={"replicas": 2})
    labels = gateway.deployment(policy)["spec"]["template"]["metadata"]["labels"].items()
    selectors = [
        gateway.deployment(policy)["spec"]["selector"]["matchLabels"],
        service.service(policy)["spec"]["selector"],
        protection.disruption_budget(policy)["spec"]["selector"]["matchLabels"],
        protection.network_policy(policy)["spec"]["podSelector"]["matchLabels"],
    ]
    assert all(selector.items() <= labels for selector in selectors)
    assert all(selector == selectors[0] for selector in selectors)


def test_every_right_of_the_gateway_names_its_one_object(make):
    rules = access.role(make.policy())["rules"]
    assert [(rule["resources"][0], rule["resourceNames"]) for rule in rules] == [
        ("configmaps", ["kimi-routes"]),
        ("prfaaspolicies/status", ["kimi"]),
        ("leases", ["kimi-scheduler"]),
    ]
    assert "create" not in json.dumps(rules)


def test_one_gateway_has_no_disruption_budget(make):
    assert protection.disruption_budget(make.policy()) is None


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("http://prometheus:9090", 9090),
        ("http://prometheus", 80),
        ("https://prometheus/x", 443),
    ],
)
def test_the_gateway_may_reach_prometheus_where_it_is(make, url, port):
    ports = protection.network_policy(make.policy(metrics={"prometheusUrl": url}))["spec"]["egress"][1]["ports"]
    assert {"protocol": "TCP", "port": port} in ports
    assert {"protocol": "TCP", "port": 8000} in ports
    assert len(ports) == len({each["port"] for each in ports})


def test_a_port_that_is_no_number_breaks_nothing(make):
    assert protection.network_policy(make.policy(metrics={"prometheusUrl": "http://prometheus:port"}))
