"""Checks an installation of the chart from inside its namespace, as a pod of `helm test` with the operator's image.

Each of three checks has its own cause of failure. Our kinds are served, the operator's Deployment is available, and an
operator answers on its metrics port. The last check uses addresses: the cluster's DNS is not under test.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final

import aiohttp
import typer

from prfaas.api import KINDS
from prfaas.bounds.answers import ACCEPTED, read_at_most, unpacked
from prfaas.errors import PeerError, PrfaasError, UnreachableError
from prfaas.kube import KubeSession, ObjectRef
from prfaas.names import API_VERSION
from prfaas.ports import url_host
from prfaas.util import Deadline
from prfaas_operator.clusters.kinds import DEPLOYMENT

OPERATOR: Final = "prfaas-operator"
METRIC: Final = "prfaas_operator_"
POLL_SECONDS: Final = 1.0
CALL_SECONDS: Final = 5.0
MAX_METRICS_BYTES: Final = 4 << 20

Check = Callable[[KubeSession, str], Awaitable[str]]


async def kinds_are_served(session: KubeSession, _: str) -> str:
    """Raise PeerError unless the API server serves every kind; return the served kinds."""
    path = f"/apis/{API_VERSION}"
    served = {each["name"] for each in (await session.call("GET", path, timeout_seconds=CALL_SECONDS))["resources"]}
    if missing := sorted({kind.plural for kind in KINDS} - served):
        raise PeerError(f"{path} does not serve {', '.join(missing)}: install the CRDs (crds.enabled, or crds/)")
    return f"{path} serves {', '.join(sorted(kind.plural for kind in KINDS))}"


async def operator_is_available(session: KubeSession, namespace: str) -> str:
    """Raise PeerError unless the operator's Deployment has a ready pod; return the number of ready pods."""
    ref = ObjectRef(DEPLOYMENT, namespace, OPERATOR)
    live = await session.call("GET", ref.path, timeout_seconds=CALL_SECONDS)
    ready, wanted = live.get("status", {}).get("readyReplicas", 0), live["spec"]["replicas"]
    if ready == 0:
        raise PeerError(f"{ref} has no ready pod of {wanted}: see `kubectl -n {namespace} describe deploy/{OPERATOR}`")
    return f"{ref} has {ready} ready pods of {wanted}"


async def metrics_are_answered(session: KubeSession, namespace: str) -> str:
    """Raise PeerError unless every ready pod behind the operator's Service answers with its metrics."""
    path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
    query = {"labelSelector": f"kubernetes.io/service-name={OPERATOR}"}
    slices = await session.call("GET", path, query=query, timeout_seconds=CALL_SECONDS)
    urls = [f"http://{host}:{port}/metrics" for each in slices["items"] for host, port in addresses(each)]
    if not urls:
        raise PeerError(f"the Service {OPERATOR} has no ready pod")
    for url in urls:
        if METRIC not in await _text(url):
            raise PeerError(f"{url} has no metric {METRIC}*: another program listens there")
    return f"{', '.join(urls)} answers"


def addresses(endpoint_slice: dict[str, Any]) -> list[tuple[str, int]]:
    """Return (host, metrics port) of the ready pods of an EndpointSlice, with IPv6 in brackets for URLs."""
    ports = [port["port"] for port in endpoint_slice.get("ports") or () if port.get("name") == "metrics"]
    hosts = [
        url_host(host)
        for endpoint in endpoint_slice.get("endpoints") or ()
        if endpoint.get("conditions", {}).get("ready")
        for host in endpoint["addresses"]
    ]
    return [(host, port) for host in hosts for port in ports]


async def _text(url: str) -> str:
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_SECONDS), auto_decompress=False) as client,
            client.get(url, allow_redirects=False, headers=ACCEPTED) as answer,
        ):
            return (await read_at_most(unpacked(answer), MAX_METRICS_BYTES)).decode(errors="replace")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UnreachableError(
            f"{url} does not answer ({error}): does a NetworkPolicy block this namespace's pods?"
        ) from error


CHECKS: Final[tuple[Check, ...]] = (kinds_are_served, operator_is_available, metrics_are_answered)


async def check(session: KubeSession, namespace: str, patience_seconds: float, say: Callable[[str], None]) -> bool:
    """Run all checks, each until it holds or their common deadline passes; print each result. True if all hold."""
    deadline = Deadline(patience_seconds)
    good = True
    for each in CHECKS:
        while True:
            try:
                say(f"ok      {await each(session, namespace)}")
                break
            except PrfaasError as error:
                if deadline.is_over:
                    say(f"FAILED  {error}")
                    good = False
                    break
            await asyncio.sleep(POLL_SECONDS)
    return good


def run(
    namespace: Annotated[str, typer.Option(help="Namespace of the release.")],
    patience_seconds: Annotated[float, typer.Option(min=0, help="Longest wait for a new installation.")] = 60.0,
) -> None:
    """Check an installation from inside; the exit code is 0 if it works."""

    async def all_of_it() -> bool:
        async with KubeSession.in_cluster() as session:
            return await check(session, namespace, patience_seconds, lambda line: print(line, flush=True))

    try:
        good = asyncio.run(all_of_it())
    except PrfaasError as error:
        print(f"FAILED  {error}")
        good = False
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    typer.run(run)
