"""The real operator process between two real API servers, with no more rights than the charts give it.

Each test module gets fresh namespaces in both clusters and its own operator. There are no nodes: the real
controller manager makes pods, and a test that needs one ready writes its status, as a kubelet would.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import pytest
import yaml
from tests import waiting
from tests.waiting import PATIENCE_SECONDS

from prfaas.names import KUBECONFIG_SECRET, LABEL_SECRET
from prfaas.ports import free_ports
from prfaas.processes import ends_with_us

from ..reader import Reader, UnansweredError

ROOT = Path(__file__).resolve().parents[3]
ANY_NAMESPACE = "namespace-of-a-test"
CHILDREN = "app.kubernetes.io/managed-by=prfaas-operator"
CHILD_KINDS = (
    "deployments,replicasets,pods,services,configmaps,serviceaccounts,roles,rolebindings,networkpolicies,leases,"
    "poddisruptionbudgets"
)
MODEL = {"name": "kimi-linear-tiny", "source": "builtin:kimi-linear-tiny"}


class Cluster(Protocol):
    """What tests/clusters/conftest.py gives: one running control plane."""

    kubeconfig: Path
    reader: Reader

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str: ...

    def install_crds(self) -> None: ...


def eventually(
    check: Callable[[], Any],
    what: str,
    timeout_seconds: float = PATIENCE_SECONDS,
    found: Callable[[], object] = lambda: "",
) -> Any:
    """Return what `check` returns once that is true; fail with `what`, and with what is `found`, when it never is."""
    return waiting.eventually(check, lambda: f"{what}\n{found()}", timeout_seconds, poll=0.1)


class Namespace:
    """One namespace of one cluster, through kubectl as its administrator."""

    def __init__(self, cluster: Cluster, name: str):
        self.cluster = cluster
        self.name = name

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self.cluster.kubectl("-n", self.name, *arguments, stdin=stdin)

    def apply(self, *bodies: dict[str, Any]) -> None:
        for body in bodies:
            try:
                self.cluster.reader.apply(self.name, body)
            except UnansweredError:  # kubectl tells why
                self.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(body))

    def patch(self, kind: str, name: str, change: dict[str, Any], manager: str = "tests") -> None:
        self.cluster.reader.patch(self.name, kind, name, change, manager)

    def scale(self, kind: str, name: str, replicas: int) -> None:
        self.cluster.reader.scale(self.name, kind, name, replicas)

    def delete(self, kind: str, *names: str, wait: bool = True) -> None:
        """Delete objects of a kind, and wait until they are removed, unless `wait` is false."""
        removed = [self.cluster.reader.delete(self.name, kind, name) for name in names]
        assert all(removed), f"there are no {kind} {' '.join(names)}"
        if wait:
            self._wait_removed([(kind, each) for each in removed if each])

    def delete_all(self, kinds: str) -> None:
        """Delete all objects of some kinds, and wait until they are removed."""
        found = [(each["kind"].lower(), each) for each in self.cluster.reader.list_all(self.name, kinds)]
        for kind, each in found:
            self.cluster.reader.delete(self.name, kind, each["metadata"]["name"])
        self._wait_removed(found)

    def _wait_removed(self, objects: list[tuple[str, dict[str, Any]]]) -> None:
        for kind, old in objects:
            name, uid = old["metadata"]["name"], old["metadata"]["uid"]

            def is_removed(kind: str = kind, name: str = name, uid: str = uid) -> bool:
                found = self.cluster.reader.get(self.name, kind, name)
                return found is None or found["metadata"]["uid"] != uid

            eventually(is_removed, f"{kind} {name} is removed")

    def get(self, kind: str, name: str) -> dict[str, Any]:
        return self.find(kind, name) or json.loads(self.kubectl("get", kind, name, "-o", "json"))

    def find(self, kind: str, name: str) -> dict[str, Any] | None:
        """Return an object, None where there is none."""
        with contextlib.suppress(UnansweredError):
            return self.cluster.reader.get(self.name, kind, name)
        return json.loads(self.kubectl("get", kind, name, "--ignore-not-found", "-o", "json") or "null")

    def exists(self, kind: str, name: str) -> bool:
        return self.find(kind, name) is not None

    def listing(self, kinds: str, selector: str = CHILDREN) -> list[dict[str, Any]]:
        with contextlib.suppress(UnansweredError):
            return self.cluster.reader.list_all(self.name, kinds, selector)
        return json.loads(self.kubectl("get", kinds, "-l", selector, "-o", "json"))["items"]

    def events(self, name: str = "", reason: str = "", type_: str = "") -> list[dict[str, Any]]:
        """Return the Events about an object, of a reason and a type if any."""
        chosen = {"involvedObject.name": name, "reason": reason, "type": type_}
        fields = ",".join(f"{field}={value}" for field, value in chosen.items() if value)
        return self.cluster.reader.list_all(self.name, "events", fields=fields)

    def messages(self, name: str, reason: str, type_: str = "") -> list[str]:
        """Return the messages of such Events."""
        return [event["message"] for event in self.events(name, reason, type_)]

    def token(self, account: str, hours: int = 1) -> str:
        return self.cluster.reader.token(self.name, account, hours * 3600)

    def condition(self, kind: str, name: str, type_: str = "Ready") -> dict[str, Any]:
        conditions = self.get(kind, name).get("status", {}).get("conditions", [])
        return next((one for one in conditions if one["type"] == type_), {"status": "", "reason": "", "message": ""})

    def wait_reason(
        self, kind: str, name: str, reason: str, timeout_seconds: float = PATIENCE_SECONDS
    ) -> dict[str, Any]:
        """Return the condition Ready once it has a reason."""

        def reached() -> dict[str, Any] | None:
            found = self.condition(kind, name)
            return found if found["reason"] == reason else None

        what = f"{kind} {name} has reason {reason}"
        return eventually(reached, what, timeout_seconds, lambda: json.dumps(self.get(kind, name).get("status")))

    def set_pod(self, name: str, *, address: str, ready: bool = True, phase: str = "Running") -> None:
        """Write a pod's status the way a kubelet does."""
        status = {
            "phase": phase,
            "podIP": address,
            "podIPs": [{"ip": address}],
            "hostIP": "192.168.7.7",
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        }
        with contextlib.suppress(UnansweredError):
            if self.cluster.reader.patch_status(self.name, "pod", name, status):
                return
        patch = json.dumps({"status": status})
        self.kubectl("patch", "pod", name, "--subresource=status", "--type=merge", "-p", patch)

    def pods(self, pool: str) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.listing("pods", f"prfaas.io/pool={pool}")]

    def ready_up(self, pool: str, prefix: str) -> list[str]:
        """Make all pods of a pool ready, with addresses PREFIX.1, PREFIX.2, ...; return their names."""
        names = eventually(lambda: self.pods(pool), f"pool {pool} has pods")
        for index, name in enumerate(names, start=1):
            self.set_pod(name, address=f"{prefix}.{index}")
        return names


