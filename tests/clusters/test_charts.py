"""Proves that Helm installs the charts into a real API server, and that the operator works with exactly their rights.

One control plane plays both clusters: the hub is its namespace `prfaas`, the member its namespace `prefill`. The
operator is the real process, run on this machine with a token of the account that the chart made for it. Both
namespaces enforce the restricted Pod Security Standard: a pod that does not meet it never comes to be.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.waiting import eventually

from prfaas.ports import free_ports

pytestmark = pytest.mark.clusters

ROOT = Path(__file__).parents[2]
HUB, MEMBER = "prfaas", "prefill"
TIMEOUT_SECONDS = 120


@dataclass(frozen=True)
class Installed:
    """The control plane with both charts in it."""

    cluster: Any
    credentials: dict[str, Any]
    """The administrator's kubeconfig: where the server is, and its CA."""

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self.cluster.kubectl(*arguments, stdin=stdin)

    def helm(self, *arguments: str | Path) -> str:
        command = [self.cluster.tools["helm"], "--kubeconfig", self.cluster.kubeconfig, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True).stdout

    def kubeconfig(self, token: str) -> str:
        """Return a kubeconfig for this server with a token."""
        server = self.credentials["clusters"][0]["cluster"]
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": server}],
                "users": [{"name": "u", "user": {"token": token}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
        )

    def member_token(self) -> str:
        """Return a token of the member's account, as `prfaas cluster join` asks for one."""
        return self.cluster.reader.token(MEMBER, "prfaas-operator", 3600)


@pytest.fixture(scope="module")
def installed(start_cluster: Callable[[str], Any]) -> Installed:
    """This module's own cluster, because Helm adopts no CRDs that others have applied."""
    cluster = start_cluster("charts")
    both = Installed(cluster, yaml.safe_load(cluster.kubeconfig.read_text()))
    for name in (HUB, MEMBER):
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
        both.kubectl("create", "-f", "-", stdin=json.dumps(namespace))
    both.helm("install", "prfaas", ROOT / "charts/prfaas", "-n", HUB)
    both.helm("install", "prfaas-member", ROOT / "charts/prfaas-member", "-n", MEMBER)
    both.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    return both


def test_server_took_every_object_as_it_was_rendered(installed):
    for release, namespace in (("prfaas", HUB), ("prfaas-member", MEMBER)):
        rendered = installed.helm("get", "manifest", release, "-n", namespace)
        applied = installed.kubectl(
            "-n", namespace, "diff", "--server-side", "--force-conflicts", "-f", "-", stdin=rendered
        )
        assert applied == ""


def test_upgrade_works_and_keeps_the_members_token(installed):
    token = installed.member_token()
    installed.helm("upgrade", "prfaas", ROOT / "charts/prfaas", "-n", HUB)
    installed.helm("upgrade", "prfaas-member", ROOT / "charts/prfaas-member", "-n", MEMBER)
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}}
    answer = json.loads(installed.kubectl("create", "-o", "json", "-f", "-", stdin=json.dumps(review)))
    assert answer["status"]["authenticated"], "the account is the same one"


@pytest.mark.parametrize(
    ("namespace", "may_not"),
    [
        (HUB, "list secrets"),
        (HUB, "create secrets"),
        (HUB, "create pods"),
        (HUB, "create pods/exec"),
        (HUB, "create prefillpools.prfaas.io"),
        (HUB, "delete prfaaspolicies.prfaas.io"),
        (HUB, "escalate roles.rbac.authorization.k8s.io"),
        (HUB, "impersonate serviceaccounts"),
        (HUB, "create serviceaccounts/token"),
        (HUB, "watch secrets"),
        (HUB, "delete secrets"),
        (HUB, "create clusterroles.rbac.authorization.k8s.io"),
        (MEMBER, "list deployments.apps"),
        ("kube-system", "get secrets"),
        ("default", "list pods"),
    ],
)
def test_hubs_operator_may_not(installed, namespace, may_not):
    assert not may(installed, HUB, namespace, may_not)


