"""What a failed TLS connection means, in words that say whose certificate is at fault and what to do.

OpenSSL tells two things apart: what we found wrong with the peer, and the alert by which the peer told us what it found
wrong with us. In TLS 1.3 a client is through with its handshake before the server has judged its certificate, so such
an alert may come with any later read or write.
"""

import ssl
from typing import Final

from prfaas.errors import IdentityError, PeerError, ProtocolError, UnreachableError

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
    "CERTIFICATE_UNKNOWN": "it does not accept ours; its log says why",
}
_NO_TLS: Final = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "PACKET_LENGTH_TOO_LONG"}
_ALERT: Final = "_ALERT_"
_TLS_RECORDS: Final = range(20, 25)

MIXED: Final = "give --tls-dir to both instances, or to none"


def explain(error: Exception, doing: str) -> PeerError:
    """Return what a socket's or OpenSSL's error means; `doing` says during what, as in `while sending`."""
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
    """Whether an error is what the peer told us before it closed."""
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
    """Whether what came on a plain connection is the beginning of a TLS record; such a peer should hear of `MIXED`."""
    return len(first_bytes) >= 2 and first_bytes[0] in _TLS_RECORDS and first_bytes[1] == 3
