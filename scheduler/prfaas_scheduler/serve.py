"""The scheduler's process: the loop, the status writer and the metrics port, until SIGTERM."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Sequence

import aiohttp

from prfaas.errors import ConfigError
from prfaas.http_server import serving_probes
from prfaas.kube import KubeSession
from prfaas.memory import SCHEDULER, bounds_part, container_limit_bytes
from prfaas_scheduler.gateway import GatewayClient
from prfaas_scheduler.loop import Loop
from prfaas_scheduler.metrics import SchedulerMetrics
from prfaas_scheduler.options import SchedulerOptions
from prfaas_scheduler.status import Publisher, policy_ref

log = logging.getLogger(__name__)


async def serve(options: SchedulerOptions) -> None:
    prometheus_part = bounds_part(SCHEDULER, container_limit_bytes())
    if prometheus_part < 1:
        usual = "by this container's memory limit Prometheus may answer %d %% of what is usual"
        log.warning(usual, 100 * prometheus_part)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    metrics = SchedulerMetrics()
    async with (
        serving_probes(metrics.application(), options.host, options.metrics_port),
        GatewayClient(options.control_socket) as gateway,
        aiohttp.ClientSession(trust_env=False) as http,
        contextlib.AsyncExitStack() as stack,
    ):
        loop = Loop(gateway, http, metrics, bounds_part=prometheus_part)
        parts = [asyncio.create_task(loop.run())]
        if session := _api_server():
            await stack.enter_async_context(session)
            policy = policy_ref(options.namespace, options.policy)
            publisher = Publisher(session, policy, options.identity, lambda: loop.report)
            parts.append(asyncio.create_task(publisher.run()))
        await _until(stop, parts)


def _api_server() -> KubeSession | None:
    """Return a session with the API server; None outside a cluster, where there is no status to write."""
    try:
        return KubeSession.in_cluster()
    except ConfigError as error:
        log.warning("no status is written: %s", error)
        return None


async def _until(stop: asyncio.Event, parts: Sequence[asyncio.Task[None]]) -> None:
    """Wait for `stop`, or for a part that ended, which none should; then end all parts."""
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([stopped, *parts], return_when=asyncio.FIRST_COMPLETED)
        for part in parts:
            if part.done():
                part.result()  # raises what it died of
    finally:
        for task in (stopped, *parts):
            task.cancel()
        await asyncio.gather(stopped, *parts, return_exceptions=True)
