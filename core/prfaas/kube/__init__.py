"""The one client of API servers: calls, list and watch, Leases, and the ways to reach a server.

Gateway, scheduler, operator and sandbox use it. They need a handful of verbs and a small memory, hard timeouts on every
call, and no models of Kubernetes' own kinds. aiohttp comes with the extras of those that use it.
"""

from prfaas.kube.lease import LeaseHolder
from prfaas.kube.session import KubeSession, ObjectKind, ObjectRef, StatusError, apply_status
from prfaas.kube.watch import list_and_watch, watch_object

__all__ = [
    "KubeSession",
    "LeaseHolder",
    "ObjectKind",
    "ObjectRef",
    "StatusError",
    "apply_status",
    "list_and_watch",
    "watch_object",
]
