"""The host's side of the control sockets: change the link, cut it, kill a pod."""

from pathlib import Path
from typing import Any

import aiohttp

from prfaas.errors import BadInputError, UnreachableError
from prfaas_sandbox.state import ClusterFolder, StateFolder

TIMEOUT_SECONDS = 15.0


async def change_link(state: StateFolder, mbps: float) -> None:
    """Set the link's rate both ways; raise BadInputError for a rate that cannot be made."""
    await _call(state.link, "PUT", "/link", {"mbps": mbps})


async def link_rate(state: StateFolder) -> float:
    """Return the link's rate in Mbit/s."""
    return (await _call(state.link, "GET", "/link"))["mbps"]


async def cut_link(state: StateFolder, *, cut: bool) -> None:
    """Stop everything on the link, or let it pass again."""
    await _call(state.link, "PUT", "/link/cut", {"cut": cut})


async def kill_pod(cluster: ClusterFolder, namespace: str, pod: str) -> None:
    """Kill all processes of a pod; raise BadInputError when the cluster's node runs no such pod."""
    await _call(cluster.control, "POST", f"/pods/{namespace}/{pod}/kill")


async def _call(socket: Path, method: str, path: str, body: Any = None) -> Any:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    connector = aiohttp.UnixConnector(str(socket))
    try:
        async with (
            aiohttp.ClientSession("http://sandbox", connector=connector, timeout=timeout) as session,
            session.request(method, path, json=body) as response,
        ):
            answer = await response.json()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UnreachableError(f"no sandbox answers at {socket}: {error}") from error
    if response.status >= 400:
        raise BadInputError(answer["error"])
    return answer
