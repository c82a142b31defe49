"""Protects the API port: TLS where there are credentials, and for each path who may call it, as `prfaas.rights` says.

Without TLS no caller is known and no certificate is asked for: then only the network protects the port.

The other end of a handshake is a stranger: it gets seconds, where asyncio would wait for a minute. It also learns what
is wrong with its certificate, where asyncio would close the connection before OpenSSL's alert has left.
"""

import asyncio
import logging
import ssl
from typing import Final

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from prfaas.errors import ConfigError, IdentityError, InternalError, RequestError
from prfaas.http_server import error_body
from prfaas.rights import BY_BODY, PREFILLS, Identity, counted_as, home_of, is_open, refusal
from prfaas.wire.headers import CODE_NO_CERTIFICATE, CODE_NOT_ALLOWED
from prfaas_transfer.credentials import PeerCredentials, explain
from prfaas_worker.options import Options

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS: Final = 5.0
CLOSE_SECONDS: Final = 1.0
COUNTED_AS: Final = web.RequestKey("counted_as", str)
"""The name under which what a request's caller holds counts: see `prfaas.rights.counted_as`."""


def credentials_of(options: Options) -> PeerCredentials | None:
    """Read the credentials; None, with a warning, without any. Raises ConfigError if they cannot be used."""
    if not options.tls_dir:
        log.warning(
            "API and data port are open and not encrypted: who reaches them can use and read them; give --tls-dir"
        )
        return None
    credentials = PeerCredentials(options.tls_dir)
    if credentials.cluster != options.cluster:
        raise ConfigError(
            f"--tls-dir {options.tls_dir} is of cluster {credentials.cluster!r} and --cluster is {options.cluster!r}; "
            f"issue a certificate for {options.cluster!r}"
        )
    return credentials


def require_rights(credentials: PeerCredentials | None) -> Middleware:
    """Return the middleware that asks who may call a path, if there are `credentials` to know callers by."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if credentials is not None and not is_open(request.path):
            try:
                right = () if request.path not in BY_BODY else (PREFILLS,)  # the handler reads which it is
                caller = require_right(request, credentials, request.path, *right)
            except RequestError as error:
                return _refusal(f"{request.method} {error}", error)
            if caller is not None:
                request[COUNTED_AS] = counted_as(caller, credentials.cluster)
        return await handler(request)

    return check


def require_right(
    request: web.Request, credentials: PeerCredentials, endpoint: str, *others: str, param: str | None = None
) -> Identity | None:
    """Return what a request's caller proves. Raises RequestError, about the first, unless it may use one of these
    endpoints: paths, or what a field of its body asks for."""
    try:
        caller = _caller(request, credentials)
    except IdentityError as error:
        raise RequestError(f"{endpoint}: {error}", status=401, code=CODE_NO_CERTIFICATE, param=param) from error
    reason = refusal(endpoint, caller, credentials.cluster)
    if reason and all(refusal(other, caller, credentials.cluster) for other in others):
        status, code = (401, CODE_NO_CERTIFICATE) if caller is None else (403, CODE_NOT_ALLOWED)
        raise RequestError(f"{endpoint}: {reason}", status=status, code=code, param=param)
    return caller


def _caller(request: web.Request, credentials: PeerCredentials) -> Identity | None:
    """Return what a request's caller proves now, since its connection may be old. Raises IdentityError."""
    tls = request.get_extra_info("ssl_object")
    certificate = tls.getpeercert(True) if tls is not None else None
    return credentials.check(certificate, tls.context.authorities) if tls is not None and certificate else None


def _refusal(message: str, error: RequestError) -> web.Response:
    """Refuse, and close the connection: the caller must connect again with another certificate."""
    body = error_body(message, status=error.status, code=error.code)
    response = web.json_response(body=msgspec.json.encode(body), status=error.status)
    response.force_close()
    return response


def unreachable(credentials: PeerCredentials | None) -> str:
    """Return why no gateway reaches this instance any more; empty if one does. Gateways run beside the hub's."""
    if credentials is None or credentials.cluster == home_of(credentials.cluster):
        return ""
    return credentials.why_alone


class _AlertingTls(ssl.SSLObject):
    """A connection's TLS that keeps a refused connection open until its peer closes it, so that the alert is sent."""

    _refusal: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        """Continue the handshake; fail only after the loop has sent OpenSSL's alert."""
        if self._refusal is not None:
            raise self._refusal
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            reason = explain(error, "during the TLS handshake")
            log.info("API port: a handshake is refused: %s", reason)
            if not isinstance(reason, IdentityError):  # OpenSSL has no alert for it, or has sent it
                raise
            self._refusal = error
            raise ssl.SSLWantReadError from error


class _TlsSite(web.BaseSite):
    def __init__(self, runner: web.AppRunner, options: Options, context: ssl.SSLContext):
        context.sslobject_class = _AlertingTls
        super().__init__(runner, ssl_context=context)
        self._options = options

    @property
    def name(self) -> str:
        return f"https://{self._options.host}:{self._options.api_port}"

    async def start(self) -> None:
        await super().start()
        protocols = self._runner.server
        if protocols is None:
            raise InternalError("the runner of a port was not set up")
        self._server = await asyncio.get_running_loop().create_server(
            protocols,
            self._options.host,
            self._options.api_port,
            ssl=self._ssl_context,
            ssl_handshake_timeout=HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=CLOSE_SECONDS,
            backlog=self._backlog,
        )


async def open_api_port(runner: web.AppRunner, options: Options, credentials: PeerCredentials | None) -> None:
    """Listen for the application of a runner. Raises ConfigError if the port is not available."""
    if credentials is None:
        site: web.BaseSite = web.TCPSite(runner, options.host, options.api_port)
    else:
        site = _TlsSite(runner, options, credentials.api_context())
    try:
        await site.start()
    except OSError as error:
        raise ConfigError(f"API port {options.host}:{options.api_port} cannot be opened: {error.strerror}") from error
