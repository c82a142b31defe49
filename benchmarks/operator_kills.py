"""Kills the operator at random moments of a scripted life, and counts what did not come out as if nothing had happened.

    prfaas bench operator_kills [--moments N] [--seed S]

Two real control planes, the real operator, no nodes. A life creates a member cluster's pool, a local one and a policy,
scales, changes a template, breaks a child and deletes all. After every step the operator is killed (SIGKILL) at a
random moment and started again; then everything has to be as the step asked for, and no pod template may have changed
that need not: one more ReplicaSet would be instances that restarted for nothing.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from benchmarks.report import Figure, run

from prfaas.names import KUBECONFIG_SECRET, LABEL_SECRET
from prfaas.ports import free_ports
from prfaas.util import Deadline
from prfaas_sandbox.controlplane import ControlPlane
from prfaas_sandbox.tools import Tools, ensure_tools

ROOT = Path(__file__).parents[1]
HUB, MEMBER = "kills", "kills-member"
LONGEST_PAUSE_SECONDS = 2.5
"""An operator that starts has done all it does for a step after about this long."""
CONVERGE_SECONDS = 300.0
MODEL = {"name": "kimi-linear-tiny", "source": "builtin:kimi-linear-tiny"}


@dataclass
class Place:
    """One namespace of one cluster, as its administrator sees it."""

    kubectl_path: Path
    kubeconfig: Path
    namespace: str

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        command = [str(self.kubectl_path), "--kubeconfig", str(self.kubeconfig), "-n", self.namespace, *arguments]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=True).stdout

    def apply(self, *bodies: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(bodies)}))

    def listing(self, kinds: str) -> list[dict[str, Any]]:
        return json.loads(self.kubectl("get", kinds, "-o", "json"))["items"]


def resource(kind: str, name: str, **spec: Any) -> dict[str, Any]:
    return {"apiVersion": "prfaas.io/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


@dataclass
class Want:
    """What has to be there: replicas of each Deployment, and how many templates each has had."""

    replicas: dict[str, int] = field(default_factory=dict)
    templates: dict[str, int] = field(default_factory=dict)


class Stage:
    """Both places with an operator that can be killed, and a life that is lived on them step by step."""

    def __init__(self, hub: Place, member: Place, command: list[str], environment: dict[str, str]):
        self.hub, self.member = hub, member
        self._command, self._environment = command, environment
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        self.operator = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, env=self._environment, stdout=self._log, stderr=self._log)

    def kill(self) -> None:
        self.operator.send_signal(signal.SIGKILL)
        self.operator.wait()
        self.operator = self._start()

    def revive(self) -> None:
        """Start the operator where it has ended by itself, as one that lost its Lease does and a kubelet answers."""
        if self.operator.poll() is not None:
            self.operator = self._start()

    def end(self) -> None:
        self.operator.kill()
        self.operator.wait()
        self._log.close()

    def differs(self, want: Want) -> str:
        """Say what is not as it should be; empty when all is."""
        found: dict[str, int] = {}
        for place in (self.hub, self.member):
            for deployment in place.listing("deployments"):
                found[deployment["metadata"]["name"]] = deployment["spec"]["replicas"]
                status = deployment.get("status", {})
                if status.get("observedGeneration") != deployment["metadata"]["generation"]:
                    return f"{deployment['metadata']['name']} is not observed yet"
        if found != want.replicas:
            return f"replicas {found}, wanted {want.replicas}"
        templates = self.templates()
        return "" if templates == want.templates else f"templates {templates}, wanted {want.templates}"

    def templates(self) -> dict[str, int]:
        """Return how many pod templates each Deployment has had: as many as it has ReplicaSets."""
        counts: dict[str, int] = {}
        for place in (self.hub, self.member):
            for each in place.listing("replicasets"):
                owner = each["metadata"]["ownerReferences"][0]["name"]
                counts[owner] = counts.get(owner, 0) + 1
        return counts

    def statuses_are_current(self) -> bool:
        objects = self.hub.listing("prefillpools,decodepools,prfaaspolicies,memberclusters")
        return all(
            each.get("status", {}).get("observedGeneration") == each["metadata"]["generation"] for each in objects
        )


Step = tuple[str, Callable[[Stage], None], Want]


def life(secret: dict[str, Any]) -> Iterator[Step]:
    """Yield the steps of one life: its name, what a person does, and what has to be there in the end."""
    pool = {"model": MODEL, "replicas": 2}
    link = {"kubeconfigSecretRef": {"name": "far-kubeconfig"}, "namespace": MEMBER, "link": {"capacityMbps": 100}}
    policy = {"model": MODEL["name"], "decodePool": "decode", "prefillPools": ["offload"]}
    fixed = {"threshold": {"mode": "Fixed", "tokens": 1000}}
    one = {"offload": 1, "decode": 1, "kimi-gateway": 1}

    def create(stage: Stage) -> None:
        stage.hub.apply(
            secret,
            resource("MemberCluster", "far", **link),
            resource("PrefillPool", "offload", clusterName="far", **pool),
            resource("DecodePool", "decode", **pool),
            resource("PrfaaSPolicy", "kimi", **policy, **fixed),
        )

    yield "create", create, Want({"offload": 2, "decode": 2, "kimi-gateway": 1}, one)

    def scale(stage: Stage) -> None:
        stage.hub.kubectl("scale", "prefillpool/offload", "--replicas=5")
        stage.hub.kubectl("scale", "decodepool/decode", "--replicas=0")

    yield "scale", scale, Want({"offload": 5, "decode": 0, "kimi-gateway": 1}, one)

    def update(stage: Stage) -> None:
        patch = json.dumps({"spec": {"template": {"labels": {"team": "blue"}}, "replicas": 3}})
        stage.hub.kubectl("patch", "prefillpool", "offload", "--type=merge", "-p", patch)

    two = {**one, "offload": 2}
    yield "update", update, Want({"offload": 3, "decode": 0, "kimi-gateway": 1}, two)

    def retune(stage: Stage) -> None:
        patch = json.dumps({"spec": {"threshold": {"tokens": 2000}}})
        stage.hub.kubectl("patch", "prfaaspolicy", "kimi", "--type=merge", "-p", patch)

    yield "retune", retune, Want({"offload": 3, "decode": 0, "kimi-gateway": 1}, two)

    def edit(stage: Stage) -> None:
        stage.member.kubectl("scale", "deployment/offload", "--replicas=9")
        stage.hub.kubectl("delete", "deployment", "kimi-gateway", "--cascade=foreground")

    yield "edit children", edit, Want({"offload": 3, "decode": 0, "kimi-gateway": 1}, two)

    def drop(stage: Stage) -> None:
        stage.hub.kubectl("delete", "prfaaspolicies,decodepools", "--all", "--wait=false")

    yield "drop", drop, Want({"offload": 3}, {"offload": 2})

    def clear(stage: Stage) -> None:
        stage.hub.kubectl("delete", "prefillpools,memberclusters", "--all", "--wait=false")

    yield "clear", clear, Want()


@dataclass
class Outcome:
    """What became of one kill."""

    step: str
    pause_seconds: float
    converged_seconds: float
    problem: str


def live(stage: Stage, secret: dict[str, Any], chance: random.Random, moments: int) -> Iterator[Outcome]:
    """Live life after life, with a kill in each step, until there were as many kills as asked for."""
    killed = 0
    while killed < moments:
        for name, act, want in life(secret):
            act(stage)
            # The last life is lived to its end, without further kills.
            pause_seconds = chance.uniform(0.0, LONGEST_PAUSE_SECONDS) if killed < moments else None
            if pause_seconds is not None:
                time.sleep(pause_seconds)
                stage.kill()
                killed += 1
            started = time.monotonic()
            problem = converge(stage, want)
            if pause_seconds is not None:
                yield Outcome(name, pause_seconds, time.monotonic() - started, problem)


def converge(stage: Stage, want: Want) -> str:
    """Wait until all is as wanted; return what is not, where that takes too long."""
    deadline = Deadline(CONVERGE_SECONDS)
    while True:
        stage.revive()
        problem = stage.differs(want) or ("" if stage.statuses_are_current() else "a status is not current")
        if not problem and not want.replicas:
            left = stage.hub.listing("prefillpools,decodepools,prfaaspolicies,memberclusters")
            problem = f"{len(left)} objects are left" if left else ""
        if not problem or deadline.is_over:
            return problem
        time.sleep(0.2)


def prepare(hub: Place, member: Place, helm: Path) -> None:
    """Make both namespaces, the kinds and the accounts, as the charts do."""
    for place, chart in ((hub, "prfaas"), (member, "prfaas-member")):
        place.kubectl("create", "namespace", place.namespace)
        command = [str(helm), "template", "prfaas", str(ROOT / "charts" / chart), "-n", place.namespace]
        command += ["--show-only", "templates/rbac.yaml"] if chart == "prfaas" else []
        place.kubectl("apply", "-f", "-", stdin=subprocess.check_output(command, text=True))
    hub.kubectl("apply", "-f", str(ROOT / "crds"))
    hub.kubectl("wait", "--for=condition=Established", "-f", str(ROOT / "crds"), "--timeout=60s")


def credentials(place: Place) -> str:
    """Return a kubeconfig with a token of the operator's account in a place, as JSON."""
    config = yaml.safe_load(place.kubeconfig.read_text())
    token = place.kubectl("create", "token", "prfaas-operator", "--duration=5h").strip()
    config["users"][0]["user"] = {"token": token}
    return json.dumps(config)


