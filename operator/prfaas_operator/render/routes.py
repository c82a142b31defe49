"""The ConfigMap that carries a policy's routing table to its gateway."""

import base64
from typing import Any

from prfaas import names
from prfaas.api import PrfaaSPolicy
from prfaas.errors import ProtocolError
from prfaas.wire import routes
from prfaas_operator.render.common import Manifest, child_metadata


def config_map(policy: PrfaaSPolicy, table: routes.RoutingTable) -> Manifest:
    """Return the ConfigMap with the table in binaryData."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": child_metadata(policy, names.routes_configmap(policy.metadata.name)),
        "binaryData": {names.ROUTES_KEY: base64.b64encode(routes.encode(table)).decode("ascii")},
    }


def read_config_map(live: dict[str, Any] | None) -> routes.RoutingTable | None:
    """Return the table of a live ConfigMap; None when there is none, or nothing that this version can read."""
    document = ((live or {}).get("binaryData") or {}).get(names.ROUTES_KEY)
    if not document:
        return None
    try:
        return routes.decode(base64.b64decode(document))
    except (ProtocolError, ValueError):
        return None
