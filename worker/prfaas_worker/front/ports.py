"""The API port, plain or inside TLS.

A handshake's peer is a stranger: it gets seconds, where asyncio would wait for a minute. And it is told what is wrong
with its certificate, where asyncio would close the connection before OpenSSL's alert has left.
"""

import asyncio
import logging
import ssl
from typing import Final

from aiohttp import web

from prfaas.errors import ConfigError, IdentityError, InternalError
from prfaas_worker.credentials import Credentials
from prfaas_worker.options import Options
from prfaas_worker.refusals import explain

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS: Final = 5.0
CLOSE_SECONDS: Final = 1.0


class TellingObject(ssl.SSLObject):
    """A connection's TLS that waits for its peer to leave once it is refused: meanwhile the alert leaves."""

    _refusal: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        """Go on with the handshake; fail only after the loop has sent what OpenSSL had to say about the failure."""
        if self._refusal is not None:
            raise self._refusal
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            reason = explain(error, "during the TLS handshake")
            log.info("API port: a handshake is refused: %s", reason)
            if not isinstance(reason, IdentityError):  # OpenSSL has nothing to say to it, or said it long ago
                raise
            self._refusal = error
            raise ssl.SSLWantReadError from error


class TlsSite(web.BaseSite):
    """A port whose handshakes have an end."""

    def __init__(self, runner: web.AppRunner, options: Options, context: ssl.SSLContext):
        context.sslobject_class = TellingObject
        super().__init__(runner, ssl_context=context)
        self._options = options

    @property
    def name(self) -> str:
        """The port's address."""
        return f"https://{self._options.host}:{self._options.api_port}"

    async def start(self) -> None:
        """Listen."""
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


async def open_api_port(runner: web.AppRunner, options: Options, credentials: Credentials | None) -> None:
    """Listen for the application of a runner.

    Raises:
        ConfigError: the port cannot be had.

    """
    if credentials is None:
        site: web.BaseSite = web.TCPSite(runner, options.host, options.api_port)
    else:
        site = TlsSite(runner, options, credentials.api_context())
    try:
        await site.start()
    except OSError as error:
        raise ConfigError(f"API port {options.host}:{options.api_port} cannot be opened: {error.strerror}") from error
