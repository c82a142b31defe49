"""A stand-in for the kubelet: it makes pods ready whose gates are open, and keeps conditions of others."""

import contextlib
import http.client
import json
import threading
from collections import Counter
from urllib.parse import urlencode, urlsplit

from prfaas.kube import kubeconfig

ROLE = "prfaas.io/role"
FAILURES = (OSError, http.client.HTTPException)


class Pods:
    """The pods of a namespace, read without a process for each call."""

    def __init__(self, place):
        session = kubeconfig.load(place.cluster.kubeconfig, None)
        server, tls = urlsplit(session.configuration.host), session._rest.ssl_context
        self._api = http.client.HTTPSConnection(str(server.hostname), server.port, timeout=30, context=tls)
        self._path = f"/api/v1/namespaces/{place.name}/pods"
        self._turn = threading.Lock()

    def close(self) -> None:
        self._api.close()

    def all(self, selector: str = "app.kubernetes.io/component=worker") -> list[dict]:
        return json.loads(self._ask("GET", f"{self._path}?{urlencode({'labelSelector': selector})}"))["items"]

    def patch_status(self, name: str, status: dict) -> None:
        with contextlib.suppress(*FAILURES):  # removed meanwhile; what is still there is tended again
            body = json.dumps({"status": status})
            headers = {"Content-Type": "application/strategic-merge-patch+json"}
            self._ask("PATCH", f"{self._path}/{name}/status", body, headers)

    def _ask(self, method: str, path: str, body: str | None = None, headers: dict[str, str] | None = None) -> bytes:
        with self._turn:
            try:
                self._api.request(method, path, body, headers or {})
                answer = self._api.getresponse()
                content = answer.read()
            except FAILURES:
                self._api.close()
                raise
        if answer.status >= 400:
            raise OSError(f"{method} {path}: {answer.status} {content[:200]!r}")
        return content


class Kubelet(threading.Thread):
    """Makes pods of a namespace Running, and Ready when their gates are open; notes the fewest ready ones of a role."""

    def __init__(self, pods: Pods):
        super().__init__(daemon=True)
        self._pods = pods
        self._over = threading.Event()
        self.floor: Counter[str] | None = None

    def run(self) -> None:
        while not self._over.wait(0.1):
            try:
                pods = self._pods.all()
            except FAILURES:
                continue  # a server under load; a kubelet asks again
            for pod in pods:
                self._tend(pod)
            if self.floor is not None:
                ready = Counter(role(pod) for pod in pods if is_true(pod, "Ready"))
                self.floor = Counter({name: min(least, ready[name]) for name, least in self.floor.items()})

    def _tend(self, pod) -> None:
        gates = pod["spec"].get("readinessGates", [])
        ready = all(is_true(pod, gate["conditionType"]) for gate in gates)
        if ready == is_true(pod, "Ready") and pod["status"].get("phase") == "Running":
            return
        address = "10.9.{}.{}".format(
            *(int(digits, 16) for digits in (pod["metadata"]["uid"][:2], pod["metadata"]["uid"][2:4]))
        )
        status = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        }
        self._pods.patch_status(pod["metadata"]["name"], status)

    def stop(self) -> None:
        self._over.set()
        self.join()
        self._pods.close()


def is_true(pod, condition: str) -> bool:
    held = {one["type"]: one["status"] for one in pod.get("status", {}).get("conditions", [])}
    return held.get(condition) == "True"


def role(pod) -> str:
    return pod["metadata"]["labels"].get(ROLE, "")
