"""The scheduler sidecar's process: flags, the loop, the status writer and the metrics port, until SIGTERM."""

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp
from aiohttp import web

from prfaas.errors import ConfigError, PrfaasError
from prfaas.kube import KubeSession
from prfaas.names import SCHEDULER_METRICS_PORT
from prfaas_scheduler.gateway import Gateway
from prfaas_scheduler.loop import Loop
from prfaas_scheduler.metrics import Metrics
from prfaas_scheduler.publish import Publisher, policy_ref

log = logging.getLogger(__name__)

EXAMPLE = """\
example:
  prfaas-scheduler --control-socket /run/prfaas/control.sock --policy kimi --namespace prfaas \\
      --identity kimi-gateway-7d4b9-x2x7q --host 10.244.0.7
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the flags; a wrong flag ends in a usage line and exit code 2."""
    flags = argparse.ArgumentParser(
        prog="prfaas-scheduler",
        description="Moves a policy's offload threshold with the measured link: Prometheus in, threshold out.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument("--control-socket", type=Path, required=True, help="unix socket of the gateway in this pod")
    flags.add_argument("--policy", required=True, help="name of the PrfaaSPolicy whose status is written")
    flags.add_argument("--namespace", required=True, help="its namespace")
    flags.add_argument("--identity", required=True, help="name of this replica in the Lease: the pod's")
    flags.add_argument("--host", default="127.0.0.1", help="address of the metrics port (default: %(default)s)")
    flags.add_argument(
        "--metrics-port", type=int, default=SCHEDULER_METRICS_PORT, help="port of /metrics (default: %(default)s)"
    )
    return flags


async def serve(options: argparse.Namespace) -> None:
    """Run every part until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    metrics = Metrics()
    async with (
        _metrics_port(metrics, options.host, options.metrics_port),
        Gateway(options.control_socket) as gateway,
        aiohttp.ClientSession(trust_env=False) as http,
        contextlib.AsyncExitStack() as stack,
    ):
        loop = Loop(gateway, http, metrics)
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


@contextlib.asynccontextmanager
async def _metrics_port(metrics: Metrics, host: str, port: int) -> AsyncIterator[None]:
    runner = web.AppRunner(metrics.application(), access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise ConfigError(f"the metrics port cannot listen on {host}:{port}: {error}") from error
        yield
    finally:
        await runner.cleanup()


def main() -> None:
    """Run the scheduler; exit 0 after SIGTERM, 1 with one sentence for an error of ours, 2 for a wrong flag."""
    options = parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(serve(options))
    except PrfaasError as error:
        sys.exit(f"prfaas-scheduler: {error}")


if __name__ == "__main__":
    main()
