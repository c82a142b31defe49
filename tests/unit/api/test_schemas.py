"""Proves of every CRD what a reviewer would check by hand: it explains itself, is bounded, agrees with the models."""

from collections.abc import Iterator
from typing import Any

import pytest

from prfaas.api import KINDS, crd
from prfaas.api.base import ApiModel, Image, Resource

MINIMAL_SPECS: dict[str, dict[str, Any]] = {
    "MemberCluster": {"kubeconfigSecretRef": {"name": "eu-kubeconfig"}, "link": {"capacityMbps": 100}},
    "PrefillPool": {"model": {"name": "m", "source": "/m"}},
    "DecodePool": {"model": {"name": "m", "source": "/m"}},
    "PrfaaSPolicy": {"model": "m", "decodePool": "d"},
}

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind_name)


def root(kind: type[Resource]) -> dict[str, Any]:
    return crd.crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every node of a schema below spec and status with its path."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        if path or name in ("spec", "status"):
            yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}[]")


def unbounded(schema: dict[str, Any]) -> bool:
    """Tell whether a node may grow without limit, which would also make CEL rules over it cost too much."""
    if "x-kubernetes-int-or-string" in schema:
        return "maxLength" not in schema
    match schema["type"]:
        case "string":
            return not schema.keys() & {"maxLength", "enum"} and schema.get("format") != "date-time"
        case "array":
            return "maxItems" not in schema
        case "object":
            return "additionalProperties" in schema and "maxProperties" not in schema
        case "integer":
            return "minimum" not in schema
    return False


def image_defaults(schema: dict[str, Any], path: str = "") -> list[str]:
    """Return the paths of the defaults that are an image, or hold one."""
    return [
        at
        for at, node in nodes(schema, path)
        if "default" in node and "image" in f"{at.rpartition('.')[2]} {node['default']}".lower()
    ]


def with_defaults(value: Any, schema: dict[str, Any]) -> Any:
    """Return a value with the schema's defaults filled in, as the API server does."""
    if isinstance(value, list):
        return [with_defaults(item, schema["items"]) for item in value]
    if not isinstance(value, dict):
        return value
    filled = {name: child["default"] for name, child in schema.get("properties", {}).items() if "default" in child}
    filled |= value
    return {name: with_defaults(item, schema.get("properties", {}).get(name, {})) for name, item in filled.items()}


@every_kind
def test_every_field_explains_itself(kind):
    silent = [path for path, schema in nodes(root(kind)) if not path.endswith("[]") and not schema.get("description")]
    assert silent == []


@every_kind
def test_no_default_names_an_image(kind):
    """A pool that named none once ran a name that anybody might own, in the registry that its nodes ask by default."""
    assert image_defaults(root(kind)) == []


def test_control_a_default_that_names_an_image_is_noticed():
    class Careless(ApiModel):
        image: Image = "prfaas/worker:0.1.0"

    class Holder(ApiModel):
        engine: Careless = Careless()

    assert image_defaults(crd.structural(Holder), ".spec") == [".spec.engine", ".spec.engine.image"]


@every_kind
def test_every_field_is_bounded(kind):
    assert [path for path, schema in nodes(root(kind)) if unbounded(schema)] == []


def test_an_unbounded_field_is_noticed():
    class Careless(ApiModel):
        text: str
        names: list[int]

    found = [path for path, schema in nodes(crd.structural(Careless), ".spec") if unbounded(schema)]
    assert found == [".spec.text", ".spec.names", ".spec.names[]"]


@every_kind
def test_defaults_mean_the_same_to_server_and_model(kind):
    spec_model = kind.model_fields["spec"].annotation
    minimal = MINIMAL_SPECS[kind.kind_name]
    filled = with_defaults(minimal, root(kind)["properties"]["spec"])
    assert spec_model.model_validate(filled) == spec_model.model_validate(minimal)


@every_kind
def test_rules_speak_and_point_at_fields_that_exist(kind):
    for path, schema in [("", root(kind)), *nodes(root(kind))]:
        for rule in schema.get("x-kubernetes-validations", []):
            assert len(rule["message"].split()) > 2, path
            node = schema
            for name in filter(None, rule.get("fieldPath", "").split(".")):
                node = node["properties"][name]


@every_kind
def test_columns_point_at_fields_that_exist(kind):
    columns = crd.crd(kind)["spec"]["versions"][0]["additionalPrinterColumns"]
    assert columns[0]["name"] == "Ready"
    for column in columns:
        path = column["jsonPath"].split("[?")[0]
        if path == ".metadata.creationTimestamp":
            continue
        node = root(kind)
        for name in path.strip(".").split("."):
            node = node["properties"][name]


@every_kind
def test_no_rule_compares_with_an_unset_old_value(kind):
    """`oldSelf` stands only at a field with a default or a required one, so no update of an unset field is blocked."""
    for path, schema in nodes(root(kind)):
        rules = [rule["rule"] for rule in schema.get("x-kubernetes-validations", []) if "oldSelf" in rule["rule"]]
        assert all(rule == "self == oldSelf" and "default" in schema for rule in rules), path
