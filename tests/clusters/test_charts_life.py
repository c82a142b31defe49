"""Proves that every variant of the charts is taken by a real API server, and that releases can be upgraded, rolled back
and uninstalled without leaving anything behind.

The API server checks every object against its own schemas, and in a namespace with the restricted Pod Security Standard
its admission lets no pod pass that does not meet it. The older chart is the one before the charts' last change.
"""

import json
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.waiting import eventually

pytestmark = pytest.mark.clusters

ROOT = Path(__file__).parents[2]
CHARTS = ROOT / "charts"
VARIANTS = sorted(CHARTS.glob("*/ci/*-values.yaml"))
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
TIMEOUT_SECONDS = 120
KINDS = ("decodepools", "memberclusters", "prefillpools", "prfaaspolicies")
PROMETHEUS_KINDS = ("PodMonitor", "PrometheusRule")
OWN_KINDS = (
    "deployments,services,serviceaccounts,roles,rolebindings,networkpolicies,poddisruptionbudgets,"
    "configmaps,secrets,pods,podmonitors,prometheusrules"
)
OF_KUBERNETES = {"ConfigMap/kube-root-ca.crt", "ServiceAccount/default"}


@dataclass(frozen=True)
class Releases:
    """Helm and kubectl against one control plane."""

    cluster: Any

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self.cluster.kubectl(*arguments, stdin=stdin)

    def helm(self, *arguments: str | Path) -> str:
        command = [self.cluster.tools["helm"], "--kubeconfig", self.cluster.kubeconfig, *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True)
        except subprocess.CalledProcessError as error:
            error.add_note(error.stderr)
            raise
        return done.stdout

    def namespace(self, name: str) -> str:
        """Make a namespace with the restricted Pod Security Standard."""
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": RESTRICTED}}
        self.kubectl("create", "-f", "-", stdin=json.dumps(body))
        return name

    def content(self, namespace: str) -> set[str]:
        """Return KIND/NAME of everything in a namespace, but for what Kubernetes itself puts there."""
        listed = json.loads(self.kubectl("-n", namespace, "get", OWN_KINDS, "-o", "json"))["items"]
        return {f"{each['kind']}/{each['metadata']['name']}" for each in listed} - OF_KUBERNETES

    def operator(self, namespace: str) -> dict[str, Any]:
        return json.loads(self.kubectl("-n", namespace, "get", "deployment", "prfaas-operator", "-o", "json"))["spec"]


@pytest.fixture(scope="module")
def releases(start_cluster: Callable[[str], Any]) -> Releases:
    """A cluster of this module's own, with the CRDs of a Prometheus operator, as far as Helm asks for them."""
    both = Releases(start_cluster("charts-life"))
    for kind in PROMETHEUS_KINDS:
        both.kubectl("create", "-f", "-", stdin=json.dumps(foreign_crd(kind)))
    both.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    return both


def foreign_crd(kind: str) -> dict[str, Any]:
    """Return a CRD that takes anything."""
    names = {"kind": kind, "plural": f"{kind.lower()}s"}
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names['plural']}.monitoring.coreos.com"},
        "spec": {"group": "monitoring.coreos.com", "scope": "Namespaced", "names": names, "versions": [version]},
    }