@pytest.mark.parametrize(
    "may_not",
    [
        "get secrets",
        "list secrets",
        "update configmaps",
        "create pods",
        "create pods/exec",
        "patch roles.rbac.authorization.k8s.io",
        "create serviceaccounts/token",
        "get nodes",
    ],
)
def test_hub_may_not_in_its_member(installed, may_not):
    assert not may(installed, MEMBER, MEMBER, may_not)


@pytest.mark.parametrize(
    ("account", "can"), [(HUB, "get secrets"), (HUB, "list pods"), (MEMBER, "create deployments.apps")]
)
def test_the_question_can_be_answered_with_yes(installed, account, can):
    assert may(installed, account, account, can)


def may(installed: Installed, account: str, namespace: str, question: str) -> bool:
    """Ask the API server whether the operator's account of one namespace may do something in another."""
    user = f"system:serviceaccount:{account}:prfaas-operator"
    return installed.cluster.reader.may(user, attributes(question) | {"namespace": namespace})


def attributes(question: str) -> dict[str, str]:
    """Read "VERB RESOURCE[/SUBRESOURCE][.GROUP]"."""
    verb, _, what = question.partition(" ")
    resource, _, group = what.partition(".")
    resource, _, subresource = resource.partition("/")
    return {"verb": verb, "group": group, "resource": resource, "subresource": subresource}


def test_who_may_set_thresholds_may_set_nothing_else(installed):
    spec = {"model": "m", "decodePool": "d", "threshold": {"mode": "Disabled", "min": 300, "max": 9000}}
    policy = {"apiVersion": "prfaas.io/v1alpha1", "kind": "PrfaaSPolicy", "metadata": {"name": "steered"}, "spec": spec}
    installed.kubectl("-n", HUB, "create", "-f", "-", stdin=json.dumps(policy))
    installed.kubectl("-n", HUB, "create", "rolebinding", "ada", "--clusterrole=prfaas-thresholds", "--user=ada")
    as_ada = ("-n", HUB, "--as=ada")
    eventually(lambda: installed.kubectl(*as_ada, "get", "prfaas/steered", "-o", "name"), "the right is in force")
    installed.kubectl(*as_ada, "scale", "prfaas/steered", "--replicas=4096")
    now = json.loads(installed.kubectl("-n", HUB, "get", "prfaas/steered", "-o", "json"))["spec"]
    assert now["threshold"]["tokens"] == 4096
    keys = json.dumps({"spec": {"gateway": {"apiKeysSecretRef": {"name": "chat-api-keys"}}}})
    patch = ("patch", "prfaas/steered", "--type=merge", "-p", keys)
    with pytest.raises(subprocess.CalledProcessError) as refused:
        installed.kubectl(*as_ada, *patch)
    assert 'cannot patch resource "prfaaspolicies"' in refused.value.stderr
    installed.kubectl(*as_ada, *patch, "--subresource=scale")
    assert json.loads(installed.kubectl("-n", HUB, "get", "prfaas/steered", "-o", "json"))["spec"] == now
    installed.kubectl("-n", HUB, "delete", "prfaas/steered", "rolebinding/ada")


