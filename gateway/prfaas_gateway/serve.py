"""The life of a gateway process: open the sockets, follow the table, drain on SIGTERM."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from aiohttp import web

from prfaas.errors import ConfigError
from prfaas.kube import KubeSession
from prfaas.telemetry.tracing import tracing_from_environment
from prfaas_gateway.app import ControlApp, PublicApp
from prfaas_gateway.credentials import Credentials
from prfaas_gateway.dashboard.pages import Dashboard
from prfaas_gateway.dashboard.record import Record
from prfaas_gateway.dispatch import Dispatcher
from prfaas_gateway.door import Door
from prfaas_gateway.engines.choice import Engines
from prfaas_gateway.keys import KeyRing
from prfaas_gateway.kv.manager import KvManager
from prfaas_gateway.limits import Limits
from prfaas_gateway.metrics import Metrics
from prfaas_gateway.roles import RoleTeller
from prfaas_gateway.sources import follow_configmap, follow_file, read_file
from prfaas_gateway.state import GatewayState
from prfaas_gateway.upstream import Upstream

log = logging.getLogger(__name__)

KEPT_SECONDS: Final = 1.0
"""Whose stream has just ended asks the next thing on the same connection: its head was too early to say goodbye."""
LOOK_SECONDS: Final = 0.05


class Config(NamedTuple):
    """What the command line says. The table comes from `routes_file`, or else from `policy` in `namespace`."""

    host: str
    port: int
    policy: str = ""
    namespace: str = ""
    routes_file: Path | None = None
    control_socket: Path | None = None
    tls_dir: Path | None = None
    keys_dir: Path | None = None
    drain_seconds: float = 30.0
    limits: Limits = Limits()


class Running(NamedTuple):
    """A gateway that serves; `port` is the one it got, where it asked for any."""

    state: GatewayState
    port: int
    runner: web.AppRunner
    dispatcher: Dispatcher


async def run(config: Config) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return.

    Raises:
        ConfigError: an address, socket or file in `config` cannot be used.

    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # What the drain has not seen the end of has had its time.
    async with serving(config._replace(drain_seconds=LOOK_SECONDS)) as running:
        await stop.wait()
        log.info("draining: %d requests in flight", running.state.in_flight)
        await _drain(running, config)


async def _drain(running: Running, config: Config) -> None:
    """Take new connections while others learn that we leave; then serve the open ones until nothing comes any more."""
    running.state.draining = True
    await asyncio.sleep(config.limits.linger_seconds)
    for site in running.runner.sites:
        await site.stop()
    now = asyncio.get_running_loop().time
    began = quiet_since = now()
    while now() - quiet_since < KEPT_SECONDS and now() - began < config.drain_seconds:
        await asyncio.sleep(LOOK_SECONDS)
        if running.dispatcher.open_requests:
            quiet_since = now()


@asynccontextmanager
async def serving(config: Config) -> AsyncIterator[Running]:
    """Serve while the block runs; leaving it takes nothing new and waits `drain_seconds` for what is in flight."""
    state = GatewayState(config.limits)
    metrics = Metrics()
    tracing = tracing_from_environment("prfaas-gateway", {"prfaas.policy": config.policy})
    door = Door(KeyRing(config.keys_dir) if config.keys_dir else None)
    credentials = Credentials(config.tls_dir) if config.tls_dir else None
    record = Record()
    dashboard = Dashboard(state, record)
    async with (
        Upstream(config.limits, credentials) as upstream,
        _following(config, state),
        _background(RoleTeller(state, upstream).run()),
        _background((kv := KvManager(state, upstream, metrics.registry)).run()),
        _background(dashboard.watch()),
    ):
        dispatcher = Dispatcher(state, Engines(upstream), metrics, config.limits, tracing, door)
        dispatcher.kv = kv
        dispatcher.on_end = record.add
        public = PublicApp(state, dispatcher, metrics, door, dashboard).build(config.limits)
        # Cancelling the handler is how a client that leaves aborts its request at once, on the worker too.
        runner = web.AppRunner(
            public, handler_cancellation=True, access_log=None, shutdown_timeout=config.drain_seconds
        )
        control = web.AppRunner(ControlApp(state).build(), access_log=None, shutdown_timeout=1.0)
        try:
            await _listen(runner, control, config)
            port = runner.addresses[0][1]
            log.info("listening on %s:%d", config.host, port)
            yield Running(state, port, runner, dispatcher)
        finally:
            await runner.cleanup()
            await control.cleanup()
            await asyncio.to_thread(tracing.close)


async def _listen(public: web.AppRunner, control: web.AppRunner, config: Config) -> None:
    try:
        await public.setup()
        await web.TCPSite(public, config.host, config.port, backlog=1024).start()
        if config.control_socket is not None:
            await control.setup()
            await web.UnixSite(control, str(config.control_socket)).start()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port} or {config.control_socket}: {error}"
        ) from error


@asynccontextmanager
async def _following(config: Config, state: GatewayState) -> AsyncIterator[None]:
    """Follow the table in the background while the block runs."""
    if config.routes_file is not None:
        state.set_table(read_file(config.routes_file))  # a file that cannot be read is a mistake on the command line
        async with _background(follow_file(config.routes_file, state.set_table)):
            yield
        return
    async with (
        KubeSession.in_cluster() as session,
        _background(follow_configmap(session, config.namespace, config.policy, state.set_table)),
    ):
        yield


@asynccontextmanager
async def _background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` beside the block. It is meant to run for ever: its failure ends the block, and with it the process."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work)
        yield
        task.cancel()
