"""A session with one API server: the package's configuration, TLS and connections, with our bounds and errors.

A bound service account token is replaced on disk about once an hour, so every call reads the file again. A half-dead
server accepts connections and never answers, so every call ends after `timeout_seconds`. Decision 017 says what the
package does instead.
"""

import asyncio
import os
import re
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import urlencode

import aiohttp
import msgspec

from prfaas.bounds.answers import ACCEPTED, read_at_most, unpacked
from prfaas.errors import UNREADABLE, ConfigError, InternalError, PeerError, ProtocolError, UnreachableError
from prfaas.kube.package import Configuration, RESTClientObject
from prfaas.ports import url_host
from prfaas.util import check_values, decode_json

SERVICE_ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")
JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml; charset=utf-8"
"""The package sends bytes as they are only where it does not know the type, so the type has a parameter."""
_NOT_OF_YAML = re.compile(rb"\x7f|\xc2[\x80-\x9f]|\xe2\x80[\xa8\xa9]|\xef\xbb\xbf|\xef\xbf[\xbe\xbf]")
"""Characters in UTF-8 that JSON may hold as they are, and that YAML refuses or takes for the end of a line."""
DEFAULT_TIMEOUT_SECONDS = 10.0
CONNECT_SECONDS = 4.0
CONNECTIONS = 32
"""Each watch holds one, and reconciles of different objects run side by side. The package would allow 100."""
MAX_ANSWER_BYTES = 16 << 20
"""Much more than a page of 50 pods. A hostile member's server must not fill this process's memory."""
LONG_ANSWER_BYTES = 1 << 20
"""One server's longer answers are read one after the other: many at once would fill the memory, too."""
MAX_ANSWER_VALUES = 200_000
"""Of JSON: a pod has some hundred, and an object of one member takes 200 bytes, written in 5."""
MAX_REFUSAL_BYTES = 1 << 20
MAX_PARAMETER_CHARS = 1 << 14
"""Of a URL. Some are the server's own words, as the one for the next page, and a long one would be copied often."""
READ_BUFFER_BYTES = 1 << 16
"""The package's own is 2 MiB a connection."""
NOT_FOUND = 404

Object = dict[str, Any]
"""An object of the API server's, as JSON has it."""
Authorization = Callable[[], str]
"""Returns the header Authorization of the next call, empty for none; may raise ConfigError."""
OnAnswer = Callable[[int, Mapping[str, str]], None]
"""Takes the HTTP status and the headers of an answer, a refusal too."""


def encode_body(body: Mapping[str, Any]) -> bytes:
    """Return a body as JSON that a reader of YAML understands in the same way, as a server-side apply needs it."""
    return _NOT_OF_YAML.sub(lambda found: b"\\u%04x" % ord(found[0].decode()), msgspec.json.encode(body))


class StatusError(PeerError):
    """The API server refused a call.

    `status` is the HTTP status, `answer` the Status object (empty if missing), `headers` the answer's, `message` the
    server's sentence.
    """

    def __init__(self, what: str, status: int, raw: bytes | bytearray, headers: Mapping[str, str]):
        try:
            self.answer = msgspec.json.decode(raw, type=Object)
        except UNREADABLE:
            self.answer = {}
        message = self.answer.get("message")
        self.message = message if message and isinstance(message, str) else raw[:200].decode("utf-8", "replace")
        super().__init__(f"{what}: {status} {self.message}")
        self.status = status
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


