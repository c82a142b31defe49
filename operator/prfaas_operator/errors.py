"""Errors that stop a reconcile; each one carries the condition reason that the status shows."""

from typing import ClassVar

from prfaas.errors import ConfigError, PeerError, PrfaasError, UnreachableError


class ClusterUnreachableError(UnreachableError):
    """The API server refused the connection, did not answer in time, or is too busy to serve."""

    reason: ClassVar = "ClusterUnreachable"


class TooManyObjectsError(PeerError):
    """A member's API server lists more objects than are read of it."""

    reason: ClassVar = "TooManyObjects"


class ServerFailedError(PeerError):
    """The API server failed: its store, a webhook, or an apply that it cannot merge."""

    reason: ClassVar = "ServerError"


class UnauthorizedError(ConfigError):
    """The API server does not accept our credentials."""

    reason: ClassVar = "Unauthorized"


class TokenExpiredError(ConfigError):
    """The token of a member's kubeconfig has expired."""

    reason: ClassVar = "TokenExpired"


class ForbiddenError(ConfigError):
    """The API server authenticated us and denies this call."""

    reason: ClassVar = "Forbidden"


class NotLeaderError(PeerError):
    """Another replica may lead, so this one must not write."""

    reason: ClassVar = "NotLeader"


class InvalidObjectError(ConfigError):
    """An object is malformed, by the API server's checks or by ours."""

    reason: ClassVar = "Invalid"


class KindNotServedError(InvalidObjectError):
    """The API server does not serve a kind; it may still store objects of that kind."""

    reason: ClassVar = "KindNotServed"


class NamespaceNotFoundError(ConfigError):
    """The namespace of a new object does not exist."""

    reason: ClassVar = "NamespaceNotFound"


class ClusterNotFoundError(ConfigError):
    """A pool names a MemberCluster that does not exist."""

    reason: ClassVar = "ClusterNotFound"


class ClusterRevokedError(ConfigError):
    """A pool runs in a MemberCluster that was cut off."""

    reason: ClassVar = "Revoked"


class AddressingRefusedError(ConfigError):
    """A pool's engine cannot be reached at its node's ports, and its cluster is reached so."""

    reason: ClassVar = "EngineNeedsPodIP"


class ProfileNotFoundError(ConfigError):
    """A pool names a built-in profile that does not exist."""

    reason: ClassVar = "ProfileNotFound"


class SecretNotFoundError(ConfigError):
    """A MemberCluster or a policy names a Secret, or a key of it, that does not exist."""

    reason: ClassVar = "SecretNotFound"


class KubeconfigRefusedError(ConfigError):
    """A kubeconfig would run or read something inside the operator, or is not usable."""

    reason: ClassVar = "KubeconfigRefused"


class ForbiddenSecretError(ConfigError):
    """A pool would read a Secret of the operator, or an object names one that is not for prfaas to use."""

    reason: ClassVar = "ForbiddenSecret"


class ForbiddenTemplateError(ConfigError):
    """A pool in the hub names a service account or a PriorityClass that the hub's owner did not list."""

    reason: ClassVar = "ForbiddenTemplate"


class ChildConflictError(ConfigError):
    """An object with the name of a child exists already and has another owner."""

    reason: ClassVar = "ChildConflict"


class AuthorityMissingError(ConfigError):
    """The hub's Secret of authorities is gone, and instances hold certificates of it."""

    reason: ClassVar = "AuthorityMissing"


class AuthorityDamagedError(ConfigError):
    """The hub's Secret of authorities cannot be read."""

    reason: ClassVar = "AuthorityDamaged"


class CertificateNotReadyError(ConfigError):
    """A cluster's instances cannot start, because its certificate does not exist yet."""

    reason: ClassVar = "CertificateNotReady"


class ConflictError(PeerError):
    """Another client changed or deleted the object in between."""

    reason: ClassVar = "Conflict"


def reason_of(error: BaseException) -> str:
    """Return the condition reason of an error; InternalError for an unexpected one."""
    return getattr(error, "reason", "PeerError") if isinstance(error, PrfaasError) else "InternalError"
