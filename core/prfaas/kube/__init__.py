"""Minimal in-cluster access to one API server: read and watch one object, apply a status, hold a Lease.

The gateway and its scheduler sidecar need four calls of the Kubernetes API and a small memory; a full client library
would bring ten times their size. The operator, which does need one, uses its own. aiohttp comes with the extras
`gateway` and `scheduler`.
"""

from prfaas.kube.apply import apply_status
from prfaas.kube.lease import LeaseHolder
from prfaas.kube.session import KubeSession, ObjectRef, StatusError
from prfaas.kube.watch import watch_object

__all__ = ["KubeSession", "LeaseHolder", "ObjectRef", "StatusError", "apply_status", "watch_object"]