class KubeSession:
    """Calls one API server. Use it as an async context manager, or call `close`.

    `authorization` is asked for every call. `certificate` and `key` are this client's, in PEM. `settings` are fields of
    the package's Configuration, such as `ca_cert_data`, `tls_server_name` and `proxy`. `bounds_part` of the bounds on
    answers holds here. Raises OSError or ValueError for texts that TLS cannot load.
    """

    def __init__(
        self,
        server: str,
        *,
        authorization: Authorization | None = None,
        certificate: str = "",
        key: str = "",
        bounds_part: float = 1.0,
        **settings: Any,
    ):
        self.authorization = authorization
        self._bounds_part = bounds_part
        settings.setdefault("connection_pool_maxsize", CONNECTIONS)
        self.configuration = Configuration(
            server.rstrip("/"),
            # The environment's proxies and ~/.netrc are for no API server but those of a person's kubeconfig.
            client_session_kwargs={
                "trust_env": False,
                "middlewares": (partial(_refuse_redirect, self.bound(MAX_REFUSAL_BYTES)),),
                "read_bufsize": READ_BUFFER_BYTES,
                "auto_decompress": False,
            },
            **settings,
        )
        self._rest = _rest_client(self.configuration, certificate, key)
        self._is_closed = False
        self._reads_long = asyncio.Lock()

    @classmethod
    def in_cluster(cls) -> Self:
        """Return the session of a pod's own service account; raise ConfigError outside of a pod."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
        if not host or not port:
            raise ConfigError("KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are unset: run this in a pod")
        server = f"https://{url_host(host)}:{port}"  # An address, because a cluster's DNS may be down or missing.
        authority, token = SERVICE_ACCOUNT_DIR / "ca.crt", SERVICE_ACCOUNT_DIR / "token"
        try:
            return cls(server, authorization=token_of_file(token), ssl_ca_cert=str(authority))
        except OSError as error:
            raise ConfigError(f"{authority} cannot be read ({error}): give the pod a service account") from error

    def bound(self, usual: int) -> int:
        """Return what holds here of a usual bound on what the server makes this process hold."""
        return int(usual * self._bounds_part)

    async def close(self) -> None:
        self._is_closed = True
        await self._rest.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def call(
        self, method: str, path: str, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS, **sent: Any
    ) -> Object:
        """Send one request, with the arguments of `stream`, and return the object in the answer.

        Raises StatusError for a refusal, UnreachableError for no answer in time, ProtocolError for one that is no JSON.
        """
        long_bytes, most_bytes = self.bound(LONG_ANSWER_BYTES), self.bound(MAX_ANSWER_BYTES)
        most_values = self.bound(MAX_ANSWER_VALUES)
        what, ends_at = f"{method} {path}", asyncio.get_running_loop().time() + timeout_seconds
        async with (
            self.stream(method, path, timeout_seconds=timeout_seconds, **sent) as response,
            asyncio.timeout_at(ends_at),  # the request's own timeout sees no wait for another answer
        ):
            pieces = unpacked(response)
            raw = await read_at_most(pieces, long_bytes)
            try:
                if len(raw) <= long_bytes:
                    return _object(raw, what, most_values)
                async with self._reads_long:
                    await read_at_most(pieces, most_bytes, raw)
                    if len(raw) > most_bytes:
                        raise ProtocolError(f"{what} answered more than {most_bytes} bytes")
                    return _object(raw, what, most_values)
            finally:
                raw.clear()  # an error's traceback would hold it for as long as somebody keeps the error

    async def find(self, path: str, **sent: Any) -> Object | None:
        """Return the object at a path, None if there is none; raises as `call`."""
        try:
            return await self.call("GET", path, **sent)
        except StatusError as error:
            if error.status != NOT_FOUND:
                raise
            return None

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | bytes | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        on_answer: OnAnswer | None = None,
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Yield the response of one request, all within `timeout_seconds`; raises as `call`, also while it is read.

        Its body may be packed: read it by `read_answer`, or by `answers.unpacked`.
        Parameters of `query` that are None or empty are left out. The body of a PATCH is a merge patch, or a
        server-side apply if it is bytes of `encode_body`.
        """
        if self._is_closed:
            raise InternalError("KubeSession is used after its end")
        what = f"{method} {self.configuration.host}{path}"
        parameters = {name: str(value) for name, value in (query or {}).items() if value is not None and value != ""}
        if long := [name for name, value in parameters.items() if len(value) > MAX_PARAMETER_CHARS]:
            raise ProtocolError(f"{what}: {long[0]} is longer than {MAX_PARAMETER_CHARS} characters, so it is not sent")
        url = f"{self.configuration.host}{path}" + (f"?{urlencode(parameters)}" if parameters else "")
        content_type = JSON if method != "PATCH" else APPLY_PATCH if type(body) is bytes else MERGE_PATCH
        headers = {**ACCEPTED, "Content-Type": content_type}
        if self.authorization is not None and (authorization := self.authorization()):
            headers["Authorization"] = authorization
        timeout = aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=min(timeout_seconds, CONNECT_SECONDS))
        try:
            try:
                answer = await self._rest.request(method, url, headers, body, _request_timeout=timeout)
            except StatusError as redirect:
                if on_answer is not None:
                    on_answer(redirect.status, redirect.headers)
                raise
            async with answer.response as response:
                if on_answer is not None:
                    on_answer(response.status, response.headers)
                if response.status >= 300:
                    raise await _refusal(what, response, self.bound(MAX_REFUSAL_BYTES))
                yield response
        except (TimeoutError, aiohttp.ClientError, OSError, EOFError) as error:
            raise UnreachableError(f"{what}: {type(error).__name__}: {error}; is the API server reachable?") from error


def _rest_client(configuration: Configuration, certificate: str, key: str) -> Any:
    """Return the package's client. The ssl module loads a certificate from files only, which are deleted at once."""
    texts = {name: text for name, text in (("cert_file", certificate), ("key_file", key)) if text}
    if not texts:
        return RESTClientObject(configuration)  # no file is written: a pod may have a read-only root
    with tempfile.TemporaryDirectory(prefix="prfaas-") as directory:
        for name, text in texts.items():
            path = Path(directory, name)
            path.touch(mode=0o600)
            path.write_text(text)
            setattr(configuration, name, str(path))
        client = RESTClientObject(configuration)
    configuration.cert_file = configuration.key_file = None
    return client


async def _refusal(what: str, response: aiohttp.ClientResponse, most_bytes: int) -> StatusError:
    return StatusError(what, response.status, await read_answer(response, most_bytes), response.headers)


async def _refuse_redirect(
    most_bytes: int, request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Refuse a redirect: an API server sends none, and a hostile one would choose what this process reads."""
    response = await send(request)
    if 300 <= response.status < 400:
        async with response:
            raise await _refusal(f"{request.method} {request.url.with_query(None)}", response, most_bytes)
    return response


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


async def read_answer(response: aiohttp.ClientResponse, limit_bytes: int) -> bytearray:
    """Return a body, or so much of a longer one that it exceeds the limit."""
    return await read_at_most(unpacked(response), limit_bytes)


def _object(raw: bytearray, what: str, most_values: int) -> Object:
    """Return the object that an answer is. Raises ProtocolError."""
    check_values(raw, most_values, f"{what} answered JSON")
    return decode_json(raw, Object, f"{what} did not answer with a JSON object")