def resource(kind: str, name: str, **spec: Any) -> dict[str, Any]:
    """Return one custom resource."""
    return {"apiVersion": "prfaas.io/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def pool(kind: str, name: str, **spec: Any) -> dict[str, Any]:
    """Return a pool of the tiny model."""
    return resource(kind, name, **{"model": MODEL, "replicas": 1, **spec})


class World:
    """Hub and member namespaces with an operator between them, and the words that the tests are written in."""

    eventually = staticmethod(eventually)
    resource = staticmethod(resource)
    pool = staticmethod(pool)

    def __init__(self, hub: Namespace, member: Namespace, log: Path, metrics_port: int):
        self.hub = hub
        self.member = member
        self.log = log
        self._metrics_port = metrics_port

    def kubeconfig(self, server: str | None = None) -> dict[str, Any]:
        """Return a kubeconfig for the member that is accepted: the chart's account, by token."""
        token = self.member.token("prfaas-operator", hours=2)
        cluster = yaml.safe_load(self.member.cluster.kubeconfig.read_text())["clusters"][0]["cluster"]
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": cluster | ({"server": server} if server else {})}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }

    def administrator(self) -> str:
        """Return the member's own kubeconfig, with a client certificate, as JSON."""
        return json.dumps(yaml.safe_load(self.member.cluster.kubeconfig.read_text()))

    def secret(self, name: str, kubeconfig: dict[str, Any]) -> dict[str, Any]:
        document = json.dumps(kubeconfig)
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": f"{name}-kubeconfig", "labels": {LABEL_SECRET: KUBECONFIG_SECRET}},
            "stringData": {"kubeconfig": document},
        }

    def member_cluster(self, name: str, secret: str, **spec: Any) -> dict[str, Any]:
        return resource(
            "MemberCluster",
            name,
            kubeconfigSecretRef={"name": f"{secret}-kubeconfig"},
            namespace=self.member.name,
            link={"capacityMbps": 100},
            **spec,
        )

    def join(self, name: str, **spec: Any) -> None:
        """Register the member under a name, and wait until it can be used."""
        self.hub.apply(self.secret(name, self.kubeconfig()), self.member_cluster(name, name, **spec))
        self.hub.wait_reason("pmc", name, "AllReady")

    def metrics(self) -> dict[str, float]:
        """Return the operator's own metrics."""
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=PATIENCE_SECONDS
        ) as answer:
            lines = answer.read().decode().splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}

    def writes(self) -> float:
        """Return how often the operator has written anything so far."""
        return sum(value for name, value in self.metrics().items() if "_writes_total" in name)

    def children(self) -> list[str]:
        """Return everything that the operator made and that is still there, in both clusters."""
        return [
            f"{where.name}: {child['kind']} {child['metadata']['name']}"
            for where in (self.hub, self.member)
            for child in where.listing(CHILD_KINDS)
        ]


