"""The examples of objects, as an API server would read them: their kinds, and what the committed CRDs say of them."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from prfaas.api import DecodePool, PrefillPool, PrfaaSPolicy

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples"
KINDS = {kind.kind_name: kind for kind in (PrefillPool, DecodePool, PrfaaSPolicy)}
MATCHES = re.compile(r"^self\.matches\(r?'(.*)'\)$")
CHECKED = {
    *("type", "properties", "required", "enum", "items", "additionalProperties", "x-kubernetes-int-or-string"),
    *("minimum", "maximum", "minLength", "maxLength", "maxItems", "maxProperties", "x-kubernetes-list-map-keys"),
    "x-kubernetes-validations",
}
"""What `faults` looks at; of the validations only patterns. tests/clusters evaluates all of them."""
TYPES = {"string": str, "integer": int, "boolean": bool, "array": list, "object": dict}


def bodies(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def objects_in(folder: Path) -> list[Path]:
    """Return the examples with objects of ours in a folder, and not below it."""
    return [path for path in sorted(folder.glob("*.yaml")) if "kind" in bodies(path)[0]]


def read(path: Path) -> tuple[PrfaaSPolicy, list[PrefillPool | DecodePool]]:
    """Return the policy and the pools of an example."""
    found = bodies(path)
    for number, body in enumerate(found):
        body["metadata"]["uid"] = f"uid-{number}"
    *pools, policy = (KINDS[body["kind"]].model_validate(body) for body in found)
    return policy, pools


@cache
def committed_schemas() -> dict[str, dict[str, Any]]:
    """Return the schema of each kind, as it lies in crds/."""
    crds = [yaml.safe_load(path.read_text())["spec"] for path in sorted((ROOT / "crds").glob("*.yaml"))]
    return {one["names"]["kind"]: one["versions"][0]["schema"]["openAPIV3Schema"] for one in crds}


def faults(value: Any, schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield what a schema refuses of a value. Unknown fields are faults, too, as for `kubectl apply`."""
    if schema.get("x-kubernetes-int-or-string"):
        if not isinstance(value, int | str):
            yield f"{path} is neither a number nor a text"
        return
    wanted = TYPES[schema["type"]]
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        yield f"{path} is no {schema['type']}"
        return
    yield from _beyond(value, schema, path)
    if isinstance(value, list):
        keys = schema.get("x-kubernetes-list-map-keys", ())
        names = [tuple(one[key] for key in keys) for one in value]
        if keys and len(set(names)) < len(names):
            yield f"{path} names one twice"
        for place, one in enumerate(value):
            yield from faults(one, schema["items"], f"{path}[{place}]")
    elif isinstance(value, dict):
        yield from (f"{path}.{name} is missing" for name in schema.get("required", ()) if name not in value)
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        for name, one in value.items():
            if name in known or others:
                yield from faults(one, known.get(name) or others, f"{path}.{name}")
            elif path != ".metadata":  # whose fields the API server knows
                yield f"{path}.{name} is unknown"


def _beyond(value: Any, schema: dict[str, Any], path: str) -> Iterator[str]:
    """Yield limits that a value of the right type breaks."""
    if value not in schema.get("enum", (value,)):
        yield f"{path} is none of {schema['enum']}"
    size = value if isinstance(value, int) else len(value)
    for least, most in (("minimum", "maximum"), ("minLength", "maxLength"), ("", "maxItems"), ("", "maxProperties")):
        if not schema.get(least, size) <= size <= schema.get(most, size):
            yield f"{path} is beyond its {most}"
    for rule in schema.get("x-kubernetes-validations", ()):
        pattern = MATCHES.match(rule["rule"])
        if pattern and not re.search(pattern[1], value):
            yield f"{path} {rule['message']}"
