"""Calls the gateway's control socket: reads the routing table and the counters, and sets the threshold."""

from pathlib import Path
from typing import Self

import aiohttp
import msgspec

from prfaas.errors import UnreachableError
from prfaas.util import decode_json
from prfaas.wire import routes
from prfaas.wire.control import Counters, ThresholdUpdate

TIMEOUT_SECONDS = 2.0


class GatewayClient:
    """One gateway in the same pod. Made inside the event loop, as a context. A call that fails raises PeerError."""

    def __init__(self, control_socket: Path):
        self._socket = control_socket
        connector = aiohttp.UnixConnector(path=str(control_socket))
        self._http = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def table(self) -> routes.RoutingTable:
        return routes.decode(await self._call("GET", "/table"))

    async def counters(self) -> Counters:
        """Return the gateway's counters since its start."""
        answer = await self._call("GET", "/counters")
        return decode_json(answer, Counters, f"GET /counters on {self._socket} answers something else")

    async def put_threshold(self, update: ThresholdUpdate) -> None:
        """Make the gateway route by `update` until the next one, or until it expires."""
        await self._call("PUT", "/threshold", msgspec.json.encode(update))

    async def _call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        what = f"{method} {path} on {self._socket}"
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            async with self._http.request(method, f"http://gateway{path}", data=body, headers=headers) as response:
                answer = await response.read()
        except TimeoutError as error:
            raise UnreachableError(f"{what} was not answered within {TIMEOUT_SECONDS:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise UnreachableError(f"{what} failed ({error}): is the gateway of this pod running?") from error
        if response.status >= 400:
            text = answer[:200].decode("utf-8", "replace")
            raise UnreachableError(f"{what} is refused with HTTP {response.status}: {text}")
        return answer
