"""Two callers of a worker's API want it restarted: whole requests take all connections, so that no probe has one."""

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import pytest

from prfaas.http_server import ConnectionBounds
from prfaas_worker.assets import model_directory
from prfaas_worker.front.server import serving_ports
from prfaas_worker.front.serving import FrontState, ServedModel
from prfaas_worker.options import parse
from prfaas_worker.tokenizer import load_tokenizer

from ...unit.worker.conftest import Front
from ...waiting import eventually_async

pytestmark = pytest.mark.system

API_PORT, ADMIN_PORT = 9000, 9002
SERVED: Final = ServedModel(model_name="tiny", fingerprint="", vocab_size=264, max_context=1000, max_choices=4)
BOUNDS: Final = ConnectionBounds(most=4, spared_seconds=0.0)
BODY: Final = b'{"model": "tiny", "prompt": "def main("}'
WHOLE: Final = b"POST /v1/completions HTTP/1.1\r\nHost: w\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
PATHS: Final = ("/healthz", "/readyz", "/metrics")


@pytest.fixture
async def full(front: Front) -> AsyncIterator[Front]:
    """A worker that may hold four connections of its API, and holds four requests of two addresses, which its engine
    does not answer."""
    flags = ["--model-source", "x", "--model-name", "tiny", "--host", front.host]
    options = parse([*flags, "--api-port", str(API_PORT), "--admin-port", str(ADMIN_PORT)])
    state = FrontState(options, front.serving.engine)
    state.connections = BOUNDS
    state.loaded(SERVED, load_tokenizer(model_directory("builtin:kimi-linear-tiny")))
    async with serving_ports(state):
        held = []
        for number in range(BOUNDS.most):
            local = (f"127.0.0.{2 + number % 2}", 0)
            _, writer = await asyncio.open_connection(front.host, API_PORT, local_addr=local)
            writer.write(WHOLE)
            held.append(writer)
        await eventually_async(lambda: state.engine.open_calls == BOUNDS.most, "the requests are with the engine")
        yield front
        for writer in held:
            writer.close()


async def status(host: str, port: int, path: str) -> int:
    """Return what a new connection gets."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: w\r\n\r\n".encode())
    head = (await reader.readline()).split()
    writer.close()
    return int(head[1])


async def test_who_takes_all_connections_of_the_api_keeps_no_probe_out(full: Front):
    assert [await status(full.host, ADMIN_PORT, path) for path in PATHS] == [200] * 3


async def test_control_at_the_apis_port_every_probe_is_refused(full: Front):
    assert [await status(full.host, API_PORT, path) for path in PATHS] == [503] * 3


async def test_the_port_of_probes_serves_no_model(full: Front):
    assert await status(full.host, ADMIN_PORT, "/v1/models") == 404
