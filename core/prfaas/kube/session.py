"""A session with one API server: address, CA and token, and one call with a hard timeout and our own errors.

A bound service account token is replaced on disk about once an hour, so the file is read again for every call. A server
that is half dead accepts connections and answers nothing: every call ends after `timeout_seconds`, whatever the server
does.
"""

import os
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import aiohttp
import msgspec

from prfaas.errors import ConfigError, InternalError, PeerError, ProtocolError, UnreachableError

SERVICE_ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")
JSON = "application/json"
DEFAULT_TIMEOUT_SECONDS = 10.0
# What msgspec raises for bytes that are no JSON: bad syntax, bad UTF-8, nesting that would exhaust the stack.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class StatusError(PeerError):
    """The API server said no. `status` is the HTTP status, `reason` the API's own (NotFound, Conflict, ...)."""

    def __init__(self, message: str, *, status: int, reason: str):
        super().__init__(message)
        self.status = status
        self.reason = reason


class ObjectRef(NamedTuple):
    """One namespaced object by name. `api_version` as in its manifest: `v1`, `coordination.k8s.io/v1`, ..."""

    api_version: str
    kind: str
    plural: str
    namespace: str
    name: str

    @property
    def collection_path(self) -> str:
        """Path of all objects of this kind in the namespace."""
        prefix = "/apis" if "/" in self.api_version else "/api"
        return f"{prefix}/{self.api_version}/namespaces/{self.namespace}/{self.plural}"

    @property
    def path(self) -> str:
        """Path of the object itself."""
        return f"{self.collection_path}/{self.name}"

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


class KubeSession:
    """Calls to one API server. Use as an async context manager.

    Args:
        server: base URL, `https://host:port`.
        token_file: bearer token, read for every call; None sends none.
        tls: context that trusts the server's CA; None for a plain http server.

    """

    def __init__(self, server: str, *, token_file: Path | None = None, tls: ssl.SSLContext | None = None):
        self._server = server.rstrip("/")
        self._token_file = token_file
        self._tls = tls
        self._client: aiohttp.ClientSession | None = None

    @classmethod
    def in_cluster(cls, directory: Path = SERVICE_ACCOUNT_DIR, environ: Mapping[str, str] = os.environ) -> Self:
        """Return the session of a pod's own service account.

        Raises:
            ConfigError: this process does not run in a pod that has one.

        """
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
        if not host or not port:
            raise ConfigError("KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are unset: run this in a pod")
        try:
            tls = ssl.create_default_context(cafile=str(directory / "ca.crt"))
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"{directory}/ca.crt cannot be read ({error}): give the pod a service account") from error
        address = f"[{host}]" if ":" in host else host
        return cls(f"https://{address}:{port}", token_file=directory / "token", tls=tls)

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(ssl=self._tls if self._tls is not None else True, limit=8)
        self._client = aiohttp.ClientSession(connector=connector, trust_env=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        content_type: str = JSON,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> dict[str, Any]:
        """Send one request and return the object it answers.

        Raises:
            StatusError: the server refused.
            UnreachableError: the server cannot be reached or did not answer in time.
            ProtocolError: the answer is not JSON.

        """
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": content_type} if data is not None else {}
        async with self.stream(method, path, data=data, headers=headers, timeout_seconds=timeout_seconds) as response:
            return decode_object(await response.read(), f"{method} {path}")

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Open one request and yield its successful response; all of it, body included, ends after `timeout_seconds`.

        Raises as `call` does, also for what goes wrong while the caller reads.
        """
        if self._client is None:
            raise InternalError("KubeSession is used outside its `async with` block")
        what = f"{method} {self._server}{path.partition('?')[0]}"
        timeout = aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=min(timeout_seconds, 5.0))
        try:
            async with self._client.request(
                method,
                f"{self._server}{path}",
                data=data,
                headers={**(headers or {}), **self._authorization()},
                timeout=timeout,
            ) as response:
                if response.status >= 400:
                    raise _status_error(what, response.status, await response.read())
                yield response
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise UnreachableError(f"{what}: {type(error).__name__}: {error}; is the API server reachable?") from error

    def _authorization(self) -> dict[str, str]:
        if self._token_file is None:
            return {}
        try:
            token = self._token_file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"service account token {self._token_file} cannot be read: {error}") from error
        return {"Authorization": f"Bearer {token}"}


def decode_object(raw: bytes, what: str) -> dict[str, Any]:
    """Read one JSON object. Raises ProtocolError naming `what` was asked."""
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except UNREADABLE as error:
        raise ProtocolError(f"{what} answered no JSON object: {error}") from error


def _status_error(what: str, status: int, raw: bytes) -> StatusError:
    """Read the API's Status object, where there is one, into an error."""
    try:
        said = msgspec.json.decode(raw, type=dict[str, Any])
    except UNREADABLE:
        said = {}
    message = said.get("message") or raw[:200].decode("utf-8", "replace")
    return StatusError(f"{what}: {status} {message}", status=status, reason=str(said.get("reason", "")))
