"""Objects as the API server gives them, as short as a test needs."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from tests.serving import serving

from prfaas.api import DecodePool, MemberCluster, PrefillPool, PrfaaSPolicy
from prfaas.kube import KubeSession
from prfaas_operator.clusters.client import ClusterClient
from prfaas_operator.plan.pod_facts import PodFacts
from prfaas_operator.plan.policy import PolicyFacts

MODEL = {"name": "tiny", "source": "builtin:tiny"}


@asynccontextmanager
async def reached(handle: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[ClusterClient]:
    """The cluster eu, whose API server answers by `handle`."""
    async with serving(handle) as url:
        cluster = ClusterClient(KubeSession(url), "ns", "cluster eu")
        try:
            yield cluster
        finally:
            await cluster.close()


def metadata(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "namespace": "ns", "uid": f"uid-{name}", "generation": 3, **more}


def prefill_pool(name: str = "offload", meta: dict[str, Any] | None = None, **spec: Any) -> PrefillPool:
    wanted = {"clusterName": "eu", "model": MODEL, "replicas": 2, **spec}
    return PrefillPool.model_validate({"metadata": metadata(name, **(meta or {})), "spec": wanted})


def decode_pool(name: str = "decode", **spec: Any) -> DecodePool:
    return DecodePool.model_validate({"metadata": metadata(name), "spec": {"model": MODEL, **spec}})


def member(name: str = "eu", meta: dict[str, Any] | None = None, **spec: Any) -> MemberCluster:
    wanted = {"kubeconfigSecretRef": {"name": "eu-kubeconfig"}, "link": {"capacityMbps": 100}, **spec}
    return MemberCluster.model_validate({"metadata": metadata(name, **(meta or {})), "spec": wanted})


def policy(name: str = "kimi", **spec: Any) -> PrfaaSPolicy:
    wanted = {
        "model": "tiny",
        "decodePool": "decode",
        "prefillPools": ["offload", "local"],
        "threshold": {"mode": "Fixed", "tokens": 900},
        **spec,
    }
    return PrfaaSPolicy.model_validate({"metadata": metadata(name), "spec": wanted})


def pod(name: str, pool: str, **more: Any) -> PodFacts:
    facts = {
        "name": name,
        "pool_uid": f"uid-{pool}",
        "role": "decode" if pool == "decode" else "prefill",
        "pod_ip": "10.0.0.1",
        "host_ip": "192.168.0.1",
        "ready": True,
        "terminating": False,
        "problem": "",
    }
    return PodFacts(**{**facts, **more})


def facts(**changes: Any) -> PolicyFacts:
    """Return a policy with all three pools and a member cluster in place."""
    good = {
        "policy": policy(),
        "decode_pools": {"decode": decode_pool()},
        "prefill_pools": {"offload": prefill_pool(), "local": prefill_pool("local", clusterName="")},
        "clusters": {"eu": member()},
    }
    return PolicyFacts(**{**good, **changes})


@pytest.fixture
def make() -> SimpleNamespace:
    return SimpleNamespace(
        prefill_pool=prefill_pool, decode_pool=decode_pool, member=member, policy=policy, pod=pod, facts=facts
    )
