"""A container's environment variables and command line, and the fields of a pod as text (the downward API). Pure.

Rules: https://kubernetes.io/docs/tasks/inject-data-application/define-environment-variable-container/ and the
`command` field of the API reference.
"""

import re
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from prfaas.errors import ConfigError
from prfaas.kube.session import Object

_REFERENCE = re.compile(r"\$\$|\$\(([^()]+)\)")
SourceKind = Literal["configmaps", "secrets"]


class ConfigSource(NamedTuple):
    """A ConfigMap or Secret of the pod's namespace."""

    kind: SourceKind
    name: str


Data = Mapping[ConfigSource, Mapping[str, bytes] | None]


def sources(container: Object) -> set[ConfigSource]:
    """Return every ConfigMap and Secret that the container's environment refers to."""
    references = (_key_reference(entry.get("valueFrom") or {}) for entry in container.get("env", []))
    return {reference[0] for reference in references if reference}


def _key_reference(origin: Object) -> tuple[ConfigSource, str, bool] | None:
    """Return (source, key, optional) of a valueFrom that refers to a key."""
    kinds: tuple[tuple[str, SourceKind], ...] = (("secretKeyRef", "secrets"), ("configMapKeyRef", "configmaps"))
    for name, kind in kinds:
        if reference := origin.get(name):
            return ConfigSource(kind, reference["name"]), reference["key"], reference.get("optional", False)
    return None


def environment(container: Object, base: Mapping[str, str], data: Data, field: Callable[[str], str]) -> dict[str, str]:
    """Return the container's environment.

    `base` holds defaults that the spec may override. `data` holds the content of each of `sources(container)`, None for
    a missing object. `field` returns the text of a pod's field. Raises ConfigError for a missing reference that is not
    optional.
    """
    result = dict(base)
    for entry in container.get("env", []):
        value = _value(entry, result, data, field)
        if value is not None:
            result[entry["name"]] = value
    return result


def _value(entry: Object, known: Mapping[str, str], data: Data, field: Callable[[str], str]) -> str | None:
    """Return the value of one env entry, None for a missing optional reference."""
    origin = entry.get("valueFrom")
    if not origin:
        return expand(entry.get("value", ""), known)
    if "fieldRef" in origin:
        return field(origin["fieldRef"]["fieldPath"])
    reference = _key_reference(origin)
    if reference is None:
        raise ConfigError(f"env {entry['name']}: the process node does not know valueFrom {', '.join(origin)}")
    source, key, optional = reference
    content = data[source]
    if content is not None and key in content:
        return content[key].decode(errors="surrogateescape")
    if optional:
        return None
    lack = "not found" if content is None else f"has no key {key!r}"
    raise ConfigError(f"env {entry['name']}: {source.kind} {source.name!r} {lack}")


def command_line(container: Object, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return command and arguments with $(NAME) replaced; raise ConfigError if there is no command."""
    if not container.get("command"):
        raise ConfigError(f"container {container['name']} has no command: the process node does not read images")
    return tuple(expand(part, env) for part in (*container["command"], *container.get("args", [])))


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace $(NAME) by its value; unknown names stay as they are, $$ becomes one dollar sign."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[1] is None else variables.get(match[1], match[0])

    return _REFERENCE.sub(value, text)


def field(pod: Object, path: str, addresses: tuple[str, str]) -> str:
    """Return the text of the pod's field at a fieldPath such as metadata.name.

    `addresses` are the pod's and the node's, which the pod's status may lack. Raises ConfigError for an unknown field.
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
    raise ConfigError(f"fieldPath {path!r} is not a field that the process node offers")
