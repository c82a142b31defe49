"""Loads this instance's certificate, checks its peers' certificates, and explains failed TLS connections.

TLS 1.3 with certificates on both sides. A peer is known by its certificate's cluster name, never by its address or host
name: pods move. There are no session tickets. So each connection is checked by the current authorities. A client that
never reads cannot leave a ticket behind, which would turn an orderly close into a reset.

OpenSSL reports two kinds of failure. One is what we found wrong with the peer. The other is the alert by which the peer
reports what it found wrong with us. In TLS 1.3 a client finishes its handshake before the server has checked its
certificate. So any later read or write may get such an alert.
"""

import ssl
from pathlib import Path
from typing import Final, NamedTuple

from prfaas import identity
from prfaas.credentials import CredentialFiles, Files, check_times, load, tls13, utc_now
from prfaas.errors import IdentityError, PeerError, ProtocolError, UnreachableError
from prfaas.rights import Identity

# X509_V_ERR_* of openssl/x509_vfy.h.
_WRONG_WITH_THEM: Final = {
    9: "is not valid yet; check both clocks",
    10: "has expired; renew it there",
    18: "was issued by itself; issue it by the installation's authority",
    19: "comes from an authority that our ca.crt does not hold; add that authority here, or issue it anew there",
    20: "comes from an authority that our ca.crt does not hold; add that authority here, or issue it anew there",
    21: "comes from an authority that our ca.crt does not hold; add that authority here, or issue it anew there",
    26: "is not for this purpose; issue it for clients and servers both",
}
# Alerts of RFC 8446, section 6.2, as OpenSSL's names for them end.
_WRONG_WITH_US: Final = {
    "CERTIFICATE_REQUIRED": "it wants a certificate and we showed none",
    "CERTIFICATE_EXPIRED": "ours has expired, or our clocks differ; renew it here",
    "UNKNOWN_CA": "its ca.crt does not hold the authority of ours; add that there, or issue ours anew",
    "BAD_CERTIFICATE": "it cannot verify ours; issue ours anew",
    "UNSUPPORTED_CERTIFICATE": "ours is not for this purpose; issue it for clients and servers both",
    "CERTIFICATE_UNKNOWN": "it does not accept ours; its log has the reason",
}
_NO_TLS: Final = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "PACKET_LENGTH_TOO_LONG"}
_ALERT: Final = "_ALERT_"
# RFC 8446, B.1: from change_cipher_spec to heartbeat. The byte behind is 3 in every version of TLS.
_TLS_RECORDS: Final = range(20, 25)

MIXED: Final = "give --tls-dir to both instances, or to none"


class Context(ssl.SSLContext):
    """A TLS context and the authorities (PEM bundle) that it accepts."""

    authorities: bytes = b""


class Contexts(NamedTuple):
    """The contexts made from one reading of the files."""

    files: Files
    data: Context  # Server context; a client certificate is required.
    api: Context  # Server context; a client certificate is optional and checked.
    client: Context


class PeerCredentials:
    """The current files of one directory. Any thread may call. Raises ConfigError if the files cannot be used at the
    start."""

    def __init__(self, directory: str | Path):
        self._ports: list[Context] = []
        self._current = CredentialFiles(directory, self._make)

    @property
    def cluster(self) -> str:
        return self.now().files.cluster

    @property
    def expires_unix_seconds(self) -> float:
        """The end of the certificate that new connections use."""
        return self.now().files.validity.not_after.timestamp()

    @property
    def problem(self) -> str:
        """The reason why newer files are not in use, or empty."""
        return self._current.problem

    def now(self) -> Contexts:
        """Return the contexts for new connections; read the files again if they changed."""
        return self._current.now()

    def check(self, certificate: bytes, checked_by: bytes | None = None) -> Identity:
        """Return what a peer's certificate (DER) proves.

        For an old connection pass the authorities of its handshake as `checked_by`: if they changed since, the chain is
        checked again. A new handshake may then succeed where the connection is refused. Raises IdentityError if the
        certificate is no longer valid or revoked, or names no cluster.
        """
        files = self.now().files
        changed = checked_by not in (None, files.authorities)
        return identity.check_peer(certificate, files.authorities if changed else None, utc_now(), files.peers)

    @property
    def why_alone(self) -> str:
        """The reason why only our own cluster is reached and reaches us, or empty."""
        files = self.now().files
        return files.why_alone if files.ran_out else ""

    def require_valid_for(self, cluster: str) -> None:
        """Raise IdentityError if another cluster takes our certificate no longer."""
        files = self.now().files
        if files.ran_out and cluster != files.cluster:
            raise IdentityError(
                f"our own credentials in {self._current.directory}: {files.why_alone}"
                f"{f', but not these: {self.problem}' if self.problem else ''}"
            )

    def api_context(self) -> ssl.SSLContext:
        """Return a server's context that uses the current files in each handshake."""
        lasting = _context(ssl.PROTOCOL_TLS_SERVER)

        def use_current(tls: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            tls.context = self.now().api

        # OpenSSL calls this in each handshake: the one moment at which a listener's context can be exchanged.
        lasting.sni_callback = use_current
        # A connection copies it when it is made, before the callback, and keeps it: the exchanged context's does not
        # count. The same holds for what `check_times` sets.
        lasting.verify_mode = ssl.CERT_OPTIONAL
        check_times(lasting, self.now().files)
        self._ports.append(lasting)
        return lasting

    def _make(self, files: Files) -> Contexts:
        for lasting in self._ports:
            check_times(lasting, files)
        return _contexts(files)


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


def explain(error: Exception, doing: str) -> PeerError:
    """Convert a socket's or OpenSSL's error; `doing` names the activity, as in `while sending`."""
    if isinstance(error, ssl.SSLCertVerificationError):
        known = _WRONG_WITH_THEM.get(error.verify_code, f"cannot be verified: {error.verify_message}")
        return IdentityError(f"the peer's certificate {known}")
    if isinstance(error, TimeoutError):
        return UnreachableError(f"the peer was silent for too long {doing}: given up")
    if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return UnreachableError(f"the peer closed the connection {doing}")
    if isinstance(error, ssl.SSLError) and error.reason:
        return _explain_reason(error.reason, doing)
    return UnreachableError(f"the connection broke {doing}: {error}")


def is_alert(error: Exception) -> bool:
    """Return True if an error is an alert that the peer sent."""
    return isinstance(error, ssl.SSLError) and _ALERT in (error.reason or "")


def _explain_reason(reason: str, doing: str) -> PeerError:
    alert = reason.partition(_ALERT)[2]
    if alert in _WRONG_WITH_US:
        return IdentityError(f"the peer refuses our certificate: {_WRONG_WITH_US[alert]}")
    if alert:
        return ProtocolError(f"the peer ended TLS {doing}: {alert.lower().replace('_', ' ')}")
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return IdentityError("the peer showed no certificate; give it --tls-dir")
    if reason in _NO_TLS:
        return ProtocolError(f"the peer does not speak TLS; {MIXED}")
    return ProtocolError(f"TLS broke {doing}: {reason.lower().replace('_', ' ')}")


def is_tls(first_bytes: bytes | bytearray | memoryview) -> bool:
    """Return True if the first bytes on a plain connection begin a TLS record. Such a peer gets the `MIXED` error."""
    return len(first_bytes) >= 2 and first_bytes[0] in _TLS_RECORDS and first_bytes[1] == 3
