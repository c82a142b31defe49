"""A session with one API server: address, TLS, credentials, and calls with hard timeouts and our own errors.

A bound service account token is replaced on disk about once an hour, so every call reads the file again. A half-dead
server accepts connections and never answers, so every call ends after `timeout_seconds`.
"""

import os
import re
import ssl
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import urlencode

import aiohttp
import msgspec

from prfaas.errors import UNREADABLE, ConfigError, InternalError, PeerError, ProtocolError, UnreachableError
from prfaas.ports import url_host
from prfaas.util import decode_json

SERVICE_ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")
JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"  # JSON is YAML, as `encode_body` writes it
_NOT_OF_YAML = re.compile(rb"\x7f|\xc2[\x80-\x9f]|\xe2\x80[\xa8\xa9]|\xef\xbb\xbf|\xef\xbf[\xbe\xbf]")
"""Characters in UTF-8 that JSON may hold as they are, and that YAML refuses or takes for the end of a line."""
DEFAULT_TIMEOUT_SECONDS = 10.0
DEFAULT_CONNECTIONS = 8
MAX_ANSWER_BYTES = 64 << 20
"""Much more than a page of 500 pods. A hostile member's server must not fill this process's memory."""
MAX_REFUSAL_BYTES = 1 << 20

Object = dict[str, Any]
"""An object of the API server's, as JSON has it."""

Authorization = Callable[[], str]
"""Returns the header Authorization of the next call, empty for none; may raise ConfigError."""


def encode_body(body: Mapping[str, Any]) -> bytes:
    """Return a body as JSON that a reader of YAML understands in the same way."""
    return _NOT_OF_YAML.sub(lambda found: b"\\u%04x" % ord(found[0].decode()), msgspec.json.encode(body))


class StatusError(PeerError):
    """The API server refused a call.

    `status` is the HTTP status, `answer` the Status object (empty if missing), `headers` the answer's, `message` the
    server's sentence.
    """

    def __init__(self, what: str, status: int, raw: bytes, headers: Mapping[str, str]):
        try:
            self.answer: dict[str, Any] = msgspec.json.decode(raw, type=dict[str, Any])
        except UNREADABLE:
            self.answer = {}
        self.message = str(self.answer.get("message") or raw[:200].decode("utf-8", "replace"))
        super().__init__(f"{what}: {status} {self.message}")
        self.status = status
        self.reason = str(self.answer.get("reason", ""))
        self.headers = headers


class ObjectKind(NamedTuple):
    """A kind of object and its path. `api_version` as in a manifest: `v1`, `coordination.k8s.io/v1`, ..."""

    api_version: str
    name: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """Return the URL path of the collection, of one object, or of a subresource."""
        root = "/apis" if "/" in self.api_version else "/api"
        scope = f"/namespaces/{namespace}" if self.namespaced else ""
        return "/".join(filter(None, (f"{root}/{self.api_version}{scope}/{self.plural}", name, subresource)))


CONFIG_MAP = ObjectKind("v1", "ConfigMap", "configmaps")


class ObjectRef(NamedTuple):
    kind: ObjectKind
    namespace: str
    name: str

    @property
    def path(self) -> str:
        return self.kind.path(self.namespace, self.name)

    def __str__(self) -> str:
        return f"{self.kind.name} {self.namespace}/{self.name}"


class KubeAnswer(NamedTuple):
    """A successful answer of an API server."""

    status: int
    headers: Mapping[str, str]
    content: dict[str, Any]