def test_a_member_refuses_pods_of_a_priority_class_that_its_owner_did_not_name(installed):
    safe = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "runAsNonRoot": True}
    container = {"name": "c", "image": "i", "securityContext": safe | {"seccompProfile": {"type": "RuntimeDefault"}}}
    for name in ("high", "batch"):
        installed.kubectl("create", "priorityclass", name, "--value=1000")

    def refusal(priority_class: str) -> str:
        spec = {"containers": [container]} | ({"priorityClassName": priority_class} if priority_class else {})
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "it"}, "spec": spec}
        try:
            installed.kubectl("-n", MEMBER, "create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
        except subprocess.CalledProcessError as refused:
            return refused.stderr
        return ""

    quota = ("-n", MEMBER, "get", "resourcequota/prfaas-priority-classes", "-o", "jsonpath={.status.hard.pods}")
    eventually(lambda: installed.kubectl(*quota) == "0", "the quota is in force")
    for name in ("high", "batch", "system-node-critical"):
        assert "exceeded quota: prfaas-priority-classes" in refusal(name)
    assert refusal("") == ""
    named = ("--set", "priorityClasses={batch}")
    installed.helm("upgrade", "prfaas-member", ROOT / "charts/prfaas-member", "-n", MEMBER, *named)
    eventually(lambda: refusal("batch") == "", "the class that was named is admitted")
    assert "exceeded quota: prfaas-priority-classes" in refusal("high")
    installed.kubectl("create", "priorityclass", "usual", "--value=10", "--global-default")
    assert "exceeded quota: prfaas-priority-classes" in eventually(lambda: refusal(""), "pods get the class usual")
    installed.helm("upgrade", "prfaas-member", ROOT / "charts/prfaas-member", "-n", MEMBER)
    eventually(lambda: refusal("") == "", "the cluster's own default is admitted")
    assert "exceeded quota: prfaas-priority-classes" in refusal("high")
    installed.kubectl("delete", "priorityclass/usual")
    installed.kubectl("-n", MEMBER, "delete", "resourcequota/prfaas-priority-classes")
    eventually(lambda: refusal("high") == "", "without the quota every class is admitted")


HUBS_ACCOUNT = f"system:serviceaccount:{MEMBER}:prfaas-operator"
TOKEN = {"name": "T", "valueFrom": {"secretKeyRef": {"name": "huggingface", "key": "t"}}}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("node's network", {"hostNetwork": True}),
    ("may not be privileged", {"container": {"securityContext": {"privileged": True}}}),
    ("may mount only", {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}),
    ("must have the labels", {"labels": {"app.kubernetes.io/component": "gateway"}}),
    ("only these service accounts", {"serviceAccountName": "reader"}),
    ("only these Secrets", {"volumes": [{"name": "v", "secret": {"secretName": "huggingface"}}]}),
    ("only these Secrets", {"imagePullSecrets": [{"name": "huggingface"}]}),
    ("only these Secrets", {"container": {"env": [TOKEN]}}),
    ("only these Secrets", {"container": {"envFrom": [{"secretRef": {"name": "huggingface"}}]}}),
    ("only images of these", {"container": {"image": "reg.example:5000/p/worker:1"}}),
]
"""A part of each refusal, and what of a Deployment it is about."""


def hubs_deployment(*, container: Any = None, labels: Any = None, **pod: Any) -> str:
    """Return a Deployment as the hub writes it, with these changes of its pods."""
    own = {"app.kubernetes.io/part-of": "prfaas", "app.kubernetes.io/component": "worker", "app": "a"} | (labels or {})
    runs = {"name": "worker", "image": "reg.example/p/worker:1"} | (container or {})
    volumes = [{"name": "tls", "secret": {"secretName": "prfaas-tls"}}, {"name": "tmp", "emptyDir": {}}]
    spec = {"containers": [runs], "volumes": volumes} | pod
    template = {"metadata": {"labels": own}, "spec": spec}
    body = {"selector": {"matchLabels": {"app": "a"}}, "template": template}
    return json.dumps({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "it"}, "spec": body})


def refused(installed: Installed, deployment: str, *as_whom: str) -> str:
    """Return why the member's API server refuses a Deployment; empty if it does not."""
    try:
        installed.kubectl(*as_whom, "-n", MEMBER, "create", "--dry-run=server", "-f", "-", stdin=deployment)
    except subprocess.CalledProcessError as error:
        return error.stderr
    return ""


