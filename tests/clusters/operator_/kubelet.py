"""A stand-in for the kubelet: it makes pods ready whose gates are open, and leaves conditions of others alone."""

import contextlib
import json
import threading
from collections import Counter

from kubernetes import client, config
from urllib3.exceptions import HTTPError

ROLE = "prfaas.io/role"


class Pods:
    """The pods of a namespace, asked for without a process a call."""

    def __init__(self, place):
        self._api = client.CoreV1Api(config.new_client_from_config(str(place.cluster.kubeconfig)))
        self._namespace = place.name

    def close(self) -> None:
        self._api.api_client.close()

    def all(self, selector: str = "app.kubernetes.io/component=worker") -> list[dict]:
        answer = self._api.list_namespaced_pod(self._namespace, label_selector=selector, _preload_content=False)
        return json.loads(answer.data)["items"]

    def patch_status(self, name: str, status: dict) -> None:
        with contextlib.suppress(client.ApiException, HTTPError):  # gone meanwhile; what is still there is tended again
            self._api.patch_namespaced_pod_status(
                name,
                self._namespace,
                {"status": status},
                _content_type="application/strategic-merge-patch+json",
                _preload_content=False,
            )


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
            except (client.ApiException, HTTPError):
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


def is_true(pod, condition: str) -> bool:
    held = {one["type"]: one["status"] for one in pod.get("status", {}).get("conditions", [])}
    return held.get(condition) == "True"


def role(pod) -> str:
    return pod["metadata"]["labels"].get(ROLE, "")
