"""The operator's process: connect to the hub, follow it, keep every object until SIGTERM."""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Final

import kopf
import typer

from prfaas.errors import ConfigError, PrfaasError
from prfaas.names import OPERATOR_HEALTH_PORT, OPERATOR_METRICS_PORT
from prfaas_operator import handlers, http
from prfaas_operator.clusters.api import Cluster
from prfaas_operator.clusters.connect import connect_hub, connect_member
from prfaas_operator.reconcile.loop import JUDGES
from prfaas_operator.reconcile.runtime import Runtime

log = logging.getLogger(__name__)

SYNC_SECONDS: Final = 60.0
SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LOG_FORMAT: Final = "%(asctime)s %(levelname).1s %(name)s %(message)s"


def login(settings: kopf.OperatorSettings, **_: object) -> kopf.ConnectionInfo | None:
    """Give kopf the same hub that our own client uses; called again when the API server refuses the old token."""
    if os.environ.get("KUBECONFIG"):
        return kopf.login_with_kubeconfig(settings=settings)
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    return kopf.ConnectionInfo(
        # By address, because a cluster's DNS may be down or missing.
        server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        ca_path=str(SERVICE_ACCOUNT / "ca.crt"),
        token=(SERVICE_ACCOUNT / "token").read_text().strip(),
    )


async def check_resources(hub: Cluster) -> None:
    """Fail at once where the custom resources are missing or may not be read; the message says which."""
    for kind in JUDGES:
        await hub.page(kind)


@contextlib.asynccontextmanager
async def running(hub: Cluster) -> AsyncIterator[Runtime]:
    """Follow the hub's pods and Deployments, and close every connection in the end."""
    runtime = Runtime(hub, connect_member)
    informers = (runtime.pods, runtime.deployments)
    tasks = [asyncio.create_task(informer.run()) for informer in informers]
    try:
        try:
            async with asyncio.timeout(SYNC_SECONDS):
                for informer in informers:
                    await informer.synced.wait()
        except TimeoutError:
            raise ConfigError(f"the hub's pods and Deployments could not be listed in {SYNC_SECONDS:g} s") from None
        yield runtime
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def serve(namespace: str, endpoints: http.Endpoints) -> None:
    """Run until SIGTERM or SIGINT, which kopf turns into an orderly end."""
    ready = asyncio.Event()
    hub = await connect_hub(namespace)
    try:
        await check_resources(hub)
        async with http.serving(endpoints, ready), running(hub) as runtime:
            registry = handlers.register(runtime)
            kopf.on.login(registry=registry)(login)
            await kopf.operator(
                registry=registry,
                settings=handlers.settings(),
                standalone=True,
                namespaces=[namespace],
                ready_flag=ready,
            )
    finally:
        await hub.close()


def run(
    namespace: Annotated[str, typer.Option(help="Namespace of the hub to work in.")],
    host: Annotated[str, typer.Option(help="Address to serve health and metrics on.")] = "127.0.0.1",
    metrics_port: Annotated[int, typer.Option(min=1, max=65535)] = OPERATOR_METRICS_PORT,
    health_port: Annotated[int, typer.Option(min=1, max=65535)] = OPERATOR_HEALTH_PORT,
) -> None:
    """Reconcile the prfaas resources of one namespace. Example: prfaas-operator --namespace prfaas."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    logging.getLogger("kopf").setLevel(logging.WARNING)
    # A line for every event of every object, and a warning for each loop that it cancels on purpose.
    logging.getLogger("kopf.objects").setLevel(logging.ERROR)
    try:
        asyncio.run(serve(namespace, http.Endpoints(host, metrics_port, health_port)))
    except (PrfaasError, OSError) as error:
        log.error("%s", error)
        sys.exit(1)


def main() -> None:
    """Run the `prfaas-operator` command."""
    typer.run(run)


if __name__ == "__main__":
    main()
