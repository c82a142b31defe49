"""The calls that a Lease needs, over the client library: `prfaas.kube.lease` says when to make them."""

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic import DynamicClient

from prfaas.errors import UnreachableError
from prfaas.kube.session import StatusError


class LeaseCalls:
    """A `prfaas.kube.lease.Caller` with the address and credentials of an ApiClient, which it closes."""

    def __init__(self, client: ApiClient):
        self._client = client
        self._dynamic = DynamicClient(client)

    async def call(
        self, method: str, path: str, *, body: Mapping[str, Any] | None = None, timeout_seconds: float = 10.0
    ) -> dict[str, Any]:
        """See `prfaas.kube.KubeSession.call`."""
        limit = aiohttp.ClientTimeout(total=timeout_seconds)
        try:
            response = await self._dynamic.request(
                method.lower(), path, body=body, serialize=False, _request_timeout=limit
            )
            return msgspec.json.decode(await response.read())
        except ApiException as error:
            status = error.status or 0
            raise StatusError(f"{method} {path}: {status} {error.reason}", status=status, reason="") from error
        except (TimeoutError, aiohttp.ClientError, OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise UnreachableError(f"{method} {path}: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()
