"""Proves that docs/use/install.md leads out where the hub's namespace was deleted before what the operator manages."""

import re
import subprocess
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.clusters

PAGE = (Path(__file__).parents[3] / "docs" / "use" / "install.md").read_text()


@pytest.fixture
def settled(ground, operators, tmp_path):
    """An operator that keeps a pool in each cluster and a policy."""
    kubeconfig = operators.kubeconfig(ground.hub, tmp_path / "kubeconfig")
    process = operators.start(ground.hub.name, kubeconfig, tmp_path / "log", operators.free_ports(2))
    ground.join("eu")
    policy = {"model": "kimi-linear-tiny", "decodePool": "home", "prefillPools": ["away"]}
    ground.hub.apply(
        ground.pool("PrefillPool", "away", clusterName="eu"),
        ground.pool("DecodePool", "home"),
        ground.resource("PrfaaSPolicy", "kimi", **policy, threshold={"mode": "Fixed", "tokens": 900}),
    )
    for place, name in ((ground.member, "away"), (ground.hub, "home"), (ground.hub, "kimi-gateway")):
        ground.eventually(lambda place=place, name=name: place.exists("deployment", name), f"Deployment {name}")
    yield process
    process.kill()
    process.wait()


def exists(place) -> bool:
    return bool(place.cluster.kubectl("get", "namespace", place.name, "--ignore-not-found", "-o", "name").strip())


def follow_the_page(ground) -> None:
    """Run the commands of the page as they stand, with these clusters in the place of its contexts."""
    found = re.search(r"before its objects.*?\n\n((?:    [^\n]*\n)+)", PAGE, re.DOTALL)
    assert found, "the page tells the way out"
    script = textwrap.dedent(found[1])
    places = {"kubectl --context prefill-eu -n prfaas": ground.member, "kubectl -n prfaas": ground.hub}
    for words, place in places.items():
        own = f"{place.cluster.tools['kubectl']} --kubeconfig {place.cluster.kubeconfig} -n {place.name}"
        script = script.replace(words, own)
    subprocess.run(["bash", "-euo", "pipefail", "-c", script], check=True, capture_output=True, timeout=120)


def test_the_documented_way_out_frees_a_namespace_deleted_before_its_objects(ground, settled):
    settled.kill()
    settled.wait()
    of_secret = ("get", "secret", "eu-kubeconfig", "-n", ground.hub.name, "-o", "jsonpath={.metadata.finalizers}")
    assert "prfaas.io/cleanup" in ground.hub.cluster.kubectl(*of_secret), "the Secret is kept before anything is made"
    ground.hub.cluster.kubectl("delete", "namespace", ground.hub.name, "--wait=false")

    def says() -> str:
        phase = ground.hub.cluster.kubectl("get", "namespace", ground.hub.name, "-o", "json")
        return "prfaas.io/cleanup" in phase and "Some content in the namespace has finalizers remaining" in phase

    ground.eventually(says, "the namespace waits for finalizers, and says so")
    assert ground.member.exists("deployment", "away"), "what serves in the member continues"
    follow_the_page(ground)
    ground.eventually(lambda: not exists(ground.hub), "the namespace goes")
    ground.eventually(lambda: not ground.member.listing("deployments,configmaps,secrets"), "the member is empty")
