"""The real operator, over a hub in memory: python -m benchmarks.hardening.operating

Each line of stdin is JSON: a member cluster to add with its one pool, or the number of replicas that such a pool is to
have. Members are reached over HTTP, with all that the operator has: sessions, informers, probes, reconciles. It ends
when stdin does.
"""

import asyncio
import sys
from typing import Any, Final

import msgspec
from tests.attacks.conftest import MODEL, OPENS, resource, secret
from tests.memory_cluster import MemoryCluster

from prfaas.kube.session import KubeSession
from prfaas.telemetry.tracing import OFF
from prfaas_operator.clusters.client import ClusterClient
from prfaas_operator.clusters.kinds import BY_NAME, PREFILL_POOL, Object
from prfaas_operator.controller.queue import ReconcileQueue, Ref
from prfaas_operator.options import OperatorOptions
from prfaas_operator.plan.certificates import CertificateMode
from prfaas_operator.serve import assemble

IMAGES: Final = ("reg/gateway:1", "reg/worker:1", "reg/connector:1")
OPTIONS: Final = OperatorOptions("ns", *IMAGES, certificates=CertificateMode.DISABLED)


class Told(msgspec.Struct):
    """One line: a member's name, and its URL if it is new, or else the replicas of its pool."""

    member: str
    url: str = ""
    replicas: int = 1


def pool_name(member: str) -> str:
    return f"pool-{member}"


class Operating:
    """The operator and its hub."""

    def __init__(self) -> None:
        self._urls: dict[str, str] = {}
        self._hub: Any = MemoryCluster(secret("kubeconfig", "kubeconfig", kubeconfig=OPENS))
        self.operator = assemble(self._hub, self._connect, ReconcileQueue(), OPTIONS, OFF)
        self._loops: list[asyncio.Task[None]] = []

    async def _connect(self, name: str, namespace: str, _access: object) -> ClusterClient:
        return ClusterClient(KubeSession(self._urls[name]), namespace, f"cluster {name}")

    async def hear(self, told: Told) -> None:
        name = pool_name(told.member)
        if told.url:
            self._urls[told.member] = told.url
            access = {"kubeconfigSecretRef": {"name": "kubeconfig"}, "link": {"capacityMbps": 100}}
            await self._begin(resource("MemberCluster", told.member, **access))
            await self._begin(
                resource("PrefillPool", name, model=MODEL, clusterName=told.member, replicas=told.replicas)
            )
        else:
            pool = self._hub.objects["PrefillPool", name]
            pool["spec"]["replicas"] = told.replicas
            pool["metadata"]["generation"] += 1
            self.operator.controller.hub.put(PREFILL_POOL, await self._hub.get(PREFILL_POOL, name))

    async def _begin(self, body: Object) -> None:
        """Put an object into the hub, and reconcile it from now on."""
        kind, name = BY_NAME[body["kind"]], body["metadata"]["name"]
        self._hub.objects[kind.name, name] = body
        controller = self.operator.controller
        controller.hub.put(kind, await self._hub.get(kind, name))
        self._loops.append(asyncio.create_task(controller.run(Ref(kind, name), body["metadata"]["uid"])))


async def operate() -> None:
    operating = Operating()
    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        await operating.hear(msgspec.json.decode(line, type=Told))


if __name__ == "__main__":
    asyncio.run(operate())
