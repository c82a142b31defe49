"""Proves what the charts claim: a hardened operator, least privilege, the generated CRDs, and clear refusals."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from prfaas.api import PrfaaSPolicy
from prfaas.console import read_options
from prfaas_operator.options import OperatorOptions
from prfaas_operator.render import gateway

ROOT = Path(__file__).parents[2]
CHARTS = ("prfaas", "prfaas-member")

both_charts = pytest.mark.parametrize("chart", CHARTS)


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in objects if each["kind"] == kind]


def only(objects: list[dict[str, Any]], kind: str, name: str = "prfaas-operator") -> dict[str, Any]:
    (found,) = (each for each in of_kind(objects, kind) if each["metadata"]["name"] == name)
    return found


def pod(hub: list[dict[str, Any]]) -> dict[str, Any]:
    return only(hub, "Deployment")["spec"]["template"]["spec"]


def container(hub: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = pod(hub)["containers"]
    return found


def granted(objects: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    """Return all rights of the operator's Role as (group, resource, verb)."""
    return {
        (group, resource, verb)
        for rule in only(objects, "Role")["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@both_charts
def test_lint_finds_nothing(helm, chart):
    assert "1 chart(s) linted, 0 chart(s) failed" in helm("lint", "--strict", ROOT / "charts" / chart)


def test_operator_runs_as_non_root(hub):
    security = pod(hub)["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] > 0
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}


def test_operator_can_gain_and_write_nothing(hub):
    assert container(hub)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container(hub)["volumeMounts"] == [{"name": "tmp", "mountPath": "/tmp"}]
    assert pod(hub)["volumes"] == [{"name": "tmp", "emptyDir": {}}]
    assert not pod(hub).keys() & {"hostNetwork", "hostPID", "hostIPC"}


def test_operator_is_started_by_flags_that_it_knows(hub):
    assert container(hub)["command"] == ["prfaas-operator"]
    options = read_options(OperatorOptions, "prfaas-operator", "", list(container(hub)["args"]))
    chosen = {
        "namespace": "$(POD_NAMESPACE)",
        "host": "$(POD_IP)",
        "metrics_port": 9090,
        "health_port": 8081,
        "leader_elect": True,
        "member_token_days": 30,
        "log_format": "text",
    }
    assert chosen.items() <= options._asdict().items()


def test_every_variable_of_the_arguments_is_set(hub):
    names = {variable["name"] for variable in container(hub)["env"]}
    used = {argument[2:-1] for argument in container(hub)["args"] if argument.startswith("$(")}
    assert used <= names


def test_probes_ask_a_port_that_is_there(hub):
    ports = {port["name"]: port["containerPort"] for port in container(hub)["ports"]}
    assert ports == {"metrics": 9090, "health": 8081}
    paths = {name: container(hub)[name]["httpGet"] for name in ("readinessProbe", "livenessProbe")}
    assert paths == {
        "readinessProbe": {"path": "/readyz", "port": "health"},
        "livenessProbe": {"path": "/healthz", "port": "health"},
    }


def test_selector_finds_the_pods_and_no_version_is_in_it(hub):
    spec = only(hub, "Deployment")["spec"]
    selector = spec["selector"]["matchLabels"]
    labels = spec["template"]["metadata"]["labels"]
    assert selector.items() <= labels.items()
    assert not selector.keys() & {"app.kubernetes.io/version", "helm.sh/chart"}
    assert labels["app.kubernetes.io/part-of"] == "prfaas"  # Prometheus finds pods by it


def test_replicas_elect_a_leader_and_the_next_is_there_before_the_last_goes(render):
    spec = only(render("prfaas", "--set", "operator.replicas=2"), "Deployment")["spec"]
    assert spec["replicas"] == 2
    assert "--leader-elect" in spec["template"]["spec"]["containers"][0]["args"]
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}


@both_charts
def test_nothing_reaches_beyond_the_namespace(render, chart):
    clusterwide = {"prfaas": "crds.enabled=false", "prfaas-member": "admission.enabled=false"}
    objects = render(chart, "--set", clusterwide[chart])
    assert not [each["kind"] for each in objects if each["kind"].startswith("Cluster")]
    assert {each["metadata"]["namespace"] for each in objects} == {"here"}


@both_charts
def test_no_wildcards_and_no_way_up(render, chart):
    roles = of_kind(render(chart), "Role")
    assert roles
    for rule in (rule for role in roles for rule in role["rules"]):
        assert "*" not in (*rule["apiGroups"], *rule["resources"], *rule["verbs"])
        assert not {"escalate", "bind", "impersonate", "deletecollection"} & set(rule["verbs"])


def secret_rules(objects: list[dict[str, Any]]) -> dict[tuple[str, ...], set[str]]:
    """Return the verbs on Secrets by the names that a rule is limited to; () is no limit."""
    rules = [rule for rule in only(objects, "Role")["rules"] if "secrets" in rule["resources"]]
    return {tuple(rule.get("resourceNames", ())): set(rule["verbs"]) for rule in rules}


def test_operator_reads_secrets_by_name_only_and_makes_none_but_its_own(hub):
    rules = secret_rules(hub)
    assert rules.pop(()) == {"get", "patch"}
    assert rules.keys() <= {("prfaas-ca", "prfaas-tls", "prfaas-gateway-tls")}
    assert all(verbs == {"create"} for verbs in rules.values())


def test_operator_starts_no_pods_and_enters_none(hub):
    pods = {(resource, verb) for _, resource, verb in granted(hub) if resource.startswith("pods")}
    assert pods == {("pods", "list"), ("pods", "watch"), ("pods", "patch"), ("pods/status", "patch")}


def test_operator_holds_what_it_grants_to_a_gateway(hub):
    """RBAC refuses a Role that grants more than its author holds."""
    spec = {"model": "m", "decodePool": "d"}
    policy = PrfaaSPolicy.model_validate({"metadata": {"name": "kimi", "namespace": "here"}, "spec": spec})
    grants = {
        (group, resource, verb)
        for rule in gateway.role(policy)["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert grants <= granted(hub)


def test_member_lets_the_hub_keep_pools_and_what_belongs_to_them_and_no_more(member):
    deployments = {("apps", "deployments", verb) for verb in ("get", "list", "watch", "create", "patch", "delete")}
    settings = {("", "configmaps", verb) for verb in ("get", "list", "watch", "create", "patch", "delete")}
    pods = {("", "pods", verb) for verb in ("list", "watch")}
    budgets = {("policy", "poddisruptionbudgets", verb) for verb in ("get", "list", "watch", "create", "patch")}
    secrets = {right for right in granted(member) if right[1] == "secrets"}
    token = {("", "serviceaccounts/token", "create")}
    assert granted(member) == deployments | settings | pods | budgets | token | secrets


def test_member_lets_the_hub_touch_no_secret_but_the_instances_certificate(member):
    assert secret_rules(member).keys() <= {("prfaas-tls",)}
    assert not {"list", "watch"} & {verb for verbs in secret_rules(member).values() for verb in verbs}


@both_charts
def test_roles_are_bound_to_the_charts_own_account(render, chart):
    objects = render(chart)
    binding = only(objects, "RoleBinding")
    account = only(objects, "ServiceAccount")["metadata"]
    assert binding["roleRef"]["name"] == only(objects, "Role")["metadata"]["name"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
    ]
    assert account["name"] == "prfaas-operator"


def test_only_the_operators_pod_gets_the_accounts_token(hub):
    assert only(hub, "ServiceAccount")["automountServiceAccountToken"] is False
    assert pod(hub)["automountServiceAccountToken"] is True


def test_makes_no_token_without_an_end_and_the_account_may_renew_only_its_own(member):
    assert not of_kind(member, "Secret")
    (rule,) = [rule for rule in only(member, "Role")["rules"] if "serviceaccounts/token" in rule["resources"]]
    assert (rule["verbs"], rule["resourceNames"]) == (["create"], ["prfaas-operator"])


def test_crds_are_the_generated_ones(hub):
    generated = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / "crds").glob("*.yaml")}
    assert len(generated) == 4
    rendered = {each["metadata"]["name"]: each["spec"] for each in of_kind(hub, "CustomResourceDefinition")}
    assert rendered == {each["metadata"]["name"]: each["spec"] for each in generated.values()}


def test_keeps_crds_by_default(render, hub):
    policies = [each["metadata"]["annotations"] for each in of_kind(hub, "CustomResourceDefinition")]
    assert policies == [{"helm.sh/resource-policy": "keep"}] * 4
    dropped = of_kind(render("prfaas", "--set", "crds.keep=false"), "CustomResourceDefinition")
    assert len(dropped) == 4
    assert not any("annotations" in each["metadata"] for each in dropped)


def test_crds_can_be_left_out(render):
    assert of_kind(render("prfaas", "--set", "crds.enabled=false"), "CustomResourceDefinition") == []


def test_image_follows_the_chart_by_default(render, hub):
    version = yaml.safe_load((ROOT / "charts/prfaas/Chart.yaml").read_text())["appVersion"]
    assert container(hub)["image"] == f"prfaas/operator:{version}"
    chosen = render("prfaas", "--set", "operator.image.repository=registry.example/operator,operator.image.tag=v9")
    assert container(chosen)["image"] == "registry.example/operator:v9"


def test_placement_and_resources_reach_the_pod(render):
    values = (
        "operator.nodeSelector.disk=ssd,operator.tolerations[0].operator=Exists,operator.imagePullSecrets[0].name=s"
    )
    chosen = render("prfaas", "--set", values, "--set", "operator.resources.limits.memory=1Gi")
    assert pod(chosen)["nodeSelector"] == {"disk": "ssd"}
    assert pod(chosen)["tolerations"] == [{"operator": "Exists"}]
    assert pod(chosen)["imagePullSecrets"] == [{"name": "s"}]
    args = container(chosen)["args"]
    assert args[args.index("--gateway-pull-secrets") + 1] == "s", "the gateways' image lies in the same registry"
    assert container(chosen)["resources"]["limits"] == {"memory": "1Gi"}


@pytest.mark.parametrize(("names", "told"), [(["a"], "a"), (["123"], "123"), (["true", "b"], "true,b")])
def test_pull_secrets_are_words_whatever_they_look_like(render, names, told):
    values = ",".join(f"operator.imagePullSecrets[{index}].name={name}" for index, name in enumerate(names))
    args = container(render("prfaas", "--set-string", values))["args"]
    assert args[args.index("--gateway-pull-secrets") + 1] == told


def test_pools_of_the_hub_may_name_what_the_values_list(render, hub):
    options = read_options(OperatorOptions, "prfaas-operator", "", list(container(hub)["args"]))
    assert (options.worker_service_accounts, options.worker_priority_classes) == ("", "")
    chosen = container(render("prfaas", "--set", "workers.serviceAccounts={a,b},workers.priorityClasses={batch}"))
    options = read_options(OperatorOptions, "prfaas-operator", "", list(chosen["args"]))
    assert (options.worker_service_accounts, options.worker_priority_classes) == ("a,b", "batch")


def rights_of_people(objects: list[dict[str, Any]]) -> dict[str, set[tuple[str, str]]]:
    """Return what each ClusterRole of the chart gives, as (resource, verb)."""
    return {
        role["metadata"]["name"]: {
            (resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]
        }
        for role in of_kind(objects, "ClusterRole")
    }


def test_people_get_no_more_than_their_role_says(hub):
    """Who writes a pool or a policy chooses what runs, in other clusters, too."""
    rights = rights_of_people(hub)
    assert rights.keys() == {"prfaas-view", "prfaas-edit", "prfaas-admin", "prfaas-thresholds"}
    reading = {"get", "list", "watch"}
    writers = {
        name for name, given in rights.items() if any("/" not in what and do not in reading for what, do in given)
    }
    assert writers == {"prfaas-admin"}
    written = {what for what, do in rights["prfaas-thresholds"] if do not in reading}
    assert written == {"prfaaspolicies/scale"}
    rules = [rule for role in of_kind(hub, "ClusterRole") for rule in role["rules"]]
    (other,) = (rule for rule in rules if rule["apiGroups"] != ["prfaas.io"])
    assert other == {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get"]}, "the routing tables"
    assert ("configmaps", "get") in rights["prfaas-admin"]


def test_the_member_refuses_priority_classes_that_its_owner_did_not_name(render):
    def expressions(*options: str) -> list[dict[str, Any]]:
        (quota,) = of_kind(render("prfaas-member", *options), "ResourceQuota")
        assert quota["spec"]["hard"] == {"pods": "0"}
        return quota["spec"]["scopeSelector"]["matchExpressions"]

    any_class = {"scopeName": "PriorityClass", "operator": "Exists"}
    assert expressions() == [any_class]
    others = {"scopeName": "PriorityClass", "operator": "NotIn", "values": ["batch"]}
    assert expressions("--set", "priorityClasses={batch}") == [any_class, others]


def admission(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the spec of the member's admission policy, which its binding puts in force."""
    (binding,) = of_kind(objects, "ValidatingAdmissionPolicyBinding")
    (policy,) = of_kind(objects, "ValidatingAdmissionPolicy")
    assert binding["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}
    return policy["spec"]


def test_the_members_admission_policy_is_about_the_hub_in_this_namespace_alone(member):
    spec = admission(member)
    assert spec["failurePolicy"] == "Fail"
    assert spec["matchConstraints"]["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "here"}}
    (condition,) = (one["expression"] for one in spec["matchConditions"])
    assert condition == 'request.userInfo.username == "system:serviceaccount:here:prfaas-operator"'
    assert only(member, "ServiceAccount")["metadata"]["namespace"] == "here"


def test_the_hub_makes_pods_in_a_member_by_nothing_but_what_is_checked(member):
    (checked,) = admission(member)["matchConstraints"]["resourceRules"]
    assert checked["operations"] == ["CREATE", "UPDATE"]
    makers = {"pods", "deployments", "replicasets", "daemonsets", "statefulsets", "jobs", "cronjobs"}
    rules = (
        rule for role in of_kind(member, "Role") for rule in role["rules"] if {"create", "patch"} & {*rule["verbs"]}
    )
    assert {what for rule in rules for what in rule["resources"]} & makers == {*checked["resources"]}


def test_the_member_admits_what_its_owner_names(render, member):
    def messages(objects: list[dict[str, Any]]) -> str:
        return "; ".join(one["message"] for one in admission(objects)["validations"])

    assert "only these Secrets: prfaas-tls; name others in admission.secrets" in messages(member)
    assert "only these service accounts: default; name" in messages(member)
    assert "images" not in messages(member), "any image"
    values = "admission.secrets={huggingface},admission.serviceAccounts={reader},admission.images={reg.example/p/}"
    chosen = messages(render("prfaas-member", "--set", values))
    for words in ("Secrets: prfaas-tls, huggingface;", "accounts: default, reader;", "of these: reg.example/p/;"):
        assert words in chosen


@pytest.mark.parametrize(("version", "policies"), [("1.29.9", 0), ("1.30.0", 1), ("v1.31.2-gke.1", 1)])
def test_a_server_without_admission_policies_gets_none(render, version, policies):
    objects = render("prfaas-member", "--kube-version", version)
    assert len(of_kind(objects, "ValidatingAdmissionPolicy")) == policies


def test_values_of_an_earlier_version_render(render, member):
    """As `helm upgrade --reuse-values` gives them."""
    assert of_kind(member, "ValidatingAdmissionPolicy"), "the control"
    assert not of_kind(render("prfaas-member", "--set", "admission=null"), "ValidatingAdmissionPolicy")


def test_the_member_has_a_quota_if_its_owner_wants_one(render, member):
    assert [each["metadata"]["name"] for each in of_kind(member, "ResourceQuota")] == ["prfaas-priority-classes"]
    chosen = only(render("prfaas-member", "--set", "quota.pods=9"), "ResourceQuota", "prfaas")
    assert chosen["spec"] == {"hard": {"pods": 9}}
