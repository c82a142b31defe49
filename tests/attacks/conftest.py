"""The operator's own reconciles over an API server in memory, and what its pods would then read, run and say.

Each attack comes with a control: the same steps with one defence taken out, and the attack works. So the defence that
is named is the one that holds.
"""

import base64
from typing import Any, Final
from unittest.mock import AsyncMock

import pytest
from tests.memory_cluster import MemoryCluster

from prfaas.names import LABEL_SECRET
from prfaas.telemetry.tracing import OFF
from prfaas_operator.clusters.kinds import BY_NAME, Object
from prfaas_operator.controller.queue import ReconcileQueue, Ref
from prfaas_operator.controller.status import ReconcileResult
from prfaas_operator.errors import ClusterUnreachableError
from prfaas_operator.options import OperatorOptions
from prfaas_operator.plan.certificates import CertificateMode
from prfaas_operator.reconcile.certificates import Certificates
from prfaas_operator.render.service_account import kubeconfig
from prfaas_operator.serve import assemble

MODEL: Final = {"name": "tiny", "source": "builtin:tiny"}
GATEWAY_IMAGE: Final = "registry.example/gateway:7"
WORKER_IMAGE: Final = "registry.example/worker:7"


def resource(kind: str, name: str, **spec: Any) -> Object:
    metadata = {"name": name, "namespace": "ns", "uid": f"uid-{name}", "generation": 1, "resourceVersion": "1"}
    return {"apiVersion": "prfaas.io/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}


def pool(name: str = "decode", **spec: Any) -> Object:
    return resource("DecodePool", name, model=MODEL, **spec)


def policy(**gateway: Any) -> Object:
    return resource(
        "PrfaaSPolicy", "kimi", model="tiny", decodePool="decode", threshold={"mode": "Disabled"}, gateway=gateway
    )


def secret(name: str, use: str = "", **data: str) -> Object:
    labels = {LABEL_SECRET: use} if use else {}
    return {"kind": "Secret", "metadata": {"name": name, "namespace": "ns", "uid": "s", "labels": labels}, "data": data}


PEM: Final = "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"
OPENS: Final = base64.b64encode(kubeconfig("eu", "https://192.0.2.1", PEM, "t").encode()).decode()
"""A kubeconfig that the operator takes, as an entry of a Secret."""


def member(secret_name: str) -> Object:
    return resource("MemberCluster", "eu", kubeconfigSecretRef={"name": secret_name}, link={"capacityMbps": 100})


class Hub:
    """A hub with some objects, and the operator with further `options`; `connected` are the members that it connected
    to."""

    def __init__(self, mode: CertificateMode, *objects: Object, **options: str):
        self.server = MemoryCluster(*objects)
        self.connected: list[str] = []
        issuer = "Issuer.cert-manager.io/ours" if mode is CertificateMode.ISSUER else ""
        flags = OperatorOptions("ns", GATEWAY_IMAGE, WORKER_IMAGE, "c:7", certificates=mode, certificate_issuer=issuer)
        flags = flags._replace(**options)
        operator = assemble(self.server, self._connect, ReconcileQueue(), flags, OFF)  # pyright: ignore[reportArgumentType]
        self.controller, self.certificates = operator.controller, operator.certificates
        for one in objects:
            if "apiVersion" in one and one["apiVersion"].startswith("prfaas.io/"):
                self.controller.hub.put(BY_NAME[one["kind"]], one)

    async def _connect(self, name: str, *_: Any) -> Any:
        self.connected.append(name)
        raise ClusterUnreachableError("far enough")

    async def reconcile(self, kind: str, name: str) -> ReconcileResult:
        uid = self.server.objects[kind, name]["metadata"]["uid"]
        return await self.controller.reconcile(Ref(BY_NAME[kind], name), uid, is_resync=True)

    def ready(self, kind: str, name: str) -> Object:
        conditions = self.server.objects[kind, name]["status"]["conditions"]
        return next(one for one in conditions if one["type"] == "Ready")

    def pod(self, deployment: str) -> Object:
        """Return the pod of a Deployment; nothing if there is no such Deployment."""
        live = self.server.objects.get(("Deployment", deployment))
        return live["spec"]["template"] if live else {"spec": {"containers": [], "volumes": []}}

    def loot(self, deployment: str) -> set[str]:
        """Return the Secrets that the pods of a Deployment would read or be pulled with."""
        spec = self.pod(deployment)["spec"]
        mounted = {one["secret"]["secretName"] for one in spec.get("volumes") or () if "secret" in one}
        sources = (env.get("valueFrom") or {} for one in spec["containers"] for env in one.get("env") or ())
        read = {source["secretKeyRef"]["name"] for source in sources if "secretKeyRef" in source}
        return mounted | read | {one["name"] for one in spec.get("imagePullSecrets") or ()}

    def images(self, deployment: str) -> set[str]:
        return {one["image"] for one in self.pod(deployment)["spec"]["containers"]}


@pytest.fixture
def plain_hub():
    """Return a hub without certificates, by its objects and its operator's options."""
    return lambda *objects, **options: Hub(CertificateMode.DISABLED, *objects, **options)


@pytest.fixture
def tls_hub(monkeypatch: pytest.MonkeyPatch, bare_tls_hub: Any):
    """Return a hub whose certificates have been issued, by its objects; `mode` chooses another mode."""
    monkeypatch.setattr(Certificates, "wait_delivered", AsyncMock())
    return bare_tls_hub


@pytest.fixture
def bare_tls_hub():
    """Return a hub with certificates, by its objects: none is issued before a pass."""
    return lambda *objects, mode=CertificateMode.OPERATOR, trust_domain="": Hub(
        mode, *objects, trust_domain=trust_domain
    )
