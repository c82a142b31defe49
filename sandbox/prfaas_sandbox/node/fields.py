"""The downward API: fields of a pod as text, for environment variables and files. Pure."""

import re

from prfaas.errors import ConfigError
from prfaas_sandbox.api import Object

_KEYED = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


def field(pod: Object, path: str, addresses: tuple[str, str]) -> str:
    """Return the text of field `path`.

    Args:
        pod: the pod object.
        path: a fieldPath such as metadata.name or metadata.labels['app'].
        addresses: the pod's and the node's IP address, which the pod's status may not say yet.

    Raises:
        ConfigError: the path names no field that pods offer.

    """
    metadata, spec = pod["metadata"], pod["spec"]
    pod_address, node_address = addresses
    plain = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
        "status.podIP": pod_address,
        "status.podIPs": pod_address,
        "status.hostIP": node_address,
        "status.hostIPs": node_address,
    }
    if path in plain:
        return plain[path]
    if match := _KEYED.fullmatch(path):
        return metadata.get(match[1], {}).get(match[2], "")
    if path in ("metadata.labels", "metadata.annotations"):
        return _lines(metadata.get(path.removeprefix("metadata."), {}))
    raise ConfigError(f"fieldPath {path!r} is not a field that a pod offers")


def _lines(values: dict[str, str]) -> str:
    """Return key="value" lines, as the kubelet writes labels and annotations."""
    quoted = (
        (key, value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")) for key, value in values.items()
    )
    return "\n".join(f'{key}="{value}"' for key, value in sorted(quoted))
