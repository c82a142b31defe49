"""What the fuzz is sent to, in one process: python -m benchmarks.hardening.target FOLDER ENGINE_URL

Gateways: one before a front of ours, and two before ENGINE_URL, whose streams are the fuzz. Fronts of workers: one a
kind of tokenizer, whose engine is played, and one whose engine is emulated in a process of its own. And a port that
renders the template of a request. It prints their ports, and when stdin ends what it saw: tracebacks in the log, the
longest time for which its event loop ran nothing else, and the longest step of the engine's loop.
"""

import asyncio
import gc
import logging
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import uvloop
from aiohttp import web
from benchmarks.emulated import as_measured
from benchmarks.hardening.engine import longest_step_file
from benchmarks.hardening.gaps import Gaps
from tests.serving import serving as serve_http
from tests.tables import make_instance, make_table

from prfaas.errors import ConfigError, RequestError
from prfaas.http_server import PublicRunner
from prfaas.ports import free_ports
from prfaas.wire.engine import (
    LENGTH,
    Announced,
    AskStats,
    Generate,
    GiveCache,
    Started,
    StartFailed,
    Stats,
    ToEngine,
    ToFront,
    TokenLogprob,
    Tokens,
    decode_for_engine,
    encode_batch,
)
from prfaas.wire.profile import Profile
from prfaas.wire.routes import EngineName, encode
from prfaas_gateway.limits import Limits
from prfaas_gateway.options import GatewayOptions
from prfaas_gateway.server import serving
from prfaas_worker.assets import model_directory
from prfaas_worker.front.engine_client import EngineClient
from prfaas_worker.front.openai_bodies import ChatBody
from prfaas_worker.front.openai_in import conversation_tokens
from prfaas_worker.front.server import build_app
from prfaas_worker.front.serving import FrontState, ServedModel
from prfaas_worker.options import Options, parse
from prfaas_worker.tokenizer import load_tokenizer
from prfaas_worker.tokenizer.base import ByteTokenizer
from prfaas_worker.tokenizer.chat_template import ChatTemplate, Special

FRONTS: Final = {"bytes": "builtin:kimi-linear-tiny", "bpe": "builtin:qwen3-next-tiny"}
# Steps so short that what they take is the loop's own work, and sequences so short that no answer lasts.
PROFILE: Final = Profile(state_bytes=1 << 20, token_bytes=1024, fixed_seconds=1e-4, token_seconds=1e-7, samples=3)
STEP_SECONDS, BATCH, CONTEXT = 1e-4, 8, 256
READY_SECONDS: Final = 60.0
SPECIALS: Final = {"<s>": Special(256), "<|user|>": Special(257)}
# What breaks off is not waited for, and no instance is left alone: each input is to meet a gateway that serves.
LIMITS: Final = Limits(idle_seconds=2.0, stall_seconds=1.0, recover_seconds=0.1, hold_seconds=0.05, poll_seconds=0.02)
WITHOUT_EJECTIONS: Final = LIMITS._replace(eject_seconds=0.0, eject_max_seconds=0.0, drain_lead_seconds=0.0)


class Tracebacks(logging.Handler):
    """Counts what is logged with a traceback, and keeps one of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.kinds: dict[str, str] = {}
        """By the place in the code and the name of the error."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.levelno >= logging.ERROR:
            text = logging.Formatter().format(record)
            place = [line for line in text.splitlines() if line.lstrip().startswith("File ")][-1:]
            self.count += 1
            self.kinds.setdefault(f"{place} {text.splitlines()[-1].partition(':')[0]}", text)


async def play(sock: socket.socket) -> None:
    """Answer as an engine whose answers are the ends of their prompts."""
    reader, writer = await asyncio.open_unix_connection(sock=sock)
    while True:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        for message in decode_for_engine(await reader.readexactly(length)):
            if said := list(answers(message)):
                writer.write(encode_batch(said))


def answers(message: ToEngine) -> list[ToFront]:
    """Return what the engine says to a message."""
    match message:
        case Generate(handle=handle):
            token_ids = message.token_ids[-message.max_tokens :][:8]
            scores = [TokenLogprob(-1.0, [(token, -1.0)]) for token in token_ids] if message.logprobs >= 0 else []
            choices = range(message.choice, message.choice + message.choices)
            return [
                Started(handle, 0, 0, 0.0, 0.0, 0.0),
                *(Tokens(handle, choice, token_ids, scores, "length") for choice in choices),
            ]
        case GiveCache(handle=handle):
            return [Announced(handle, len(message.token_ids) - 1), Started(handle, 0, 0, 0.0, 0.0, 0.0)]
        case AskStats(handle=handle):
            return [Stats(handle)]
        case _:
            return []


RunEngine = Callable[[EngineClient, socket.socket, Options], AbstractAsyncContextManager[ServedModel]]
"""Runs an engine for a client, at the other end of its socket; gives what it serves."""


@asynccontextmanager
async def played(_client: EngineClient, sock: socket.socket, _options: Options) -> AsyncIterator[ServedModel]:
    playing = asyncio.create_task(play(sock))
    try:
        yield ServedModel(model_name="m", fingerprint="f", vocab_size=264, max_context=100_000, max_choices=8)
    finally:
        playing.cancel()


