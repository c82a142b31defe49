"""Proves that values are described, checked and used: every key has a type and a text, and a wrong one is refused."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from prfaas.telemetry.logs import LEVELS
from prfaas_operator.plan.certificates import CertificateMode, terms_of

ROOT = Path(__file__).parents[2]
CHARTS = ("prfaas", "prfaas-member")
FREE = ("resources", "labels", "affinity", "metricsFrom", "nodeSelector")  # what Kubernetes itself defines, or its user

both_charts = pytest.mark.parametrize("chart", CHARTS)


@pytest.fixture(scope="module")
def describe():
    """The script of `make charts`."""
    spec = importlib.util.spec_from_file_location("describe", ROOT / "charts" / "describe.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("chart", "value", "complaint"),
    [
        ("prfaas", "operator.image.pullPolicy=Sometimes", "'/operator/image/pullPolicy': value must be one of"),
        ("prfaas", "operator.image.repository=", "'/operator/image/repository': minLength: got 0, want 1"),
        ("prfaas", "operator.image.digest=latest", "'/operator/image/digest': 'latest' does not match pattern"),
        ("prfaas", "crds.keep=maybe", "'/crds/keep': got string, want boolean"),
        ("prfaas", "operator.imagePullSecrets[0]=registry", "'/operator/imagePullSecrets/0': got string, want object"),
        ("prfaas", "operator.nodeSelector.gpu=true", "'/operator/nodeSelector/gpu': got boolean, want string"),
        ("prfaas", "operator.logLevel=loud", "'/operator/logLevel': value must be one of"),
        ("prfaas", "operator.extraEnv[0].name=POD_IP", "'/operator/extraEnv/0/name': 'not' failed"),
        (
            "prfaas",
            "operator.resources.limit.cpu=1",
            "'/operator/resources': additional properties 'limit' not allowed",
        ),
        ("prfaas", "operator.replica=2", "additional properties 'replica' not allowed"),
        ("prfaas", "image.tag=1", "additional properties 'image' not allowed"),
        ("prfaas", "networkPolicy.apiServerPorts[0]=https", "'/networkPolicy/apiServerPorts/0': got string"),
        ("prfaas", "networkPolicy.metricsFrom[0].namespace=x", "additional properties 'namespace' not allowed"),
        ("prfaas", "monitoring.podMonitor.interval=often", "'/monitoring/podMonitor/interval': 'often' does not match"),
        ("prfaas", "certificates.mode=Issuer", "'/certificates/issuerRef/name': minLength: got 0, want 1"),
        ("prfaas", "certificates.trustDomain=Example.com", "'/certificates/trustDomain': 'Example.com' does not match"),
        ("prfaas", "certificates.mode=Nobody", "'/certificates/mode': value must be one of"),
        ("prfaas-member", "networkPolicy.hubCidrs[0]=everywhere", "'/networkPolicy/hubCidrs/0': 'everywhere'"),
        ("prfaas-member", "networkPolicy.hubCidrs[0]=192.0.2.256/24", "'/networkPolicy/hubCidrs/0': '192.0.2.256/24'"),
        ("prfaas-member", "networkPolicy.hubCidrs[0]=192.0.2.0/33", "'/networkPolicy/hubCidrs/0': '192.0.2.0/33'"),
        ("prfaas-member", "networkPolicy.hubCidrs[0]=2001:db8/32", "'/networkPolicy/hubCidrs/0': '2001:db8/32'"),
        ("prfaas-member", "networkPolicy.hubCidrs[0]=::/129", "'/networkPolicy/hubCidrs/0': '::/129'"),
        ("prfaas", "networkPolicy.metricsFrom[0].ipBlock.cidr=here", "'/networkPolicy/metricsFrom/0/ipBlock/cidr': 'h"),
        ("prfaas", "certificates.certificateHours=876001", "'/certificates/certificateHours': maximum"),
        ("prfaas-member", "namespace.create=true", "'/namespace/name': minLength: got 0, want 1"),
        ("prfaas-member", "namespaces=x", "additional properties 'namespaces' not allowed"),
    ],
)
def test_wrong_value_is_refused_and_named(render, chart, value, complaint):
    with pytest.raises(Exception, match="values don't meet the specifications") as refused:
        render(chart, "--set", value)
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    "range_",
    ["192.0.2.0/24", "0.0.0.0/0", "10.255.0.1/32", "2001:db8::/32", "::/0", "fd00::1/128", "64:ff9b::192.0.2.0/120"],
)
def test_every_form_of_a_range_is_taken(render, range_):
    assert range_ in str(render("prfaas-member", "--set", f"networkPolicy.hubCidrs[0]={range_}"))


@pytest.mark.parametrize("hours", ["authorityHours=71", "certificateHours=2921", "authorityHours=10"])
def test_an_authority_that_its_certificates_would_outlive_is_refused_in_a_sentence(render, hours):
    with pytest.raises(Exception, match="is less than three times certificateHours"):
        render("prfaas", "--set", f"certificates.{hours}")
    render("prfaas", "--set", f"certificates.{hours},certificates.mode=Disabled")
    render("prfaas", "--set", "certificates.authorityHours=6480")


def test_a_certificate_that_may_end_before_every_pod_has_the_next_one_is_refused_in_a_sentence(render):
    """The controls: a second less, and no certificates."""
    short = "certificates.certificateHours=1,certificates.settleSeconds"
    with pytest.raises(Exception, match="is more than a third of certificateHours"):
        render("prfaas", "--set", f"{short}=1201")
    render("prfaas", "--set", f"{short}=1201,certificates.mode=Disabled")
    render("prfaas", "--set", f"{short}=1200")


def test_chart_and_operator_count_three_lives_alike(render):
    render("prfaas", "--set-json", "certificates.certificateHours=1.1", "--set-json", "certificates.authorityHours=3.3")
    terms_of(CertificateMode.OPERATOR, "", 1.1, 3.3, 180)


def test_a_namespace_that_helm_makes_is_not_made_twice(render):
    with pytest.raises(Exception, match="here is the release's own namespace"):
        render("prfaas-member", "--set", "namespace.create=true,namespace.name=here")


def keys(node: Any, path: str = "") -> set[str]:
    """Return the paths of all values, without what is below a value that Kubernetes defines."""
    if not isinstance(node, dict) or path.rpartition(".")[2] in FREE:
        return {path}
    return {path}.union(*(keys(child, f"{path}.{key}".lstrip(".")) for key, child in node.items()))


def typed(node: Any, path: str = "") -> set[str]:
    """Return the paths of all properties of a schema."""
    children = node.get("properties", {}).items()
    return {path}.union(*(typed(child, f"{path}.{key}".lstrip(".")) for key, child in children))


def of_chart(chart: str) -> tuple[Any, Any]:
    folder = ROOT / "charts" / chart
    return yaml.safe_load((folder / "values.yaml").read_text()), json.loads((folder / "values.schema.json").read_text())


@both_charts
def test_every_value_stands_in_the_schema_and_the_other_way_round(chart):
    values, schema = of_chart(chart)
    assert keys(values) == typed(schema) - {"global"}


@both_charts
def test_every_value_says_what_it_is_for(chart):
    _, schema = of_chart(chart)

    def silent(node: Any, path: str) -> list[str]:
        children = node.get("properties")
        if children is None:
            return [] if node.get("description") else [path]
        return [each for key, child in children.items() for each in silent(child, f"{path}.{key}")]

    assert silent(schema, "") == []


@both_charts
def test_no_object_of_a_schema_takes_an_unknown_name(chart):
    _, schema = of_chart(chart)

    def open_objects(node: Any, path: str) -> list[str]:
        children = node.get("properties", {})
        here = [path] if children and node.get("additionalProperties") is not False else []
        return here + [each for key, child in children.items() for each in open_objects(child, f"{path}.{key}")]

    assert open_objects(schema, "") == []


def test_the_log_levels_are_those_that_the_operator_accepts():
    """The operator refuses any other level at its start."""
    _, schema = of_chart("prfaas")
    assert schema["properties"]["operator"]["properties"]["logLevel"]["enum"] == list(LEVELS)


@both_charts
def test_schema_and_readme_tell_what_the_values_say(describe, chart):
    for path, wanted in describe.documents(ROOT / "charts" / chart).items():
        assert path.read_text() == wanted, f"{path} is out of date: run `make charts`"


def test_a_comment_belongs_to_the_key_below_it(describe):
    text = "# of the file\n\na:\n  # one\n  # line\n  b: 1\n  c: 2\n# top\nd: 3\n"
    assert describe.descriptions(text) == {"a.b": "one line", "d": "top"}


def test_the_readmes_table_is_that_of_the_values(describe, tmp_path):
    """A control: a README that misses a value is not taken for right."""
    chart = tmp_path / "prfaas"
    chart.mkdir()
    for name in ("values.yaml", "values.schema.json", "README.md"):
        (chart / name).write_text((ROOT / "charts/prfaas" / name).read_text())
    values = chart / "values.yaml"
    values.write_text(values.read_text().replace("repository: prfaas/operator", "repository: other/operator"))
    wanted = describe.documents(chart)[chart / "README.md"]
    assert "other/operator" in wanted
    assert wanted != (chart / "README.md").read_text()


def test_notes_give_the_next_command(helm):
    hub = helm("install", "release", ROOT / "charts/prfaas", "-n", "here", "--dry-run=client")
    assert "kubectl -n here rollout status deployment/prfaas-operator" in hub
    assert "helm test release -n here" in hub
    assert "prfaas cluster join NAME --context MEMBER" in hub
    member = helm("install", "release", ROOT / "charts/prfaas-member", "-n", "here", "--dry-run=client")
    assert "prfaas cluster join NAME --context THIS_CLUSTER" in member
    assert "--member-namespace here" in member


def test_notes_say_who_may_reach_the_members_workers(helm):
    install = ("install", "release", ROOT / "charts/prfaas-member", "-n", "here", "--dry-run=client")
    assert "closes these ports to the hub" in (closed := helm(*install))
    assert "helm upgrade release CHART -n here --reuse-values --set 'networkPolicy.hubCidrs={HUB_CIDR}'" in closed
    assert "lets 192.0.2.0/24 reach these ports" in helm(*install, "--set", "networkPolicy.hubCidrs={192.0.2.0/24}")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ("--kube-version", "1.30.0"),
            r"checks the hub's Deployments here by the rules in `admission`.\nThe hub may run any image",
        ),
        (("--kube-version", "1.30.0", "--set", "admission.images={r.example/p/}"), r"in `admission`.\nTo revoke"),
        (("--kube-version", "1.29.9"), "because this is Kubernetes v1.29.9: 1.30 is needed"),
        (("--set", "admission.enabled=false"), "set admission.enabled=true for one"),
        (("--set", "admission=null"), "set admission.enabled=true for one"),
    ],
)
def test_notes_say_whether_the_hubs_deployments_are_checked(helm, tmp_path, options, says):
    """Only `helm template` takes a version, and it shows no notes; so here they are an object's text."""
    chart = shutil.copytree(ROOT / "charts/prfaas-member", tmp_path / "chart")
    (chart / "templates/NOTES.txt").rename(chart / "notes")
    (chart / "templates/notes.yaml").write_text('notes: {{ tpl (.Files.Get "notes") . | quote }}')
    assert says in helm("template", "release", chart, "--show-only", "templates/notes.yaml", *options)
