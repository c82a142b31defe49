"""The client for API servers: calls, list and watch, Leases, and kubeconfigs, over the package `kubernetes`.

Gateway, scheduler, operator and sandbox use it. Every call has a hard timeout. Objects are JSON: no model of
Kubernetes' own kinds is loaded, which saves memory.
"""

from prfaas.kube.lease import LeaseHolder
from prfaas.kube.session import KubeSession, ObjectKind, ObjectRef, StatusError
from prfaas.kube.watch import list_and_watch, watch_object

__all__ = ["KubeSession", "LeaseHolder", "ObjectKind", "ObjectRef", "StatusError", "list_and_watch", "watch_object"]
