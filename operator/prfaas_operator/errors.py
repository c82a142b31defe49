"""Why an API server or a configuration stopped a reconcile; each error knows the condition reason that it becomes."""

from typing import ClassVar

from prfaas.errors import ConfigError, PeerError, PrfaasError, UnreachableError


class ClusterUnreachableError(UnreachableError):
    """The API server refused the connection, did not answer in time, or is too busy to serve."""

    reason: ClassVar = "ClusterUnreachable"


class ServerFailedError(PeerError):
    """The API server answered that it failed: its store, a webhook, or an apply that it cannot merge."""

    reason: ClassVar = "ServerError"


class UnauthorizedError(ConfigError):
    """The API server does not accept our credentials."""

    reason: ClassVar = "Unauthorized"


class TokenExpiredError(ConfigError):
    """The token of a member's kubeconfig has come to its end."""

    reason: ClassVar = "TokenExpired"


class ForbiddenError(ConfigError):
    """The API server knows us and refuses this call."""

    reason: ClassVar = "Forbidden"


class NotLeaderError(PeerError):
    """Another replica may lead by now, so that this one writes nothing."""

    reason: ClassVar = "NotLeader"


class InvalidObjectError(ConfigError):
    """The API server, or our own reading, finds an object malformed."""

    reason: ClassVar = "Invalid"


class KindNotServedError(InvalidObjectError):
    """The API server does not serve a kind at all, which says nothing about its objects."""

    reason: ClassVar = "KindNotServed"


class NamespaceNotFoundError(ConfigError):
    """The namespace that an object should be created in does not exist."""

    reason: ClassVar = "NamespaceNotFound"


class ClusterNotFoundError(ConfigError):
    """A pool names a MemberCluster that does not exist."""

    reason: ClassVar = "ClusterNotFound"


class SecretNotFoundError(ConfigError):
    """A MemberCluster names a Secret, or a key of it, that does not exist."""

    reason: ClassVar = "SecretNotFound"


class KubeconfigRefusedError(ConfigError):
    """A kubeconfig would run or read something inside the operator, or is not usable."""

    reason: ClassVar = "KubeconfigRefused"


class ForbiddenSecretError(ConfigError):
    """A pool would read a Secret that is the operator's own."""

    reason: ClassVar = "ForbiddenSecret"


class ChildConflictError(ConfigError):
    """An object that the operator would own exists already and belongs to somebody else."""

    reason: ClassVar = "ChildConflict"


class AuthorityDamagedError(ConfigError):
    """The hub's Secret of authorities cannot be read."""

    reason: ClassVar = "AuthorityDamaged"


class CertificateNotReadyError(ConfigError):
    """A cluster's instances cannot start, because its certificate is not there yet."""

    reason: ClassVar = "CertificateNotReady"


class ConflictError(PeerError):
    """Somebody else changed or deleted the object in between."""

    reason: ClassVar = "Conflict"


def reason_of(error: BaseException) -> str:
    """Return the condition reason of an error; InternalError for what we did not foresee."""
    return getattr(error, "reason", "PeerError") if isinstance(error, PrfaasError) else "InternalError"
