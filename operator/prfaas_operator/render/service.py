"""The Service of a policy's gateway: port 80, the one address that clients know."""

from prfaas import names
from prfaas.api import PrfaaSPolicy
from prfaas_operator.render.common import Manifest, child_metadata, gateway_selector


def service(policy: PrfaaSPolicy) -> Manifest:
    """Return the Service of a policy's gateway."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": child_metadata(policy, names.gateway_name(policy.metadata.name)),
        "spec": {
            "selector": gateway_selector(policy),
            "ports": [{"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"}],
        },
    }