@asynccontextmanager
async def emulated(client: EngineClient, sock: socket.socket, options: Options) -> AsyncIterator[ServedModel]:
    arguments = ["-m", "benchmarks.hardening.engine", str(sock.fileno()), msgspec.json.encode(options).decode()]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, pass_fds=[sock.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    sock.close()
    try:
        async with asyncio.timeout(READY_SECONDS):
            ready = await client.ready
        if isinstance(ready, StartFailed):
            raise ConfigError(ready.message)
        yield ServedModel(
            model_name="m",
            fingerprint=ready.fingerprint,
            vocab_size=ready.vocab_size,
            max_context=ready.max_context,
            max_choices=options.max_running,
        )
    finally:
        with suppress(ProcessLookupError):  # it has ended
            process.kill()
        await process.wait()


def options_of(source: str, *flags: str) -> Options:
    return parse(["--model-source", source, "--model-name", "m", "--instance", "fuzzed", *flags])


def emulated_options(folder: Path) -> Options:
    profile = folder / "profile.json"
    profile.write_bytes(msgspec.json.encode(as_measured(PROFILE, STEP_SECONDS, BATCH)))
    counts = {"max-running": BATCH, "max-context": CONTEXT, "step-tokens": CONTEXT, "cache-mib": 64}
    flags = (f"--{name}={count}" for name, count in {**counts, "data-port": free_ports(1)[0]}.items())
    return options_of(FRONTS["bytes"], f"--emulate={profile}", *flags)


@asynccontextmanager
async def front(options: Options, engine: RunEngine = played) -> AsyncIterator[int]:
    """Serve a front of ours with a model's tokenizer; give its port."""
    ours, theirs = socket.socketpair()
    client = await EngineClient.connect(ours)
    running = asyncio.create_task(client.run())
    try:
        async with engine(client, theirs, options) as served:
            state = FrontState(options, client)
            state.loaded(served, load_tokenizer(model_directory(options.model_source)))
            runner = PublicRunner(build_app(state), shutdown_timeout=0.1)
            await runner.setup()
            try:
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                yield runner.addresses[0][1]
            finally:
                await runner.cleanup()
    finally:
        running.cancel()


class Templated(msgspec.Struct):
    source: str
    messages: list[dict[str, Any]]


def render(data: bytes) -> None:
    """Compile a template and render a conversation with it, as a worker does. Raises ConfigError, RequestError."""
    asked = msgspec.json.decode(data, type=Templated)
    template = ChatTemplate(asked.source, {"bos_token": "<s>"}, Path("fuzz"))
    conversation_tokens(ChatBody(model="m", messages=asked.messages), ByteTokenizer(SPECIALS, None, template))


async def rendered(request: web.Request) -> web.Response:
    data = await request.read()
    try:
        await asyncio.to_thread(render, data)
    except (ConfigError, RequestError, msgspec.MsgspecError) as error:
        return web.Response(status=400, text=str(error).encode(errors="replace").decode())
    return web.Response()


@asynccontextmanager
async def gateway(folder: Path, name: str, url: str, engine: EngineName) -> AsyncIterator[int]:
    """Serve a gateway before an engine, known twice, since a prompt is looked for among several; give its port."""
    routes = folder / f"{name}.json"
    instances = [make_instance(instance, url=url, engine=engine) for instance in ("d0", "d1")]
    routes.write_bytes(encode(make_table(*instances, mode="Fixed", tokens=100_000)))
    options = GatewayOptions("127.0.0.1", 0, 0, routes_file=routes, limits=WITHOUT_EJECTIONS, drain_seconds=0.1)
    async with serving(options) as running:
        yield running.port


async def serve(folder: Path, engine_url: str) -> None:
    seen, gaps = Tracebacks(), Gaps()
    logging.getLogger().addHandler(seen)
    async with AsyncExitStack() as stack:
        ports = {name: await stack.enter_async_context(front(options_of(source))) for name, source in FRONTS.items()}
        emulating = emulated_options(folder)
        ports["emulated"] = await stack.enter_async_context(front(emulating, emulated))
        ports["templates"] = int((await stack.enter_async_context(serve_http(rendered))).rpartition(":")[2])
        fronted = f"http://127.0.0.1:{ports['bytes']}"
        # One engine's streams go on by the tokens that it drew, the other's by their ids.
        for name, url, engine in (
            ("gateway", fronted, "prfaas"),
            ("drawn", engine_url, "prfaas"),
            ("resumed", engine_url, "vllm-nixl"),
        ):
            ports[name] = await stack.enter_async_context(gateway(folder, name, url, engine))
        gc.freeze()  # as both processes do before they serve
        print(msgspec.json.encode(ports).decode(), flush=True)
        watching = asyncio.create_task(gaps.watch())
        await asyncio.to_thread(sys.stdin.read)
        watching.cancel()
    longest_step_seconds = float(longest_step_file(emulating).read_text())
    found = {"tracebacks": seen.count, "kinds": list(seen.kinds.values()), "longest_step_seconds": longest_step_seconds}
    print(msgspec.json.encode({**found, "gap": gaps.longest}).decode(), flush=True)


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), sys.argv[2]))
