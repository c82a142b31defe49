"""The gateway's own certificate, and the proof that a worker is of the cluster that the routing table names.

Workers are known by the cluster in their certificate, never by address or host name. A changed directory gives new
contexts, and the client's pool keeps connections apart by context: none that an older one has judged is used again.
"""

import ssl
from pathlib import Path
from typing import NamedTuple

from prfaas import identity
from prfaas.credentials import CredentialFiles, Files, load, tls13, utc_now
from prfaas.errors import IdentityError


class _Proof(ssl.SSLObject):
    """A connection that ends its handshake only with an instance of the cluster that was meant."""

    def do_handshake(self) -> None:
        """Go on with the handshake; at its end judge whose certificate that was."""
        super().do_handshake()
        context = self.context
        if isinstance(context, _Context):
            try:
                found = identity.check_peer(self.getpeercert(binary_form=True) or b"", None, utc_now())
            except IdentityError as error:
                raise ssl.CertificateError(str(error)) from error
            if found != context.cluster:
                raise ssl.CertificateError(f"the worker is of cluster {found!r} and {context.cluster!r} was expected")


class _Context(ssl.SSLContext):
    """A client's context for workers of one cluster."""

    cluster = ""
    sslobject_class = _Proof


class _Known(NamedTuple):
    """The files as they were read, and the contexts made of them so far, by cluster."""

    files: Files
    contexts: dict[str, _Context]


class Credentials:
    """The files of one directory, as of now.

    Raises:
        ConfigError: they cannot be used at the start.

    """

    def __init__(self, directory: Path):
        self._known = CredentialFiles(directory, lambda files: _Known(files, {"": _context("", files)}))

    def context(self, cluster: str) -> ssl.SSLContext:
        """Return what a connection to a worker of this cluster is to use; the same one until the files change."""
        files, contexts = self._known.now()
        if cluster not in contexts:
            contexts[cluster] = _context(cluster, files)
        return contexts[cluster]


def _context(cluster: str, files: Files) -> _Context:
    context = tls13(_Context, ssl.PROTOCOL_TLS_CLIENT)
    context.cluster = cluster
    load(context, files)
    return context
