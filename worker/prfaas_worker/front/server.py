"""The front's life: start the engine, serve, drain on SIGTERM, and never outlive the engine.

Exit codes: 0 after an orderly end, 1 when the engine cannot start or dies, so that a supervisor starts the worker anew.
"""

import asyncio
import logging
import signal
import socket
import sys
from pathlib import Path

import msgspec
import uvloop
from aiohttp import web

from prfaas.errors import ConfigError
from prfaas.wire.engine import StartFailed
from prfaas_worker.front.app import build_app
from prfaas_worker.front.checks import Served
from prfaas_worker.front.engine_client import EngineClient
from prfaas_worker.front.serving import Serving
from prfaas_worker.options import Options
from prfaas_worker.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

CLOSE_SECONDS = 1.0
ENGINE_END_SECONDS = 5.0


def run(options: Options) -> int:
    """Serve until told to stop; returns the exit code."""
    return uvloop.run(_run(options))


async def _run(options: Options) -> int:
    stop = _stop_on_signals()
    ours, theirs = socket.socketpair()
    process = await _start_engine(options, theirs)
    theirs.close()
    client = await EngineClient.connect(ours)
    # Reading ends with the engine: after its last message, so that no reason it gave is missed.
    engine = asyncio.create_task(client.run())
    try:
        return await _serve(options, client, engine, stop)
    except ConfigError as error:
        sys.stderr.write(f"prfaas-worker: {error}\n")
        return 1
    finally:
        client.close()
        engine.cancel()
        if not client.ready.done() and process.returncode is None:
            process.kill()  # it loads, and would not see for long that its socket closed
        await _end(process)


async def _start_engine(options: Options, sock: socket.socket) -> asyncio.subprocess.Process:
    arguments = ["-m", "prfaas_worker.engine", str(sock.fileno()), msgspec.json.encode(options).decode()]
    # In a session of its own: Ctrl-C is ours to handle, also while the engine only begins and would die of it.
    return await asyncio.create_subprocess_exec(
        sys.executable, *arguments, pass_fds=[sock.fileno()], start_new_session=True
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    """The engine ends itself when its socket closes; it is killed only if it does not."""
    try:
        await asyncio.wait_for(process.wait(), ENGINE_END_SECONDS)
    except TimeoutError:
        log.warning("the engine did not end within %s s and is killed", ENGINE_END_SECONDS)
        process.kill()
        await process.wait()


async def _serve(options: Options, client: EngineClient, engine: asyncio.Task[None], stop: asyncio.Future[None]) -> int:
    serving = Serving(options, client)
    runner = web.AppRunner(build_app(serving), handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        await _open_port(runner, options)
        await asyncio.wait({client.ready, engine, stop}, return_when=asyncio.FIRST_COMPLETED)
        if client.ready.done():
            _load(serving, options)
            await asyncio.wait({engine, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not engine.done() and client.ready.done():
            await _drain(serving, engine)
    finally:
        await runner.cleanup()
    if engine.done():
        log.error("the engine process ended: this worker ends too, to be started anew")
        return 1
    return 0


def _stop_on_signals() -> asyncio.Future[None]:
    """Return a future that SIGTERM or SIGINT completes; a second SIGINT ends the process in the usual way."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[None] = loop.create_future()

    def on_signal(number: signal.Signals) -> None:
        log.info("%s: draining", number.name)
        loop.remove_signal_handler(signal.SIGINT)
        if not stop.done():
            stop.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop


async def _open_port(runner: web.AppRunner, options: Options) -> None:
    try:
        await web.TCPSite(runner, options.host, options.api_port, shutdown_timeout=CLOSE_SECONDS).start()
    except OSError as error:
        raise ConfigError(f"API port {options.host}:{options.api_port} cannot be opened: {error.strerror}") from error


def _load(serving: Serving, options: Options) -> None:
    """Open for requests with what the engine has loaded."""
    answer = serving.engine.ready.result()
    if isinstance(answer, StartFailed):
        raise ConfigError(answer.message)
    served = Served(
        model_name=options.model_name,
        vocab_size=answer.vocab_size,
        max_context=answer.max_context,
        max_choices=options.max_running,
    )
    serving.loaded(served, load_tokenizer(Path(answer.directory)))
    log.info("serving %s on http://%s:%d", options.model_name, options.host, options.api_port)


async def _drain(serving: Serving, engine: asyncio.Task[None]) -> None:
    """Take no new work and let what runs finish, for as long as the options allow."""
    serving.draining = True
    idle = asyncio.create_task(serving.idle())
    seconds = serving.options.drain_seconds
    done, _ = await asyncio.wait({idle, engine}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    if not done:
        log.warning("draining took longer than %d s: %d requests are cut off", seconds, serving.engine.open_calls)
    idle.cancel()