class KubeSession:
    """Calls one API server. Use it as an async context manager, or call `open` and `close`.

    `authorization` is asked for every call. `tls` trusts the server's CA and may hold a client certificate; None is for
    a plain http server. `tls_server_name` is the name in the server's certificate, where that is not the address.
    """

    def __init__(  # keywords: each is a field of a kubeconfig
        self,
        server: str,
        *,
        authorization: Authorization | None = None,
        tls: ssl.SSLContext | None = None,
        tls_server_name: str = "",
        connections: int = DEFAULT_CONNECTIONS,
        proxy: str | None = None,
    ):
        self.authorization = authorization
        self._server = server.rstrip("/")
        self._tls = tls
        self._options: dict[str, Any] = {"proxy": proxy, "server_hostname": tls_server_name or None}
        self._connections = connections
        self._client: aiohttp.ClientSession | None = None

    @classmethod
    def in_cluster(
        cls,
        directory: Path = SERVICE_ACCOUNT_DIR,
        environ: Mapping[str, str] = os.environ,
        connections: int = DEFAULT_CONNECTIONS,
    ) -> Self:
        """Return the session of a pod's own service account; raise ConfigError outside of a pod."""
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
        if not host or not port:
            raise ConfigError("KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are unset: run this in a pod")
        try:
            tls = ssl.create_default_context(cafile=str(directory / "ca.crt"))
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"{directory}/ca.crt cannot be read ({error}): give the pod a service account") from error
        # An address, because a cluster's DNS may be down or missing.
        authorization = token_of_file(directory / "token")
        return cls(f"https://{url_host(host)}:{port}", authorization=authorization, tls=tls, connections=connections)

    def open(self) -> None:
        """Make the connection pool. Call it inside the event loop."""
        connector = aiohttp.TCPConnector(ssl=self._tls if self._tls is not None else True, limit=self._connections)
        self._client = aiohttp.ClientSession(connector=connector, trust_env=False)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def __aenter__(self) -> Self:
        self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        content_type: str = JSON,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> dict[str, Any]:
        """Send one request and return the object in the answer.

        Raises StatusError for a refusal, UnreachableError for no answer in time, ProtocolError for one that is no JSON.
        """
        answer = await self.ask(method, path, body=body, content_type=content_type, timeout_seconds=timeout_seconds)
        return answer.content

    async def ask(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        content_type: str = JSON,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> KubeAnswer:
        """Send one request as `call` does; return the whole answer."""
        data = None if body is None else encode_body(body)
        headers = {"Content-Type": content_type} if data is not None else {}
        async with self.stream(method, path, data=data, headers=headers, timeout_seconds=timeout_seconds) as response:
            what = f"{method} {path}"
            raw = await _read(response, MAX_ANSWER_BYTES)
            if len(raw) > MAX_ANSWER_BYTES:
                raise ProtocolError(f"{what} answered more than {MAX_ANSWER_BYTES} bytes")
            found = decode_object(raw, what)
            return KubeAnswer(response.status, response.headers, found)

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
        """Yield the response of one request, all within `timeout_seconds`; raises as `call`, also while it is read."""
        if self._client is None:
            raise InternalError("KubeSession is used outside its `async with` block")
        what = f"{method} {self._server}{path.partition('?')[0]}"
        timeout = aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=min(timeout_seconds, 4.0))
        authorization = self.authorization() if self.authorization is not None else ""
        sent = {**(headers or {}), **({"Authorization": authorization} if authorization else {})}
        try:
            async with self._client.request(
                method,
                f"{self._server}{path}",
                data=data,
                headers=sent,
                timeout=timeout,
                # An API server does not send calls elsewhere; a hostile one would choose what this process reads.
                allow_redirects=False,
                **self._options,
            ) as response:
                if response.status >= 300:
                    refusal = await _read(response, MAX_REFUSAL_BYTES)
                    raise StatusError(what, response.status, refusal, response.headers)
                yield response
        except (TimeoutError, aiohttp.ClientError, OSError, EOFError) as error:
            raise UnreachableError(f"{what}: {type(error).__name__}: {error}; is the API server reachable?") from error


def bearer(token: str) -> Authorization:
    """Return an authorization by a bearer token that stays the same."""
    return lambda: f"Bearer {token}"


def token_of_file(path: Path) -> Authorization:
    def read() -> str:
        try:
            token = path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"service account token {path} cannot be read: {error}") from error
        if not token.isprintable():
            raise ConfigError(f"service account token {path} holds characters that no token has")
        return f"Bearer {token}"

    return read


def client_tls(authority: str, certificate: str = "", key: str = "") -> ssl.SSLContext:
    """Return a TLS context that trusts `authority` (default: the system's) and shows `certificate`, all PEM.

    Raises OSError or ValueError for unusable texts.
    """
    context = ssl.create_default_context(cadata=authority or None)
    if certificate:
        # The ssl module loads certificates from files only; they are deleted again before the first call.
        with tempfile.TemporaryDirectory(prefix="prfaas-") as directory:
            paths = Path(directory, "tls.crt"), Path(directory, "tls.key")
            for path, content in zip(paths, (certificate, key), strict=True):
                path.touch(mode=0o600)
                path.write_text(content)
            context.load_cert_chain(*paths)
    return context


def with_query(path: str, query: Mapping[str, Any] | None) -> str:
    """Return a path with the parameters that have a value."""
    pairs = {name: value for name, value in (query or {}).items() if value not in {None, ""}}
    return f"{path}?{urlencode(pairs)}" if pairs else path


async def _read(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """Return a body, or so much of a longer one that it exceeds the limit."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit_bytes:
            break
    return bytes(body)


def decode_object(raw: bytes, what: str) -> dict[str, Any]:
    return decode_json(raw, dict[str, Any], f"{what} did not answer with a JSON object")


async def apply_status(
    session: KubeSession,
    ref: ObjectRef,
    status: Mapping[str, Any],
    *,
    field_manager: str,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> dict[str, Any]:
    """Apply `status` to an object and return the new object: each writer owns exactly the fields that it sends.

    Fields that this manager applied before and that are now absent are removed; fields of other managers stay. An entry
    of `conditions` is owned by its `type`. Raises as `KubeSession.call`; a missing object is StatusError 404 (an apply
    to a subresource creates nothing).
    """
    body = {
        "apiVersion": ref.kind.api_version,
        "kind": ref.kind.name,
        "metadata": {"name": ref.name, "namespace": ref.namespace},
        "status": status,
    }
    # Forced: a field that somebody else wrote meanwhile is taken back instead of a conflict.
    path = with_query(f"{ref.path}/status", {"fieldManager": field_manager, "force": "true"})
    return await session.call("PATCH", path, body=body, content_type=APPLY_PATCH, timeout_seconds=timeout_seconds)
