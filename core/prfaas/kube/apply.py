"""Server-side apply of the status subresource: each writer owns exactly the fields it sends."""

from collections.abc import Mapping
from typing import Any

from prfaas.kube.session import DEFAULT_TIMEOUT_SECONDS, KubeSession, ObjectRef

APPLY_PATCH = "application/apply-patch+yaml"  # JSON is YAML


async def apply_status(
    session: KubeSession,
    ref: ObjectRef,
    status: Mapping[str, Any],
    *,
    field_manager: str,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> dict[str, Any]:
    """Apply `status` to an object and return it as it is then.

    Fields that this manager applied before and that are now absent are removed; fields of other managers stay. An entry
    of `conditions` is owned by its `type`. Raises as `KubeSession.call`; a missing object is StatusError 404 (an apply
    to a subresource creates nothing).
    """
    body = {
        "apiVersion": ref.api_version,
        "kind": ref.kind,
        "metadata": {"name": ref.name, "namespace": ref.namespace},
        "status": status,
    }
    path = f"{ref.path}/status?fieldManager={field_manager}&force=true"
    return await session.call("PATCH", path, body=body, content_type=APPLY_PATCH, timeout_seconds=timeout_seconds)
