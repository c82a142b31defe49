"""Proves what becomes of children that others own, edit or refuse, and of an object that is paused."""

import json
import time

import pytest

pytestmark = pytest.mark.clusters

POLICY = {
    "model": "kimi-linear-tiny",
    "decodePool": "decode",
    "threshold": {"mode": "Disabled"},
    "metrics": {"prometheusUrl": "http://prometheus:9090"},
}


@pytest.fixture(scope="module")
def home(world):
    world.hub.apply(world.pool("DecodePool", "decode"), world.pool("PrefillPool", "local", egressMbps=10))
    world.eventually(lambda: world.hub.exists("deployment", "decode"), "Deployment decode")
    world.eventually(lambda: world.hub.exists("deployment", "local"), "Deployment local")
    return world.hub


def test_reverts_an_edit_and_names_its_author(world, home):
    change = {"spec": {"template": {"spec": {"enableServiceLinks": True}}}}
    home.patch("deployment", "decode", change, "somebody")
    links = lambda: home.get("deployment", "decode")["spec"]["template"]["spec"]["enableServiceLinks"]  # noqa: E731
    world.eventually(lambda: links() is False, "the Deployment is as rendered again")
    message = world.eventually(lambda: home.messages("decode", "ChildEdited"), "an Event")[0]
    assert message == ("Deployment decode: somebody changed spec.template.spec.enableServiceLinks; reverted")


def test_a_manager_that_takes_a_field_by_apply_loses_it_and_keeps_its_own(world, home):
    theirs = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "decode", "annotations": {"example.com/team": "a"}},
        "spec": {"replicas": 4},
    }
    command = ("apply", "--server-side", "--force-conflicts", "--field-manager=another", "-f", "-")
    home.kubectl(*command, stdin=json.dumps(theirs))
    world.eventually(lambda: home.get("deployment", "decode")["spec"]["replicas"] == 1, "one replica again")
    named = lambda: any("another changed spec.replicas" in one for one in home.messages("decode", "ChildEdited"))  # noqa: E731
    world.eventually(named, "an Event names the other manager")
    assert home.get("deployment", "decode")["metadata"]["annotations"]["example.com/team"] == "a"


def test_two_that_correct_each_other_cause_no_storm(world, home):
    writes = world.metrics().get('prfaas_operator_child_writes_total{kind="Deployment"}', 0)
    began = time.monotonic()

    def has_ended() -> bool:
        home.patch("deployment", "local", {"spec": {"replicas": 3}}, "rival")
        return time.monotonic() - began > 10 and bool(home.messages("local", "ChildEdited"))

    world.eventually(has_ended, "the operator corrects the other, and says so")
    after = world.metrics()['prfaas_operator_child_writes_total{kind="Deployment"}']
    most = 6 * (time.monotonic() - began) / 10  # a rate: a busy machine takes longer
    assert after - writes <= most
    assert len(home.messages("local", "ChildEdited")) <= most


def test_adopts_a_foreign_object_that_is_annotated(world, home):
    theirs = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "foreign-settings"},
        "data": {"egress-mbps": "7"},
    }
    home.apply(theirs, world.pool("PrefillPool", "foreign", egressMbps=20, replicas=0))
    assert "prfaas.io/adopt=true" in home.wait_reason("pfpool", "foreign", "ChildConflict")["message"]
    assert not home.exists("deployment", "foreign"), "all or nothing"
    home.kubectl("annotate", "configmap", "foreign-settings", "prfaas.io/adopt=true")
    home.wait_reason("pfpool", "foreign", "AllReady")
    assert home.get("configmap", "foreign-settings")["data"]["egress-mbps"] == "20"
    messages = world.eventually(lambda: home.messages("foreign", "ChildAdopted"), "an Event reports the adoption")
    assert messages == ["ConfigMap foreign-settings was taken over, as annotated"]


def test_an_owner_may_claim_what_has_its_childrens_names(world, home):
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "claimed-settings"}, "data": {"a": "b"}}
    claiming = world.pool("PrefillPool", "claimed", replicas=0)
    claiming["metadata"]["annotations"] = {"prfaas.io/adopt": "true"}
    home.apply(theirs, claiming)
    home.wait_reason("pfpool", "claimed", "AllReady")
    assert (
        home.get("configmap", "claimed-settings")["metadata"]["labels"]["app.kubernetes.io/managed-by"]
        == "prfaas-operator"
    )