def open_stage(hub: Place, member: Place, folder: Path) -> tuple[Stage, dict[str, Any]]:
    """Start an operator on two prepared places; return it with the Secret that leads to the member."""
    kubeconfig = folder / "operator.kubeconfig"
    kubeconfig.write_text(credentials(hub))
    metrics_port, health_port = free_ports(2)
    command = [sys.executable, "-m", "prfaas_operator", "--namespace", hub.namespace, "--leader-elect"]
    command += ["--gateway-image", "gateway", "--worker-image", "worker", "--connector-image", "connector"]
    command += ["--metrics-port", str(metrics_port), "--health-port", str(health_port)]
    # A container that starts again keeps its pod's name, and so its Lease.
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "POD_NAME": "operator-0"}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "far-kubeconfig", "labels": {LABEL_SECRET: KUBECONFIG_SECRET}},
        "stringData": {"kubeconfig": credentials(member)},
    }
    return Stage(hub, member, command, environment), secret


async def _outcomes(tools: Tools, folder: Path, moments: int, chance: random.Random) -> list[Outcome]:
    (folder / "hub").mkdir()
    (folder / "member").mkdir()
    async with (
        ControlPlane.start("hub", tools, folder / "hub", scheduler=False) as here,
        ControlPlane.start("member", tools, folder / "member", scheduler=False) as there,
    ):
        hub = Place(tools["kubectl"], here.kubeconfig, HUB)
        member = Place(tools["kubectl"], there.kubeconfig, MEMBER)
        await asyncio.to_thread(prepare, hub, member, tools["helm"])
        stage, secret = open_stage(hub, member, folder)
        return await asyncio.to_thread(_lived, stage, live(stage, secret, chance, moments))


def _lived(stage: Stage, life: Iterator[Outcome]) -> list[Outcome]:
    outcomes = []
    try:
        for outcome in life:
            outcomes.append(outcome)
            result = outcome.problem or "as if nothing had happened"
            print(
                f"{len(outcomes)}: {outcome.step}, killed after {outcome.pause_seconds:.2f} s: {result}",
                file=sys.stderr,
            )
    finally:
        stage.end()
    return outcomes


def figures(moments: int = 50, seed: int = 1) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="prfaas-kills-") as folder:
        outcomes = asyncio.run(_outcomes(ensure_tools(print), Path(folder), moments, random.Random(seed)))
    failed = [outcome for outcome in outcomes if outcome.problem]
    slowest = max(outcome.converged_seconds for outcome in outcomes)
    yield Figure(name="kills", value=len(outcomes), unit="", better="higher")
    yield Figure(name="kills that left something else than asked for", value=len(failed), unit="", reach=0)
    yield Figure(name="slowest convergence after a kill, start included", value=slowest, unit="s")


if __name__ == "__main__":
    run("operator_kills", __doc__, figures)
