"""The one tree of errors. Its branches answer who can act: the caller, the peer, the capacity planner, or we ourselves.

PrfaasError
├── BadInputError        the caller sent or configured something wrong: say what, where, and the fix
│   ├── RequestError     an API request; carries the HTTP status and OpenAI-style code
│   └── ConfigError      a flag, file, custom resource or checkpoint
├── PeerError            another process or cluster did not do its part; retry elsewhere may help
│   ├── UnreachableError connection refused, timed out, or cut
│   │   └── LostError    after the peer got the request
│   ├── ProtocolError    bytes that break the protocol: never decoded, never retried as they are
│   │   └── DamagedError bytes that are not those that were sent: sending them again may help
│   └── IdentityError    a certificate that proves nothing, or another cluster than the one expected
├── CapacityError        the system is full; retry later may help
└── InternalError        our own promise is broken: a bug
"""

from typing import Final

import msgspec

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are no JSON: bad syntax, bad UTF-8, nesting that would exhaust the stack."""


MAX_WORDS: Final = 800
"""Of an answer to a request; a longer one would send back what the caller sent."""


class PrfaasError(Exception):
    """Root of all errors that prfaas raises on purpose."""


class BadInputError(PrfaasError):
    """The caller's input is wrong."""


class RequestError(BadInputError):
    """An API request that cannot be served as it is. The message names the field, the value and the fix.

    `status` is a 4xx of HTTP, `code` OpenAI-style (`model_not_found`), `param` the field at fault, if one is.
    """

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request", param: str | None = None):
        super().__init__(message if len(message) <= MAX_WORDS else f"{message[:MAX_WORDS]}...")
        self.status = status
        self.code = code
        self.param = param


class ConfigError(BadInputError):
    """A flag, file, custom resource or checkpoint is wrong."""


class PeerError(PrfaasError):
    """Another process or cluster did not do its part."""


class UnreachableError(PeerError):
    """The peer refused the connection, timed out, or went away."""


class LostError(UnreachableError):
    """The peer closed the connection after it got the request: the request may be the cause."""


class ProtocolError(PeerError):
    """The peer sent bytes that break the protocol."""


class DamagedError(ProtocolError):
    """Received bytes differ from the sent bytes."""


class MismatchError(ProtocolError):
    """The peer serves another model, version or shape of cache; until one side is changed, nothing crosses."""


class IdentityError(PeerError):
    """A certificate proves no identity or a wrong one; it must be replaced first."""


class CapacityError(PrfaasError):
    """The system is full now."""


class InternalError(PrfaasError):
    """Our own code broke a promise: a bug."""


def explained(error: Exception) -> PrfaasError:
    """Return an error as one of ours: a sentence for memory that is full, and a bug for all that nobody expects."""
    if isinstance(error, PrfaasError):
        return error
    if isinstance(error, MemoryError):
        return CapacityError(
            "this process has no memory left: raise the container's limit, or lower its transfer memory"
        )
    return InternalError(repr(error))


def install_extra(extra: str) -> str:
    """Return the command that installs an extra, for an error message."""
    return f"run in a checkout of prfaas: pip install '.[{extra}]'"