class Tap:
    """A TCP relay in front of an API server, which can freeze: connections stay open, no byte passes."""

    def __init__(self, target: tuple[str, int]):
        self._target = target
        self._flowing = threading.Event()
        self._flowing.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self) -> None:
        self._flowing.clear()

    def thaw(self) -> None:
        self._flowing.set()

    def close(self) -> None:
        self._flowing.set()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                return
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._relay, args=(source, sink), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self._flowing.wait()
                sink.sendall(data)
        except OSError:
            pass
        for side in (source, sink):
            side.close()


def tapped(cluster: Cluster) -> Iterator[Tap]:
    server = yaml.safe_load(cluster.kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
    host, port = server.removeprefix("https://").rsplit(":", 1)
    made = Tap((host, int(port)))
    yield made
    made.close()


@pytest.fixture(scope="module")
def tap(member: Cluster) -> Iterator[Tap]:
    """Give one for a whole file: members that are registered through it outlive a test."""
    yield from tapped(member)


@pytest.fixture
def hub_tap(hub: Cluster) -> Iterator[Tap]:
    yield from tapped(hub)


@pytest.fixture(scope="session")
def rendered(tools: Any) -> Callable[..., list[dict[str, Any]]]:
    """Return how to get objects of a chart as Helm renders them, once for all namespaces."""

    @cache
    def render(chart: str, *templates: str) -> str:
        command = [tools["helm"], "template", "prfaas", ROOT / "charts" / chart, "-n", ANY_NAMESPACE]
        command += [word for template in templates for word in ("--show-only", f"templates/{template}")]
        return subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout

    def objects(chart: str, namespace: str, *templates: str) -> list[dict[str, Any]]:
        text = render(chart, *templates).replace(ANY_NAMESPACE, namespace)
        return [body for body in yaml.load_all(text, yaml.CSafeLoader) if body]

    return objects


def operator_kubeconfig(hub: Namespace, path: Path) -> Path:
    """Write a kubeconfig with a token of the operator's ServiceAccount: the rights of the chart and no more."""
    config = yaml.safe_load(hub.cluster.kubeconfig.read_text())
    token = hub.token("prfaas-operator")
    config["users"][0]["user"] = {"token": token}
    path.write_text(json.dumps(config))
    return path


def start_operator(
    namespace: str, kubeconfig: Path, log: Path, ports: list[int], *flags: str, **variables: str
) -> subprocess.Popen[bytes]:
    """Start the operator and wait until it is ready."""
    command = [*ends_with_us(), sys.executable, "-m", "prfaas_operator", "--namespace", namespace]
    command += [
        "--gateway-image",
        "reg/g:1",
        "--worker-image",
        "reg/w:1",
        "--connector-image",
        "reg/c:1",
        "--host",
        "127.0.0.1",
        "--metrics-port",
        str(ports[0]),
        "--health-port",
        str(ports[1]),
        *flags,
    ]
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig), **variables}
    with log.open("ab") as sink:
        process = subprocess.Popen(command, env=environment, stdout=sink, stderr=subprocess.STDOUT)

    def is_ready() -> bool:
        assert process.poll() is None, f"the operator ended: {log.read_text()}"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{ports[1]}/readyz", timeout=2) as answer:
                return answer.status == 200
        except OSError:
            return False

    eventually(is_ready, "the operator is ready", 180)
    return process


@pytest.fixture(scope="module")
def ground(
    hub: Cluster, member: Cluster, rendered: Callable[..., list[dict[str, Any]]], request: pytest.FixtureRequest
) -> World:
    """Both namespaces as the charts leave them, without an operator."""
    name = request.module.__name__.rsplit(".", 1)[-1].removeprefix("test_").replace("_", "-")
    here, there = Namespace(hub, f"{name}-hub"), Namespace(member, f"{name}-member")
    for place in (here, there):
        place.cluster.reader.create_namespace(place.name)
    hub.install_crds()
    here.apply(*rendered("prfaas", here.name, "rbac.yaml"))
    there.apply(*rendered("prfaas-member", there.name))
    return World(here, there, Path(os.devnull), 0)


@pytest.fixture
def operators(ground: World) -> SimpleNamespace:
    """Return how to start operators on the ground, several and with flags."""
    return SimpleNamespace(start=start_operator, kubeconfig=operator_kubeconfig, free_ports=free_ports)


@pytest.fixture(scope="module")
def operator_flags() -> tuple[str, ...]:
    """Flags of the operator that `world` starts; a module may have its own."""
    return ()


@pytest.fixture(scope="module")
def operator_variables() -> dict[str, str]:
    """The same of its environment."""
    return {}


@pytest.fixture(scope="module")
def world(ground: World, tmp_path_factory, operator_flags, operator_variables) -> Iterator[World]:
    here, folder = ground.hub, tmp_path_factory.mktemp("operator")
    ports = free_ports(2)
    log = folder / "operator.log"
    kubeconfig = operator_kubeconfig(here, folder / "kubeconfig")
    process = start_operator(here.name, kubeconfig, log, ports, *operator_flags, **operator_variables)
    yield World(here, ground.member, log, ports[0])
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=100) == 0, log.read_text()
    assert "Traceback" not in log.read_text(), log.read_text()