def test_a_member_admits_only_what_its_owner_allows_the_hub(installed):
    """The controls: what the hub writes is admitted, nobody else is asked, and what is named is admitted."""
    chart, hub = ROOT / "charts/prfaas-member", ("--as", HUBS_ACCOUNT)
    installed.helm("upgrade", "prfaas-member", chart, "-n", MEMBER, "--set", "admission.images={reg.example/p/}")
    other = hubs_deployment(container={"image": "reg.example/q/worker:1"})
    eventually(lambda: "only images of these" in refused(installed, other, *hub), "the policy is in force")
    assert refused(installed, hubs_deployment(), *hub) == ""
    for words, change in REFUSED:
        deployment = hubs_deployment(**change)
        assert words in refused(installed, deployment, *hub)
        assert refused(installed, deployment) == ""
    named = "admission.secrets={huggingface},admission.serviceAccounts={reader},admission.images={reg.example:5000/p/w}"
    installed.helm("upgrade", "prfaas-member", chart, "-n", MEMBER, "--set", named)
    own = {"image": "reg.example:5000/p/w:1"}
    for words, change in REFUSED[4:9]:
        allowed = hubs_deployment(**change | {"container": own | change.get("container", {})})
        eventually(lambda allowed=allowed: refused(installed, allowed, *hub) == "", f"it is named: {words}")
    for image in ("reg.example:5000/p/w-evil:1", "reg.example:5000/p/w:1/evil", "evil/reg.example:5000/p/w:1"):
        assert "only images of these" in refused(installed, hubs_deployment(container={"image": image}), *hub)
    installed.helm("upgrade", "prfaas-member", chart, "-n", MEMBER, "--reset-values")
    eventually(lambda: refused(installed, other, *hub) == "", "all images are admitted again")


@pytest.fixture
def operator_log(installed: Installed, tmp_path: Path) -> Iterator[Path]:
    """Run the operator with a token of its account; yield its log."""
    token = installed.kubectl("-n", HUB, "create", "token", "prfaas-operator").strip()
    kubeconfig, log = tmp_path / "kubeconfig", tmp_path / "operator.log"
    kubeconfig.write_text(installed.kubeconfig(token))
    metrics_port, health_port = free_ports(2)
    command = [sys.executable, "-m", "prfaas_operator", "--namespace", HUB, "--gateway-image", "reg/g:1"]
    command += ["--worker-image", "reg/w:1", "--connector-image", "reg/c:1"]
    command += ["--metrics-port", str(metrics_port), "--health-port", str(health_port)]
    environment = os.environ | {"KUBECONFIG": str(kubeconfig)}
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output, env=environment) as process:
        yield log
        process.send_signal(signal.SIGTERM)
        process.wait(TIMEOUT_SECONDS)


def test_operator_gets_by_with_the_rights_of_the_charts(installed, operator_log):
    """From two charts and an example to all children in both clusters, and back to nothing, without one refusal."""
    join(installed)
    installed.kubectl("apply", "-f", str(ROOT / "examples" / "two-clusters.yaml"))
    exist(installed, HUB, "configmap/kimi-routes", "serviceaccount/kimi-gateway", "role/kimi-gateway")
    exist(installed, HUB, "rolebinding/kimi-gateway", "deployment/kimi-gateway", "service/kimi-gateway")
    exist(installed, HUB, "networkpolicy/kimi-gateway", "lease/kimi-scheduler")
    installed.kubectl("-n", HUB, "patch", "prfaas/kimi", "--type=merge", "-p", '{"spec": {"gateway": {"replicas": 2}}}')
    exist(installed, HUB, "poddisruptionbudget/kimi-gateway")
    eventually(lambda: pools_with_deployments(installed, MEMBER) == {"offload"}, "the offload pool runs")
    eventually(lambda: pools_with_deployments(installed, HUB) == {"local", "decode"}, "the pools at home run")
    ours = {"prfaas-operator", "kimi-gateway", "local", "decode"}
    eventually(lambda: admitted(installed, HUB) == ours, "the hub admits all pods")
    eventually(lambda: admitted(installed, MEMBER) == {"offload"}, "the member admits its pods")
    finalizers = lambda: kubeconfig_secret(installed)["metadata"].get("finalizers", [])  # noqa: E731
    eventually(lambda: "prfaas.io/cleanup" in finalizers(), "the kubeconfig has a finalizer")
    installed.kubectl("-n", HUB, "delete", "prfaas-all", "--all", f"--timeout={TIMEOUT_SECONDS}s")
    places = (MEMBER, HUB)
    eventually(lambda: not any(pools_with_deployments(installed, one) for one in places), "no pool is left")
    assert "forbidden" not in operator_log.read_text().lower()


