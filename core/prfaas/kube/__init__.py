"""The client for API servers: calls, list and watch, Leases, and kubeconfigs.

Gateway, scheduler, operator and sandbox use it. Every call has a hard timeout. No model of Kubernetes' own kinds is
loaded, which saves memory. aiohttp comes with the extras of the four.
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