@pytest.fixture
def older_chart(tmp_path: Path) -> Iterator[Path]:
    """The chart prfaas as it was before its last change."""
    log = ["git", "-C", str(ROOT), "log", "--format=%H", "--max-count=2", "--", "charts/prfaas"]
    done = subprocess.run(log, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    commits = done.stdout.split()
    if done.returncode or len(commits) < 2:
        pytest.skip("needs a git checkout with some history")
    archive = tmp_path / "older.tar"
    pack = ["git", "-C", str(ROOT), "archive", "--output", str(archive), commits[1], "charts/prfaas"]
    subprocess.run(pack, check=True, timeout=TIMEOUT_SECONDS)
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    yield tmp_path / "charts" / "prfaas"
    shutil.rmtree(tmp_path / "charts")


@pytest.mark.parametrize("values", VARIANTS, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_the_server_accepts_every_variant_and_admits_its_pods(releases, values):
    chart, namespace = values.parts[-3], releases.namespace(f"{values.parts[-3]}-{values.stem.removesuffix('-values')}")
    options = ("--namespace", namespace, "--values", values)
    crds = ("--set", "crds.enabled=false") if chart == "prfaas" and values.stem != "minimal-values" else ()
    objects = [each for each in rendered(releases, chart, *options, *crds) if each["kind"] != "Namespace"]
    releases.helm("install", "it", CHARTS / chart, *options, *crds)
    applied = [each for each in objects if each["kind"] != "Pod"]  # that of `helm test` comes on request
    text = "\n---\n".join(yaml.safe_dump(each) for each in applied)
    differences = releases.kubectl("diff", "--server-side", "--force-conflicts", "-f", "-", stdin=text)
    assert differences == ""
    for pod in pods_of(objects):
        releases.kubectl("-n", namespace, "create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
    if chart == "prfaas" and not crds:
        await_kinds(releases)
    releases.helm("uninstall", "it", "-n", namespace, "--wait")
    eventually(lambda: releases.content(namespace) == set(), "nothing is left", poll=0.3)


def rendered(releases: Releases, chart: str, *options: str | Path) -> list[dict[str, Any]]:
    """Return a chart's objects, the pod of `helm test` among them."""
    text = releases.helm("template", "it", CHARTS / chart, *options)
    return [each for each in yaml.safe_load_all(text) if each]


def pods_of(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the pods among objects, and one for every Deployment."""
    return [each for each in objects if each["kind"] == "Pod"] + [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"like-{each['metadata']['name']}"},
            "spec": each["spec"]["template"]["spec"],
        }
        for each in objects
        if each["kind"] == "Deployment"
    ]


def test_upgrade_from_the_older_chart_rollback_and_a_clean_end(releases, older_chart):
    """In one namespace from the chart's previous version to this one with all values changed, and back."""
    namespace = releases.namespace("life")
    releases.helm("install", "prfaas", older_chart, "-n", namespace)
    before, content = releases.operator(namespace), releases.content(namespace)

    values = CHARTS / "prfaas" / "ci" / "everything-values.yaml"
    releases.helm("upgrade", "prfaas", CHARTS / "prfaas", "-n", namespace, "--values", values)
    upgraded = releases.operator(namespace)
    container = upgraded["template"]["spec"]["containers"][0]
    assert (upgraded["replicas"], container["imagePullPolicy"]) == (2, "Always")
    assert "PodDisruptionBudget/prfaas-operator" in releases.content(namespace)

    releases.helm("rollback", "prfaas", "1", "-n", namespace)
    assert releases.operator(namespace) == before
    releases_secrets = {each for each in releases.content(namespace) if each.startswith("Secret/sh.helm.release")}
    eventually(
        lambda: (
            without_pods(releases.content(namespace)) - releases_secrets == without_pods(content) - releases_secrets
        ),
        "the rollback restores what was there",
        poll=0.3,
    )

    releases.helm("uninstall", "prfaas", "-n", namespace, "--wait")
    eventually(lambda: releases.content(namespace) == set(), "nothing is left", poll=0.3)
    assert own_crds(releases) == len(KINDS), "crds.keep"


def without_pods(content: set[str]) -> set[str]:
    return {each for each in content if not each.startswith("Pod/")}


def own_crds(releases: Releases) -> int:
    names = releases.kubectl("get", "crd", "-o", "name").split()
    return sum(name.endswith(".prfaas.io") for name in names)


def await_kinds(releases: Releases) -> None:
    """Wait until the API server serves our kinds.

    One that has to delete a CRD before it ever served the kind tries again with growing pauses, for up to 5 minutes
    ("could not list instances: storage is (re)initializing").
    """
    for kind in KINDS:
        eventually(lambda kind=kind: is_served(releases, kind), f"{kind} is served", poll=0.3)


def is_served(releases: Releases, kind: str) -> bool:
    try:
        releases.kubectl("get", f"{kind}.prfaas.io", "--all-namespaces")
    except subprocess.CalledProcessError:
        return False
    return True


def test_the_next_release_takes_over_kept_crds_and_removes_them_if_configured(releases):
    """CRDs that a former release kept do not stand in the way of the next; one with keep=false takes them along."""
    namespace = releases.namespace("again")
    if own_crds(releases) == 0:
        releases.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
    releases.helm(
        "install", "prfaas", CHARTS / "prfaas", "-n", namespace, "--take-ownership", "--set", "crds.keep=false"
    )
    await_kinds(releases)
    releases.helm("uninstall", "prfaas", "-n", namespace, "--wait")
    eventually(lambda: own_crds(releases) == 0, "our CRDs are removed", poll=0.3)


def test_a_pod_that_is_not_restricted_is_refused(releases):
    """A control: the same pod without what makes it harmless."""
    namespace = releases.namespace("refusing")
    _, pod = pods_of(rendered(releases, "prfaas", "--namespace", namespace, "--set", "crds.enabled=false"))
    pod["spec"]["serviceAccountName"] = "default"
    create = ("-n", namespace, "create", "--dry-run=server", "-f", "-")
    releases.kubectl(*create, stdin=json.dumps(pod))
    del pod["spec"]["containers"][0]["securityContext"]
    with pytest.raises(subprocess.CalledProcessError) as refused:
        releases.kubectl(*create, stdin=json.dumps(pod))
    assert 'violates PodSecurity "restricted' in refused.value.stderr