@pytest.fixture
def refusals(world, home):
    """An admission policy of the cluster that refuses Deployments with some image or number of instances."""
    rule = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": "no-bad-images"},
        "spec": {
            "matchConstraints": {
                "resourceRules": [
                    {"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["*"], "resources": ["deployments"]}
                ]
            },
            "validations": [
                {
                    "expression": "!object.spec.template.spec.containers.exists(c, c.image.startsWith('bad/'))",
                    "message": "images from bad/ are not for us",
                },
                {"expression": "object.spec.replicas != 7", "message": "seven are not for us"},
            ],
        },
    }
    binding = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": "no-bad-images"},
        "spec": {"policyName": "no-bad-images", "validationActions": ["Deny"]},
    }
    home.apply(rule, binding)

    def in_force() -> bool:
        try:
            home.kubectl("create", "deployment", "probe", "--image=bad/probe", "--dry-run=server")
        except Exception:
            return True
        return False

    world.eventually(in_force, "the admission policy is in force")
    yield
    home.kubectl("delete", "validatingadmissionpolicybinding", "no-bad-images")
    home.kubectl("delete", "validatingadmissionpolicy", "no-bad-images")


def test_a_refused_child_leaves_the_whole_set_as_it_was(world, home, refusals):
    home.apply(world.resource("PrfaaSPolicy", "kimi", **POLICY))
    world.eventually(lambda: home.exists("networkpolicy", "kimi-gateway"), "the gateway's objects")
    home.apply(world.pool("PrefillPool", "held", egressMbps=10, replicas=0))
    home.wait_reason("pfpool", "held", "AllReady")
    before = home.get("networkpolicy", "kimi-gateway")["spec"]
    url = {"prometheusUrl": "http://prometheus:19090"}
    home.patch("prfaas", "kimi", {"spec": {"gateway": {"replicas": 7}, "metrics": url}})
    home.patch("pfpool", "held", {"spec": {"engine": {"image": "bad/worker"}, "egressMbps": 30}})
    assert "seven are not for us" in home.wait_reason("prfaas", "kimi", "Invalid")["message"]
    assert "images from bad/ are not for us" in home.wait_reason("pfpool", "held", "Invalid")["message"]
    assert home.get("networkpolicy", "kimi-gateway")["spec"] == before
    assert home.get("configmap", "held-settings")["data"] == {"egress-mbps": "10"}
    home.patch("prfaas", "kimi", {"spec": {"gateway": {"replicas": 1}}})
    home.patch("pfpool", "held", {"spec": {"engine": {"image": "good/worker"}}})
    home.wait_reason("pfpool", "held", "AllReady")
    assert home.get("configmap", "held-settings")["data"] == {"egress-mbps": "30"}
    world.eventually(lambda: home.get("networkpolicy", "kimi-gateway")["spec"] != before, "the rest lands as well")


@pytest.mark.parametrize(("kind", "name"), [("dcpool", "decode"), ("prfaas", "kimi")])
def test_a_paused_object_changes_nothing_until_it_is_resumed(world, home, kind, name):
    home.kubectl("annotate", kind, name, "prfaas.io/paused=true")
    assert home.wait_reason(kind, name, "Paused")["status"] == "Unknown"
    deployment = "decode" if kind == "dcpool" else "kimi-gateway"
    change = {"spec": {"replicas": 2}} if kind == "dcpool" else {"spec": {"gateway": {"replicas": 2}}}
    home.patch(kind, name, change)
    generation = home.get(kind, name)["metadata"]["generation"]
    seen = lambda: home.condition(kind, name).get("observedGeneration") == generation  # noqa: E731
    world.eventually(seen, "the change is seen")
    assert home.get("deployment", deployment)["spec"]["replicas"] == 1
    home.kubectl("annotate", kind, name, "prfaas.io/paused-")
    world.eventually(lambda: home.get("deployment", deployment)["spec"]["replicas"] == 2, "the change lands")


def test_a_paused_object_can_be_deleted(world, home):
    home.kubectl("annotate", "prfaas,dcpool,pfpool", "--all", "prfaas.io/paused=true")
    home.wait_reason("pfpool", "local", "Paused")
    home.delete_all("prfaas,dcpool,pfpool")
    world.eventually(lambda: not world.children(), "no child is left")
