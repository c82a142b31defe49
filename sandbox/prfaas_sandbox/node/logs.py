"""The part of the kubelet's API that `kubectl logs` needs, over TLS, for the API server alone."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

from aiohttp import web

from prfaas_sandbox.node.container import Container

PORT = 10250
POLL_SECONDS = 0.1
CHUNK_BYTES = 64 * 1024
API_SERVER_USER = "kube-apiserver-kubelet"
# Lines carry no time of their own here, so what selects or shows by time cannot be offered.
UNSUPPORTED = ("timestamps", "sinceSeconds", "sinceTime", "limitBytes")

Find = Callable[[str, str, str], Container | None]


@asynccontextmanager
async def serve_logs(address: str, tls: ssl.SSLContext, find: Find) -> AsyncIterator[None]:
    """Serve logs at `address`; `find` takes namespace, pod and container. `tls` must ask for client certificates."""

    async def handle(request: web.Request) -> web.StreamResponse:
        _authorise(request)
        where = request.match_info
        container = find(where["namespace"], where["pod"], where["container"])
        if container is None:
            raise web.HTTPNotFound(text=f"this node runs no container {where['container']} of pod {where['pod']}")
        return await _send(request, container)

    application = web.Application()
    application.router.add_get("/containerLogs/{namespace}/{pod}/{container}", handle)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, address, PORT, ssl_context=tls, shutdown_timeout=0).start()
        yield
    finally:
        await runner.cleanup()


def _authorise(request: web.Request) -> None:
    """Refuse every user but the API server; TLS has checked that the certificate is our CA's."""
    certificate = request.get_extra_info("peercert") or {}
    names = {value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"}
    if names != {API_SERVER_USER}:
        raise web.HTTPForbidden(text="only the API server may read logs here")


async def _send(request: web.Request, container: Container) -> web.StreamResponse:
    query = request.query
    if asked := [name for name in UNSUPPORTED if query.get(name) not in (None, "false")]:
        raise web.HTTPBadRequest(text=f"the process node cannot select logs by {', '.join(asked)}")
    path = container.log_file(previous=query.get("previous") == "true")
    if not path.is_file():
        raise web.HTTPNotFound(
            text=f"there is no such log yet: container {request.match_info['container']} has not run"
        )
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    await response.prepare(request)
    with path.open("rb") as file:
        if "tailLines" in query:
            file.seek(tail_offset(file, int(query["tailLines"])))
        follow = query.get("follow") == "true"
        async for chunk in _chunks(file, lambda: follow and container.running and _is_current(container, path)):
            await response.write(chunk)
    return response


def _is_current(container: Container, path: Path) -> bool:
    return container.log_file(previous=False) == path


async def _chunks(file: BinaryIO, may_grow: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Yield what is in the file, and what is added as long as it may grow."""
    while True:
        more = may_grow()  # asked before reading, so that the last words are not missed
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
        if not more:
            return
        await asyncio.sleep(POLL_SECONDS)


def tail_offset(file: BinaryIO, lines: int) -> int:
    """Return where the last `lines` lines of a file start."""
    end = file.seek(0, 2)
    position, wanted = end, lines
    if lines == 0:
        return end
    while position > 0:
        start = max(0, position - CHUNK_BYTES)
        file.seek(start)
        chunk = file.read(position - start)
        if position == end and chunk.endswith(b"\n"):
            chunk = chunk[:-1]  # the newline that ends the last line
        found = chunk.count(b"\n")
        if found >= wanted:
            for _ in range(wanted):
                chunk = chunk[: chunk.rindex(b"\n")]
            return start + len(chunk) + 1
        wanted -= found
        position = start
    return 0
