"""This instance's certificate, and the proof of who its peers are: TLS 1.3 with certificates on both sides.

A peer is believed by its certificate's cluster name, never by its address or host name: pods move. There are no session
tickets: each connection is judged anew by the authorities of that moment, and a client that never reads cannot leave a
ticket behind that would turn an orderly close into a reset.
"""

import ssl
from pathlib import Path
from typing import NamedTuple

from prfaas import identity
from prfaas.credentials import CredentialFiles, Files, load, tls13, utc_now
from prfaas.errors import IdentityError


class Context(ssl.SSLContext):
    """A context that knows by which authorities (a bundle, PEM) it judges peers."""

    authorities: bytes = b""


class Contexts(NamedTuple):
    """All that comes from one reading of the files."""

    files: Files
    data: Context
    """Server; a client certificate is required."""
    api: Context
    """Server; a client certificate is checked where one is shown."""
    client: Context


class Credentials:
    """The files of one directory, as of now. May be asked from any thread.

    Raises:
        ConfigError: they cannot be used at the start.

    """

    def __init__(self, directory: str | Path):
        self._current = CredentialFiles(directory, _contexts)

    @property
    def cluster(self) -> str:
        """The cluster that our own certificate names."""
        return self.now().files.cluster

    @property
    def expires_unix_seconds(self) -> float:
        """When our own certificate, the one that new connections show, ends."""
        return self.now().files.validity.not_after.timestamp()

    @property
    def problem(self) -> str:
        """Why newer files are not in use, empty when nothing is wrong."""
        return self._current.problem

    def now(self) -> Contexts:
        """Return what new connections are to use, read anew where the files changed."""
        return self._current.now()

    def check(self, certificate: bytes, judged_by: bytes | None = None) -> str:
        """Return the cluster of a peer, from the certificate (DER) that its handshake has shown.

        Give the `authorities` of that handshake as `judged_by` when it is long past: have they changed since, the chain
        is checked again. A connection that is refused then may be good with a new handshake.

        Raises:
            IdentityError: it does not hold any more, or names no cluster.

        """
        authorities = self.now().files.authorities
        changed = judged_by not in (None, authorities)
        return identity.check_peer(certificate, authorities if changed else None, utc_now())

    def require_valid(self) -> None:
        """Raise IdentityError if our own certificate has ended: nobody would accept it."""
        ends = self.now().files.validity.not_after
        if utc_now() > ends:
            raise IdentityError(
                f"our own certificate in {self._current.directory} expired at {ends:%F %R} UTC; renew it: newer files "
                f"are used at once{f', but not these: {self.problem}' if self.problem else ''}"
            )

    def api_context(self) -> ssl.SSLContext:
        """Return a server's context that lasts: each of its handshakes uses what is current then."""
        lasting = _context(ssl.PROTOCOL_TLS_SERVER)

        def use_current(tls: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            tls.context = self.now().api

        lasting.sni_callback = use_current
        lasting.verify_mode = ssl.CERT_OPTIONAL
        return lasting


def _contexts(files: Files) -> Contexts:
    data, api = _context(ssl.PROTOCOL_TLS_SERVER), _context(ssl.PROTOCOL_TLS_SERVER)
    client = _context(ssl.PROTOCOL_TLS_CLIENT)
    api.verify_mode = ssl.CERT_OPTIONAL
    for context in (data, api, client):
        load(context, files)
        context.authorities = files.authorities
    return Contexts(files, data, api, client)


def _context(side: int) -> Context:
    context = tls13(Context, side)
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    if side == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    return context
