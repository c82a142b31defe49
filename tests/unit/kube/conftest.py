"""A small real HTTP server in the place of an API server, which tests can make drop, expire and refuse.

It keeps objects with resource versions, optimistic locking and a watch. The real API server's behaviour is proven in
tests/clusters.
"""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from tests.serving import serving

from prfaas.kube import KubeSession, ObjectRef


class FakeApi:
    """One namespace of an API server. `watches` records each watch's query; `misbehave` answers the next requests."""

    def __init__(self):
        self.objects: dict[str, dict] = {}
        self.version = 10
        self.watches: list[dict[str, str]] = []
        self.open_watches: list[tuple[asyncio.Queue, web.Request]] = []
        self.requests: list[tuple[str, str, dict, bytes]] = []
        self.misbehave: list = []
        self.dead = False

    def put(self, ref: ObjectRef, **content) -> dict:
        """Write an object and tell the watchers."""
        known = ref.path in self.objects
        self.version += 1
        metadata = {"name": ref.name, "namespace": ref.namespace, "resourceVersion": str(self.version)}
        self.objects[ref.path] = {"metadata": metadata, **content}
        self.tell("MODIFIED" if known else "ADDED", self.objects[ref.path])
        return self.objects[ref.path]

    def delete(self, ref: ObjectRef) -> None:
        removed = self.objects.pop(ref.path)
        self.version += 1
        removed["metadata"]["resourceVersion"] = str(self.version)
        self.tell("DELETED", removed)

    def tell(self, kind: str, current: dict) -> None:
        for queue, _ in self.open_watches:
            queue.put_nowait(json.dumps({"type": kind, "object": current}).encode() + b"\n")

    def drop_watches(self) -> None:
        for _, request in self.open_watches:
            request.transport.abort()

    def end_watches(self) -> None:
        for queue, _ in self.open_watches:
            queue.put_nowait(None)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append((request.method, request.path_qs, dict(request.headers), body))
        if self.dead:
            request.transport.abort()
        if self.misbehave and (answer := self.misbehave.pop(0)) is not None:
            return await answer(request)
        if "watch" in request.query:
            return await self._watch(request)
        if "fieldSelector" in request.query:
            name = request.query["fieldSelector"].removeprefix("metadata.name=")
            items = [one for path, one in self.objects.items() if path == f"{request.path}/{name}"]
            return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": items})
        if request.method == "GET":
            found = self.objects.get(request.path)
            return web.json_response(found) if found else refused(404, "NotFound")
        return self._write(request, json.loads(body))

    def _write(self, request: web.Request, body: dict) -> web.Response:
        path = request.path
        if request.method == "PATCH":
            return web.json_response(body)
        if request.method == "POST":
            path += "/" + body["metadata"]["name"]
            if path in self.objects:
                return refused(409, "AlreadyExists")
        elif body["metadata"]["resourceVersion"] != self.objects[path]["metadata"]["resourceVersion"]:
            return refused(409, "Conflict")
        self.version += 1
        self.objects[path] = body | {"metadata": body["metadata"] | {"resourceVersion": str(self.version)}}
        return web.json_response(self.objects[path])

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.watches.append(dict(request.query))
        response = web.StreamResponse()
        await response.prepare(request)
        queue: asyncio.Queue = asyncio.Queue()
        since = int(request.query["resourceVersion"])
        for current in self.objects.values():
            if int(current["metadata"]["resourceVersion"]) > since:
                queue.put_nowait(json.dumps({"type": "ADDED", "object": current}).encode() + b"\n")
        self.open_watches.append((queue, request))
        try:
            while (line := await queue.get()) is not None:
                for cut in range(0, len(line), 7):  # events arrive in pieces
                    await response.write(line[cut : cut + 7])
        finally:
            self.open_watches.remove((queue, request))
        return response


def refused(status: int, reason: str) -> web.Response:
    return web.json_response({"kind": "Status", "reason": reason, "message": reason, "code": status}, status=status)


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    made = FakeApi()
    async with serving(made.handle) as made.url:
        yield made


@pytest.fixture
async def session(api) -> AsyncIterator[KubeSession]:
    async with KubeSession(api.url) as made:
        yield made