def join(installed: Installed) -> None:
    """Register the member the way `prfaas cluster join` does."""
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "prefill-eu-kubeconfig", "namespace": HUB, "labels": {"prfaas.io/secret": "kubeconfig"}},
        "stringData": {"kubeconfig": installed.kubeconfig(installed.member_token())},
    }
    member = {
        "apiVersion": "prfaas.io/v1alpha1",
        "kind": "MemberCluster",
        "metadata": {"name": "prefill-eu", "namespace": HUB},
        "spec": {
            "kubeconfigSecretRef": {"name": "prefill-eu-kubeconfig"},
            "namespace": MEMBER,
            "link": {"capacityMbps": 100},
        },
    }
    for body in (secret, member):
        installed.kubectl("apply", "-f", "-", stdin=json.dumps(body))
    ready = ("--for=condition=Ready", "pmc/prefill-eu", f"--timeout={TIMEOUT_SECONDS}s")
    installed.kubectl("-n", HUB, "wait", *ready)


def exist(installed: Installed, namespace: str, *objects: str) -> None:
    """Wait until the objects of a namespace exist."""
    get = ("-n", namespace, "get", *objects, "--ignore-not-found", "-o", "name")
    eventually(lambda: len(installed.kubectl(*get).split()) == len(objects), f"{objects} exist", poll=0.3)


def pools_with_deployments(installed: Installed, namespace: str) -> set[str]:
    selector = "app.kubernetes.io/managed-by=prfaas-operator,prfaas.io/pool"
    listed = installed.cluster.reader.list_all(namespace, "deployments", selector)
    return {item["metadata"]["labels"]["prfaas.io/pool"] for item in listed}


def admitted(installed: Installed, namespace: str) -> set[str]:
    """Return the Deployments of a namespace, all of whose pods exist: that is, were admitted."""
    return {
        item["metadata"]["name"]
        for item in installed.cluster.reader.list_all(namespace, "deployments")
        if item.get("status", {}).get("replicas", 0) == item["spec"]["replicas"]
    }


def kubeconfig_secret(installed: Installed) -> dict[str, Any]:
    return json.loads(installed.kubectl("-n", HUB, "get", "secret", "prefill-eu-kubeconfig", "-o", "json"))


def test_a_pool_that_shares_its_nodes_ports_needs_a_namespace_that_allows_it(installed):
    """The control, and the one exception: hostPort, which addressing HostIP needs, is refused in such a namespace."""
    port = {"containerPort": 8000, "hostPort": 8000}
    safe = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "runAsNonRoot": True}
    container = {
        "name": "worker",
        "image": "i",
        "securityContext": safe | {"seccompProfile": {"type": "RuntimeDefault"}},
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "it"}, "spec": {"containers": [container]}}
    create = ("-n", MEMBER, "create", "--dry-run=server", "-f", "-")
    installed.kubectl(*create, stdin=json.dumps(pod))
    container["ports"] = [port]
    with pytest.raises(subprocess.CalledProcessError) as refused:
        installed.kubectl(*create, stdin=json.dumps(pod))
    assert 'violates PodSecurity "restricted' in refused.value.stderr


def test_uninstall_keeps_custom_resources(installed):
    """Last, because it takes the operator away."""
    pool = {
        "apiVersion": "prfaas.io/v1alpha1",
        "kind": "PrefillPool",
        "metadata": {"name": "precious", "namespace": HUB},
        "spec": {"model": {"name": "m", "source": "/m"}},
    }
    installed.kubectl("apply", "-f", "-", stdin=json.dumps(pool))
    installed.helm("uninstall", "prfaas", "-n", HUB, "--wait")
    assert "precious" in installed.kubectl("-n", HUB, "get", "pfpool", "-o", "name")
    with pytest.raises(subprocess.CalledProcessError):
        installed.kubectl("-n", HUB, "get", "deployment", "prfaas-operator")
