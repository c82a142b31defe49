"""Proves that manifests say what operator, workers and gateway agreed on, and nothing that owners may not say."""

import json

import pytest

from prfaas_operator.render import gateway, pool_deployment, protection
from prfaas_operator.render.common import PART_OF
from prfaas_operator.render.launch import StartTerms

IMAGE = gateway.GatewayImage("reg/g:1")

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


def test_the_origins_of_a_policy_reach_its_gateway(make):
    def flags(**spec) -> dict[str, str]:
        return flags_of(worker_of(gateway.deployment(make.policy(gateway=spec), IMAGE)))

    assert flags(corsOrigins=["https://b", "https://a"])["--cors-origins"] == "https://a,https://b"
    assert "--cors-origins" not in flags()


def test_a_policy_lets_clients_share_a_cache(make):
    def words(**spec) -> list[str]:
        return worker_of(gateway.deployment(make.policy(gateway=spec), IMAGE))["args"]

    assert "--shared-cache" in words(sharedCache=True)
    assert "--shared-cache" not in words()


def test_a_worker_is_started_with_the_flags_of_its_pool(make):
    worker = worker_of(pool_deployment.deployment(make.prefill_pool(drainSeconds=45), make.member()))
    assert worker["command"] == ["prfaas-worker"]
    assert flags_of(worker) == {
        "--model-source": "builtin:tiny",
        "--model-name": "tiny",
        "--host": "$(POD_IP)",
        "--api-port": "8000",
        "--data-port": "8001",
        "--admin-port": "8002",
        "--instance": "$(POD_NAME)",
        "--cluster": "eu",
        "--pool": "offload",
        "--role": "prefill",
        "--drain-seconds": "45",
        "--egress-file": "/etc/prfaas/settings/egress-mbps",
    }
    ports = {port["name"]: port["containerPort"] for port in worker["ports"]}
    assert ports == {"http": 8000, "data": 8001, "admin": 8002}
    names = [variable["name"] for variable in worker["env"]]
    assert names == ["POD_IP", "POD_NAME", "POD_NAMESPACE", "HOME", "USER"]
    assert worker["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "admin"}
    assert worker["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "admin"}


def test_engine_arguments_come_after_our_own(make):
    worker = worker_of(pool_deployment.deployment(make.decode_pool(engine={"args": ["--max-running", "4"]}), None))
    assert worker["args"][-2:] == ["--max-running", "4"]
    assert flags_of(worker)["--cluster"] == "hub"


def test_a_worker_is_hardened_and_has_no_account(make):
    pod = pod_of(pool_deployment.deployment(make.prefill_pool(), make.member()))
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


@pytest.mark.parametrize(
    ("cap", "replicas", "share"), [(1000, 3, "333"), (1000, 1, "1000"), (2, 5, "1"), (7, 0, "7"), (None, 3, None)]
)
def test_each_instance_gets_its_share_of_the_pools_egress(make, cap, replicas, share):
    spec = {"replicas": replicas} | ({} if cap is None else {"egressMbps": cap})
    settings = pool_deployment.settings(make.prefill_pool(**spec), make.member())
    assert settings["metadata"] == {"name": "offload-settings", "labels": OWN_LABELS}
    assert settings["data"] == ({} if share is None else {"egress-mbps": share})


def test_a_changed_cap_or_number_of_instances_leaves_the_pods_template_as_it_is(make):
    specs = ({"replicas": 1}, {"replicas": 4, "egressMbps": 100}, {"replicas": 2, "egressMbps": 900})
    templates = [
        pool_deployment.deployment(make.prefill_pool(**spec), make.member())["spec"]["template"] for spec in specs
    ]
    assert templates[0] == templates[1] == templates[2]


def test_the_file_that_a_worker_reads_its_cap_from_is_a_key_of_the_settings(make):
    offload = make.prefill_pool(egressMbps=10)
    manifest = pool_deployment.deployment(offload, None)
    folder, _, key = flags_of(worker_of(manifest))["--egress-file"].rpartition("/")
    (mount,) = [mount for mount in worker_of(manifest)["volumeMounts"] if mount["mountPath"] == folder]
    (volume,) = [volume for volume in pod_of(manifest)["volumes"] if volume["name"] == mount["name"]]
    settings = pool_deployment.settings(offload, None)
    assert volume["configMap"] == {"name": settings["metadata"]["name"], "optional": True}
    assert list(settings["data"]) == [key]
    assert "subPath" not in mount
    assert settings["metadata"]["ownerReferences"][0]["uid"] == "uid-offload"


def test_a_decode_pool_has_no_settings(make):
    manifest = pool_deployment.deployment(make.decode_pool(), None)
    assert "--egress-file" not in worker_of(manifest)["args"]
    assert all("configMap" not in volume for volume in pod_of(manifest)["volumes"])


@pytest.mark.parametrize(("drain_seconds", "notice_seconds"), [(30, 5), (2, 2), (0, 0)])
def test_a_worker_serves_on_until_its_leaving_is_known_and_the_kubelet_waits_for_both(
    make, drain_seconds, notice_seconds
):
    manifest = pool_deployment.deployment(make.prefill_pool(drainSeconds=drain_seconds), None)
    hook = {"preStop": {"exec": {"command": ["sleep", str(notice_seconds)]}}}
    assert worker_of(manifest).get("lifecycle", {}) == (hook if notice_seconds else {})
    assert pod_of(manifest)["terminationGracePeriodSeconds"] == notice_seconds + drain_seconds + 10


def test_a_gateway_serves_on_until_its_leaving_is_known_and_the_kubelet_waits_for_both(make):
    manifest = gateway.deployment(make.policy(gateway={"drainSeconds": 90}), IMAGE)
    container = pod_of(manifest)["containers"][0]
    assert container["lifecycle"] == {"preStop": {"exec": {"command": ["sleep", "5"]}}}
    assert flags_of(container)["--drain-seconds"] == "90"
    assert pod_of(manifest)["terminationGracePeriodSeconds"] == 105


@pytest.mark.parametrize(
    ("rollout", "plain", "by_host"),
    [
        ({}, ("25%", 0), (0, 1)),
        ({"maxSurge": 0, "maxUnavailable": "10%"}, (0, "10%"), (0, "10%")),
        ({"maxSurge": 3, "maxUnavailable": "0%"}, (3, "0%"), (0, 1)),
    ],
)
def test_no_instance_is_missing_during_a_rollout_unless_it_must_or_may_be(make, rollout, plain, by_host):
    wanted = make.prefill_pool(rollout=rollout)
    for member, (surge, unavailable) in ((make.member(), plain), (make.member(addressing="HostIP"), by_host)):
        strategy = pool_deployment.deployment(wanted, member)["spec"]["strategy"]
        rolling = {"maxSurge": surge, "maxUnavailable": unavailable}
        assert strategy == {"type": "RollingUpdate", "rollingUpdate": rolling}


def test_labels_of_the_operator_replace_those_of_the_owner(make):
    wanted = {"labels": {"team": "a", "prfaas.io/role": "decode", "prfaas.io/pool-uid": "x"}}
    manifest = pool_deployment.deployment(make.prefill_pool(template=wanted), make.member())
    assert manifest["spec"]["template"]["metadata"]["labels"] == {
        "team": "a",
        "prfaas.io/engine": "prfaas",
        **OWN_LABELS,
    }
    assert manifest["metadata"]["labels"] == OWN_LABELS


def test_a_role_stands_in_the_selector_that_scale_reports_and_not_in_that_of_the_deployment(make):
    manifest = pool_deployment.deployment(make.prefill_pool(), None)
    assert manifest["spec"]["selector"]["matchLabels"] == {"prfaas.io/pool-uid": "uid-offload"}
    assert (
        pool_deployment.scale_selector(make.prefill_pool()) == "prfaas.io/pool-uid=uid-offload,prfaas.io/role=prefill"
    )


def test_only_hub_children_have_an_owner(make):
    assert "ownerReferences" not in pool_deployment.deployment(make.prefill_pool(), make.member())["metadata"]
    (owner,) = pool_deployment.deployment(make.prefill_pool(), None)["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("PrefillPool", "uid-offload")


def test_host_addressing_takes_the_nodes_ports(make):
    manifest = pool_deployment.deployment(make.prefill_pool(), make.member(addressing="HostIP"))
    assert [port.get("hostPort") for port in worker_of(manifest)["ports"]] == [8000, 8001, None]
    plain = pool_deployment.deployment(make.prefill_pool(), make.member())
    assert all("hostPort" not in port for port in worker_of(plain)["ports"])


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
        "serviceAccountName": "weights-reader",
        "runtimeClassName": "nvidia",
        "schedulerName": "gang",
        "nodeAffinity": [
            {"key": "gpu", "operator": "In", "values": ["h100", "h200"]},
            {"key": "spot", "operator": "DoesNotExist"},
        ],
        "topologySpread": [{"topologyKey": "rack", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule"}],
    }
    manifest = pool_deployment.deployment(make.prefill_pool(template=template), None)
    pod, worker = pod_of(manifest), worker_of(manifest)
    assert manifest["spec"]["template"]["metadata"]["annotations"] == {"a": "b", "prfaas.io/model": "tiny"}
    assert worker["resources"] == template["resources"] | {"requests": {"cpu": "50m"}}
    assert (pod["nodeSelector"], pod["priorityClassName"]) == ({"gpu": "h200"}, "high")
    assert pod["tolerations"] == template["tolerations"]
    assert pod["imagePullSecrets"] == [{"name": "pull"}]
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("weights-reader", False)
    assert (pod["runtimeClassName"], pod["schedulerName"]) == ("nvidia", "gang")
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [{"values": [], **one} for one in template["nodeAffinity"]]
    (spread,) = pod["topologySpreadConstraints"]
    assert spread == template["topologySpread"][0] | {
        "labelSelector": manifest["spec"]["selector"],
        "matchLabelKeys": ["pod-template-hash"],
    }
    assert pod["volumes"] == [
        {"name": "weights", "persistentVolumeClaim": {"claimName": "w", "readOnly": True}},
        *template["volumes"][1:],
        {"name": "prfaas-settings", "configMap": {"name": "offload-settings", "optional": True}},
    ]
    assert worker["volumeMounts"] == [
        {"name": "weights", "mountPath": "/weights", "readOnly": True},
        {"name": "scratch", "mountPath": "/tmp", "readOnly": False},
        {"name": "prfaas-settings", "mountPath": "/etc/prfaas/settings", "readOnly": True},
    ], "an owner's own /tmp takes the place of ours"
    assert worker["env"][5:] == template["env"]


def test_instances_spread_across_zones_and_nodes_unless_the_pool_says_otherwise(make):
    spread = pod_of(pool_deployment.deployment(make.prefill_pool(), None))["topologySpreadConstraints"]
    wanted = [(one["topologyKey"], one["maxSkew"], one["whenUnsatisfiable"]) for one in spread]
    assert wanted == [
        ("topology.kubernetes.io/zone", 1, "ScheduleAnyway"),
        ("kubernetes.io/hostname", 1, "ScheduleAnyway"),
    ]
    nowhere = make.prefill_pool(template={"topologySpread": []})
    assert "topologySpreadConstraints" not in pod_of(pool_deployment.deployment(nowhere, None))


def test_the_operator_and_no_policy_chooses_the_gateways_image(make):
    evil = {"image": "evil.example/exfil:1"}
    serving, scheduler = pod_of(gateway.deployment(make.policy(gateway=evil), IMAGE))["containers"]
    assert (serving["image"], scheduler["image"]) == ("reg/g:1", "reg/g:1")


@pytest.mark.parametrize("engine", [{"type": "prfaas"}, {"type": "emulated", "args": ["--emulate=p"]}])
def test_the_operator_chooses_the_image_of_our_worker_where_a_pool_names_none(make, engine):
    def deployed(setting: str, **named: str) -> dict:
        terms = StartTerms(worker_image=setting)
        return pool_deployment.deployment(make.decode_pool(engine=engine | named), None, terms)

    assert worker_of(deployed("reg/w:1"))["image"] == "reg/w:1"
    assert deployed("reg/w:2") != deployed("reg/w:1") == deployed("reg/w:2", image="reg/w:1")


def test_the_gateways_image_is_pulled_with_the_secrets_that_the_operator_names(make):
    assert "imagePullSecrets" not in pod_of(gateway.deployment(make.policy(), IMAGE))
    pod = pod_of(gateway.deployment(make.policy(), IMAGE._replace(pull_secrets=("one", "other"))))
    assert pod["imagePullSecrets"] == [{"name": "one"}, {"name": "other"}]


def test_the_gateway_pod_has_gateway_and_scheduler_on_one_socket(make):
    manifest = gateway.deployment(make.policy(gateway={"replicas": 3}), IMAGE)
    serving, scheduler = pod_of(manifest)["containers"]
    assert (serving["name"], scheduler["name"]) == ("gateway", "scheduler")
    assert (serving["command"], scheduler["command"]) == (["prfaas-gateway"], ["prfaas-scheduler"])
    assert flags_of(serving) == {
        "--host": "$(POD_IP)",
        "--port": "8080",
        "--admin-port": "8082",
        "--policy": "kimi",
        "--namespace": "$(POD_NAMESPACE)",
        "--control-socket": "/run/prfaas/control.sock",
        "--drain-seconds": "60",
    }
    assert flags_of(scheduler) == {
        "--control-socket": "/run/prfaas/control.sock",
        "--policy": "kimi",
        "--namespace": "$(POD_NAMESPACE)",
        "--identity": "$(POD_NAME)",
        "--host": "$(POD_IP)",
        "--metrics-port": "9091",
    }
    assert [port["name"] for port in serving["ports"] + scheduler["ports"]] == ["http", "admin", "metrics"]
    assert {serving[probe]["httpGet"]["port"] for probe in ("readinessProbe", "livenessProbe")} == {"admin"}
    assert {serving["image"], scheduler["image"]} == {"reg/g:1"}
    assert (manifest["metadata"]["name"], manifest["spec"]["replicas"]) == ("kimi-gateway", 3)
    assert pod_of(manifest)["serviceAccountName"] == "kimi-gateway"


def test_a_gateway_gets_a_share_of_a_busy_nodes_cpu_unless_its_policy_says_otherwise(make):
    (serving, scheduler) = pod_of(gateway.deployment(make.policy(), IMAGE))["containers"]
    memory = ({"memory": "256Mi"}, {"memory": "4Gi"})
    assert serving["resources"] == {"requests": {"cpu": "100m", **memory[0]}, "limits": memory[1]}
    assert "cpu" not in scheduler["resources"]["limits"]
    own = {"resources": {"limits": {"cpu": "50m"}}, "schedulerResources": {"limits": {"cpu": "5m"}}}
    (serving, scheduler) = pod_of(gateway.deployment(make.policy(gateway=own), IMAGE))["containers"]
    assert serving["resources"] == {"requests": memory[0], "limits": {"cpu": "50m", **memory[1]}}
    assert scheduler["resources"]["limits"]["cpu"] == "5m"


def test_the_gateways_selectors_match_its_pods(make):
    policy = make.policy(gateway={"replicas": 2})
    labels = gateway.deployment(policy, IMAGE)["spec"]["template"]["metadata"]["labels"].items()
    selectors = [
        gateway.deployment(policy, IMAGE)["spec"]["selector"]["matchLabels"],
        gateway.service(policy)["spec"]["selector"],
        protection.disruption_budget(policy)["spec"]["selector"]["matchLabels"],
        protection.network_policy(policy)["spec"]["podSelector"]["matchLabels"],
    ]
    assert all(selector.items() <= labels for selector in selectors)
    assert all(selector == selectors[0] for selector in selectors)


def test_every_right_of_the_gateway_names_its_one_object(make):
    rules = gateway.role(make.policy())["rules"]
    assert [(rule["resources"][0], rule["resourceNames"]) for rule in rules] == [
        ("configmaps", ["kimi-routes"]),
        ("prfaaspolicies/status", ["kimi"]),
        ("leases", ["kimi-scheduler"]),
    ]
    assert "create" not in json.dumps(rules)


def test_one_gateway_has_no_disruption_budget(make):
    assert protection.disruption_budget(make.policy()) is None


@pytest.mark.parametrize(
    ("url", "port"), [("http://prometheus:9090", 9090), ("http://prometheus", 80), ("https://prometheus/x", 443)]
)
def test_the_gateway_may_reach_prometheus_where_it_is(make, url, port):
    ports = protection.network_policy(make.policy(metrics={"prometheusUrl": url}))["spec"]["egress"][1]["ports"]
    assert {"protocol": "TCP", "port": port} in ports
    assert {"protocol": "TCP", "port": 8000} in ports
    assert len(ports) == len({each["port"] for each in ports})


def test_a_port_that_is_no_number_breaks_nothing(make):
    assert protection.network_policy(make.policy(metrics={"prometheusUrl": "http://prometheus:port"}))
