"""Proves what the charts claim: a hardened operator, least privilege, the generated CRDs, and clear refusals."""

from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from prfaas.api import PrfaaSPolicy
from prfaas_operator import __main__ as operator
from prfaas_operator.render import access

ROOT = Path(__file__).parents[2]
CHARTS = ("prfaas", "prfaas-member")

both_charts = pytest.mark.parametrize("chart", CHARTS)


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in objects if each["kind"] == kind]


def only(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = of_kind(objects, kind)
    return found


def pod(hub: list[dict[str, Any]]) -> dict[str, Any]:
    return only(hub, "Deployment")["spec"]["template"]["spec"]


def container(hub: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = pod(hub)["containers"]
    return found


def granted(objects: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    """Return all rights of the Roles as (group, resource, verb)."""
    return {
        (group, resource, verb)
        for role in of_kind(objects, "Role")
        for rule in role["rules"]
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
    command = typer.main.get_command(_app())
    context = command.make_context("prfaas-operator", list(container(hub)["args"]))
    assert context.params == {
        "namespace": "$(POD_NAMESPACE)",
        "host": "$(POD_IP)",
        "metrics_port": 9090,
        "health_port": 8081,
    }


def _app() -> typer.Typer:
    app = typer.Typer()
    app.command()(operator.run)
    return app


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


def test_two_operators_never_work_at_once(hub):
    spec = only(hub, "Deployment")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


@both_charts
def test_nothing_reaches_beyond_the_namespace(render, chart):
    objects = render(chart, *(["--set", "crds.enabled=false"] if chart == "prfaas" else []))
    assert not [each["kind"] for each in objects if each["kind"].startswith("Cluster")]
    assert {each["metadata"]["namespace"] for each in objects} == {"here"}


@both_charts
def test_no_wildcards_and_no_way_up(render, chart):
    rights = granted(render(chart))
    assert rights
    for group, resource, verb in rights:
        assert "*" not in (group, resource, verb)
        assert verb not in ("escalate", "bind", "impersonate", "deletecollection")


def test_operator_reads_secrets_by_name_only(hub):
    assert {verb for _, resource, verb in granted(hub) if resource == "secrets"} == {"get", "patch"}


def test_operator_starts_no_pods_and_enters_none(hub):
    assert {verb for _, resource, verb in granted(hub) if resource.startswith("pods")} == {"list", "watch"}


def test_operator_holds_what_it_grants_to_a_gateway(hub):
    """RBAC refuses a Role that grants more than its author holds."""
    spec = {"model": "m", "decodePool": "d"}
    policy = PrfaaSPolicy.from_dict({"metadata": {"name": "kimi", "namespace": "here"}, "spec": spec})
    grants = {
        (group, resource, verb)
        for rule in access.role(policy)["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert grants <= granted(hub)


def test_member_lets_the_hub_run_deployments_and_no_more(member):
    deployments = {("apps", "deployments", verb) for verb in ("get", "list", "watch", "create", "patch", "delete")}
    assert granted(member) == deployments | {("", "pods", "list"), ("", "pods", "watch")}


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


def test_member_has_the_token_that_join_reads(member):
    secret = only(member, "Secret")
    assert secret["type"] == "kubernetes.io/service-account-token"
    assert secret["metadata"]["name"] == "prfaas-operator-token"
    assert secret["metadata"]["annotations"] == {"kubernetes.io/service-account.name": "prfaas-operator"}


def test_crds_are_the_generated_ones(hub):
    generated = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / "crds").glob("*.yaml")}
    assert len(generated) == 4
    rendered = {each["metadata"]["name"]: each["spec"] for each in of_kind(hub, "CustomResourceDefinition")}
    assert rendered == {each["metadata"]["name"]: each["spec"] for each in generated.values()}


def test_crds_are_kept_unless_told_otherwise(render, hub):
    policies = [each["metadata"]["annotations"] for each in of_kind(hub, "CustomResourceDefinition")]
    assert policies == [{"helm.sh/resource-policy": "keep"}] * 4
    dropped = of_kind(render("prfaas", "--set", "crds.keep=false"), "CustomResourceDefinition")
    assert len(dropped) == 4
    assert not any("annotations" in each["metadata"] for each in dropped)


def test_crds_can_be_left_to_somebody_else(render):
    assert of_kind(render("prfaas", "--set", "crds.enabled=false"), "CustomResourceDefinition") == []


def test_image_follows_the_chart_unless_told_otherwise(render, hub):
    version = yaml.safe_load((ROOT / "charts/prfaas/Chart.yaml").read_text())["appVersion"]
    assert container(hub)["image"] == f"prfaas/operator:{version}"
    chosen = render("prfaas", "--set", "operator.image.repository=registry.example/op,operator.image.tag=v9")
    assert container(chosen)["image"] == "registry.example/op:v9"


def test_placement_and_resources_reach_the_pod(render):
    values = (
        "operator.nodeSelector.disk=ssd,operator.tolerations[0].operator=Exists,operator.imagePullSecrets[0].name=s"
    )
    chosen = render("prfaas", "--set", values, "--set", "operator.resources.limits.memory=1Gi")
    assert pod(chosen)["nodeSelector"] == {"disk": "ssd"}
    assert pod(chosen)["tolerations"] == [{"operator": "Exists"}]
    assert pod(chosen)["imagePullSecrets"] == [{"name": "s"}]
    assert container(chosen)["resources"]["limits"] == {"memory": "1Gi"}


@pytest.mark.parametrize(
    ("chart", "value", "complaint"),
    [
        ("prfaas", "operator.image.pullPolicy=Sometimes", "'/operator/image/pullPolicy': value must be one of"),
        ("prfaas", "operator.image.repository=", "'/operator/image/repository': minLength: got 0, want 1"),
        ("prfaas", "crds.keep=maybe", "'/crds/keep': got string, want boolean"),
        ("prfaas", "operator.imagePullSecrets[0]=registry", "'/operator/imagePullSecrets/0': got string, want object"),
        ("prfaas", "operator.nodeSelector.gpu=true", "'/operator/nodeSelector/gpu': got boolean, want string"),
        ("prfaas", "operator.replica=2", "additional properties 'replica' not allowed"),
        ("prfaas", "image.tag=1", "additional properties 'image' not allowed"),
        ("prfaas-member", "namespace=x", "additional properties 'namespace' not allowed"),
    ],
)
def test_wrong_value_is_refused_and_named(render, chart, value, complaint):
    with pytest.raises(Exception, match="values don't meet the specifications") as refused:
        render(chart, "--set", value)
    assert complaint in str(refused.value)


def test_every_value_stands_in_the_schema_and_the_other_way_round():
    folder = ROOT / "charts/prfaas"
    values = yaml.safe_load((folder / "values.yaml").read_text())
    schema = yaml.safe_load((folder / "values.schema.json").read_text())

    def of_values(node: Any, path: str) -> set[str]:
        children = node.items() if isinstance(node, dict) else ()
        return {path}.union(*(of_values(child, f"{path}.{key}") for key, child in children))

    def of_schema(node: Any, path: str) -> set[str]:
        return {path}.union(*(of_schema(child, f"{path}.{key}") for key, child in node.get("properties", {}).items()))

    known = of_schema(schema, "") - {".global"}
    free = (".operator.resources", ".operator.nodeSelector")  # what Kubernetes itself defines
    assert {path for path in of_values(values, "") if not path.startswith(free) or path in free} == known


def test_notes_give_the_next_command(helm):
    hub = helm("install", "release", ROOT / "charts/prfaas", "-n", "here", "--dry-run=client")
    assert "kubectl -n here rollout status deployment/prfaas-operator" in hub
    assert "prfaas cluster join NAME --context MEMBER" in hub
    member = helm("install", "release", ROOT / "charts/prfaas-member", "-n", "here", "--dry-run=client")
    assert "prfaas cluster join NAME --context THIS_CLUSTER" in member
