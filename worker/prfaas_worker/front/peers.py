"""Who may ask what on a port that knows its callers: instances' and operators' endpoints want a cluster's certificate.

Whatever is not listed as open here is closed, so that a new endpoint is no gap. Without TLS nobody is known, and
nothing is asked: then the network alone protects the port.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from prfaas.errors import ConfigError, IdentityError
from prfaas_worker.credentials import Credentials
from prfaas_worker.front.answers import error_body
from prfaas_worker.options import Options

log = logging.getLogger(__name__)

OPEN: Final = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/openapi.json",
        "/healthz",
        "/readyz",
        "/metrics",
    }
)
"""What clients, probes and Prometheus ask for: they have no certificates of ours."""
PEER: Final = web.RequestKey("peer", str)
"""The cluster of a request's certificate, empty where none was asked for."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def credentials_of(options: Options) -> Credentials | None:
    """Read the credentials that the options name; None when they name none, which the log tells.

    Raises:
        ConfigError: they cannot be used, or are of another cluster.

    """
    if not options.tls_dir:
        log.warning("both ports are open to whoever reaches them, and read by whoever is on the way: give --tls-dir")
        return None
    credentials = Credentials(options.tls_dir)
    if credentials.cluster != options.cluster:
        raise ConfigError(
            f"--tls-dir {options.tls_dir} is of cluster {credentials.cluster!r} and --cluster is {options.cluster!r}; "
            f"issue a certificate for {options.cluster!r}"
        )
    return credentials


def guard(credentials: Credentials | None) -> Middleware:
    """Return the middleware that asks for certificates, if there are `credentials` to judge them by."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[PEER] = ""
        if credentials is not None and request.path not in OPEN:
            try:
                request[PEER] = _peer(request, credentials)
            except IdentityError as error:
                return _refused(f"{request.method} {request.path}: {error}")
        return await handler(request)

    return check


def _peer(request: web.Request, credentials: Credentials) -> str:
    """Return the cluster of a request's certificate as it is judged now: its connection may be old."""
    tls = request.get_extra_info("ssl_object")
    certificate = tls.getpeercert(True) if tls is not None else None
    if tls is None or not certificate:
        raise IdentityError("only instances may ask for this: show a client certificate of a cluster")
    return credentials.check(certificate, tls.context.authorities)


def _refused(message: str) -> web.Response:
    """Refuse, and close the connection: with a new certificate the caller must connect anew."""
    body = error_body(message, status=401, code="client_certificate_required")
    response = web.json_response(body=msgspec.json.encode(body), status=401)
    response.force_close()
    return response
