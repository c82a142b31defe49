"""The operator's two HTTP ports: /metrics for Prometheus, /healthz and /readyz for the kubelet."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import prometheus_client
from aiohttp import web

from prfaas.http_server import serving_probes
from prfaas_operator.options import OperatorOptions

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST


class Health:
    """Answers the probes. `ready` is set once; `obstacle` names a problem that does not end by itself, or is empty."""

    def __init__(self, obstacle: Callable[[], str]) -> None:
        self.ready = asyncio.Event()
        self.obstacle = obstacle


@contextlib.asynccontextmanager
async def serving(options: OperatorOptions, health: Health) -> AsyncIterator[None]:
    """Serve two ports: /healthz while the event loop runs and no object is stuck, /readyz once the process is ready."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=prometheus_client.generate_latest(), headers={"Content-Type": CONTENT_TYPE})

    async def healthz(_: web.Request) -> web.Response:
        obstacle = health.obstacle()
        return web.Response(text=f"{obstacle or 'ok'}\n", status=503 if obstacle else 200)

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n") if health.ready.is_set() else web.Response(text="starting\n", status=503)

    scraped, probed = web.Application(), web.Application()
    scraped.add_routes([web.get("/metrics", metrics)])
    probed.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz)])
    async with (
        serving_probes(scraped, options.host, options.metrics_port),
        serving_probes(probed, options.host, options.health_port),
    ):
        yield
