"""A Kubernetes API client of the size that the sandbox needs: requests and list-and-watch, over aiohttp.

The sandbox runs as part of the machine under test, so it uses no client library that the code under test may also use.
"""

import asyncio
import json
import logging
import os
import ssl
from collections.abc import AsyncIterator
from typing import Any, NamedTuple, Self

import aiohttp

from prfaas.errors import PeerError, UnreachableError
from prfaas_sandbox.credentials import Kubeconfig

log = logging.getLogger(__name__)

JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"
REQUEST_TIMEOUT_SECONDS = 10.0
WATCH_SECONDS = 240
WATCH_RETRY_SECONDS = 0.5

Object = dict[str, Any]


class ApiError(PeerError):
    """The API server refused a request.

    Args:
        message: what was asked and what the server said.
        status: HTTP status.

    """

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class Listed(NamedTuple):
    """The whole collection: what is not in it is gone."""

    items: list[Object]


class Changed(NamedTuple):
    """One object was added, modified or deleted."""

    item: Object
    deleted: bool


def client_tls(kubeconfig: Kubeconfig) -> ssl.SSLContext:
    """Return a TLS context that trusts the cluster's CA alone and shows the user's certificate."""
    context = ssl.create_default_context(cadata=kubeconfig.authority.decode())
    # Python loads client certificates from files only; this one never reaches a disk.
    descriptor = os.memfd_create("client-certificate")
    with os.fdopen(descriptor, "wb") as file:
        file.write(kubeconfig.user.certificate + kubeconfig.user.key)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    return context


class Api:
    """One user's connection to one API server; use it as an async context manager.

    Args:
        kubeconfig: server, CA and client certificate.

    """

    _session: aiohttp.ClientSession

    def __init__(self, kubeconfig: Kubeconfig):
        self._server = kubeconfig.server
        self._tls = client_tls(kubeconfig)

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_SECONDS)
        connector = aiohttp.TCPConnector(ssl=self._tls, limit=0)
        self._session = aiohttp.ClientSession(self._server, connector=connector, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str, **query: str) -> Object:
        """Return the object or list at `path`."""
        return await self._request("GET", path, query=query)

    async def create(self, path: str, body: Object) -> Object:
        """POST `body` to the collection (or subresource) at `path`."""
        return await self._request("POST", path, body)

    async def patch(self, path: str, body: Object) -> Object:
        """Merge `body` into the object (or subresource) at `path` (RFC 7396: lists are replaced)."""
        return await self._request("PATCH", path, body, content_type=MERGE_PATCH)

    async def apply(self, path: str, body: Object, manager: str) -> Object:
        """Server-side apply `body` at `path` as field manager `manager`, taking over fields in conflict."""
        query = {"fieldManager": manager, "force": "true"}
        return await self._request("PATCH", path, body, content_type=APPLY, query=query)

    async def delete(self, path: str, body: Object) -> Object:
        """Delete the object at `path`; `body` is a DeleteOptions."""
        return await self._request("DELETE", path, body)

    async def _request(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        content_type: str = JSON,
        query: dict[str, str] | None = None,
    ) -> Object:
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": content_type}
        try:
            async with self._session.request(method, path, data=data, headers=headers, params=query) as response:
                answer = await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UnreachableError(f"{method} {self._server}{path}: {error or 'timed out'}") from error
        if response.status >= 400:
            raise ApiError(f"{method} {path}: {_reason(answer)}", response.status)
        return json.loads(answer) if answer.startswith("{") else {"text": answer}

    async def follow(self, path: str, **query: str) -> AsyncIterator[Listed | Changed]:
        """Yield the collection, then its changes, for ever; after any break yield the whole collection again."""
        while True:
            try:
                collection = await self.get(path, **query)
                yield Listed(collection["items"])
                version = collection["metadata"]["resourceVersion"]
                async for change in self._watch(path, {**query, "resourceVersion": version}):
                    yield change
            except (PeerError, aiohttp.ClientError, TimeoutError) as error:
                log.info("watch of %s broke, starting over: %s", path, error)
            await asyncio.sleep(WATCH_RETRY_SECONDS)

    async def _watch(self, path: str, query: dict[str, str]) -> AsyncIterator[Changed]:
        query = {**query, "watch": "true", "timeoutSeconds": str(WATCH_SECONDS)}
        timeout = aiohttp.ClientTimeout(total=WATCH_SECONDS + REQUEST_TIMEOUT_SECONDS)
        # One line is one whole object, and an object may have more than aiohttp's default of 64 KiB.
        async with self._session.get(path, params=query, timeout=timeout, read_bufsize=2**22) as response:
            async for line in response.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise ApiError(f"watch of {path}: {event['object'].get('message')}", response.status)
                yield Changed(event["object"], deleted=event["type"] == "DELETED")


def _reason(answer: str) -> str:
    """Return the message of a Status object, or the text as it is."""
    try:
        return json.loads(answer)["message"]
    except (ValueError, LookupError, TypeError):
        return answer.strip()[:500]
