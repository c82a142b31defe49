"""Turns the custom resources' pydantic models into CustomResourceDefinitions (apiextensions.k8s.io/v1), as YAML text.

Pydantic writes JSON schema; an API server accepts its *structural* subset. So this module translates: references
inlined, optional fields without null, CEL rules at their own level. It refuses a keyword without a counterpart, because
the API server would drop the keyword silently. Equal models give equal bytes. `prfaas crds` writes the files.
"""

import re
from typing import Any, Final, cast

import yaml

from prfaas.api import KINDS
from prfaas.api.base import VALIDATIONS, ApiModel, Resource
from prfaas.errors import InternalError
from prfaas.names import GROUP, VERSION

Schema = dict[str, Any]

CATEGORY: Final = "prfaas-all"
HEADER: Final = "# Generated from core/prfaas/api by `prfaas crds write`. Do not edit.\n"
KEYWORDS: Final = (
    "description",
    "type",
    "format",
    "default",
    "enum",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "pattern",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "x-kubernetes-int-or-string",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    VALIDATIONS,
    "required",
    "properties",
    "items",
    "additionalProperties",
)
"""Keywords of a structural schema's node, in the order of their output."""
RULE_KEYS: Final = ("rule", "message", "fieldPath", "reason")
DROPPED: Final = {"title", "propertyNames"}
"""Pydantic keywords that may go: titles repeat names, and keys of maps are checked by CEL rules."""
TYPES: Final = {"object", "array", "string", "integer", "boolean"}
"""Floating-point numbers are missing on purpose: API conventions forbid them."""

API_VERSION_TEXT: Final = "Version of the schema of this object; see the Kubernetes API conventions."
KIND_TEXT: Final = "Kind of this object; see the Kubernetes API conventions."


def files() -> dict[str, str]:
    """Return every kind's CRD as YAML text, by file name."""
    return {f"{GROUP}_{kind.plural}.yaml": to_yaml(crd(kind)) for kind in KINDS}


def to_yaml(document: Schema) -> str:
    """Return one document as YAML with the generator's header; keys keep their order, without anchors."""
    text = yaml.dump(document, Dumper=_PlainDumper, sort_keys=False, width=120, allow_unicode=True)
    return f"{HEADER}{text}"


class _PlainDumper(yaml.SafeDumper):
    """Writes equal objects twice instead of as anchor and alias, and indents lists below their key."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  # PyYAML's signature
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002  # PyYAML's signature
        super().increase_indent(flow, indentless=False)


def crd(kind: type[Resource]) -> Schema:
    """Return the CustomResourceDefinition of a kind; raises InternalError for what no structural schema can express."""
    singular = kind.kind_name.lower()
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind.kind_name,
                "listKind": f"{kind.kind_name}List",
                "plural": kind.plural,
                "singular": singular,
                "shortNames": list(kind.short_names),
                "categories": [CATEGORY],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": _columns(kind),
                    "subresources": _subresources(kind),
                    "schema": {"openAPIV3Schema": _root(kind)},
                }
            ],
        },
    }


def structural(model: type[ApiModel], *, defaults: bool = True) -> Schema:
    """Return a model's structural schema; `defaults=False` leaves defaults out, as a status requires.

    Raises InternalError for what no structural schema can express.
    """
    schema = model.model_json_schema(by_alias=True)
    return _Converter(schema.pop("$defs", {}), defaults).node(schema, model.__name__)


def _root(kind: type[Resource]) -> Schema:
    name: Schema = {"type": "string", "maxLength": kind.max_name_length}
    spec: type[ApiModel] = kind.__annotations__["spec"]
    status: type[ApiModel] = kind.__annotations__["status"]
    root: Schema = {
        "description": _one_line(kind.__doc__ or ""),
        "type": "object",
        VALIDATIONS: [rule.to_schema() for rule in kind.rules],
        "required": ["spec"],
        "properties": {
            "apiVersion": {"description": API_VERSION_TEXT, "type": "string"},
            "kind": {"description": KIND_TEXT, "type": "string"},
            "metadata": {"type": "object", "properties": {"name": name}},
            "spec": structural(spec),
            # The API server would write a status's defaults before the first observation.
            "status": structural(status, defaults=False),
        },
    }
    return {key: value for key, value in root.items() if value}


def _columns(kind: type[Resource]) -> list[Schema]:
    columns: list[Schema] = []
    for column in kind.columns:
        entry: Schema = {"name": column.name, "type": column.type, "jsonPath": column.json_path}
        if column.description:
            entry["description"] = column.description
        if column.priority:
            entry["priority"] = column.priority
        columns.append(entry)
    return columns


def _subresources(kind: type[Resource]) -> Schema:
    if kind.scale is None:
        return {"status": {}}
    scale = {"specReplicasPath": kind.scale.wanted, "statusReplicasPath": kind.scale.present}
    return {"status": {}, "scale": scale | ({"labelSelectorPath": kind.scale.selector} if kind.scale.selector else {})}


class _Converter:
    """Converts nodes of pydantic's JSON schema to structural ones. `defs` are the models that `$ref` names."""

    def __init__(self, defs: dict[str, Schema], defaults: bool):
        self._defs = defs
        self._defaults = defaults

    def node(self, source: Schema, path: str) -> Schema:
        """Return the structural form of one node; `path` is its place, for errors."""
        flat = self._flatten(source)
        if unknown := sorted(flat.keys() - set(KEYWORDS) - DROPPED):
            raise InternalError(f"{path}: no structural schema can express {', '.join(unknown)}; change the model")
        if "x-kubernetes-int-or-string" not in flat and flat.get("type") not in TYPES:
            raise InternalError(
                f"{path}: type {flat.get('type')!r} has no place in a custom resource; change the model"
            )
        if "description" in flat:
            flat["description"] = _one_line(flat["description"])
        if flat.get("type") == "array":
            flat.setdefault("x-kubernetes-list-type", "atomic")
            flat["items"] = self.node(flat["items"], f"{path}[]")
        if "additionalProperties" in flat:
            flat["additionalProperties"] = self.node(flat["additionalProperties"], f"{path}{{}}")
        if "properties" in flat:
            properties = flat["properties"].items()
            flat["properties"] = {name: self.node(child, f"{path}.{name}") for name, child in properties}
        if VALIDATIONS in flat:  # pydantic sorted the keys of each rule
            flat[VALIDATIONS] = [{key: rule[key] for key in RULE_KEYS if key in rule} for rule in flat[VALIDATIONS]]
        self._set_default(flat)
        return {key: flat[key] for key in KEYWORDS if key in flat}

    def _flatten(self, source: Schema) -> Schema:
        """Resolve `$ref`, the null of optional fields, and constants; the field's own keywords win over its type's."""
        outer = {key: value for key, value in source.items() if key not in ("$ref", "anyOf", "const")}
        if "$ref" in source:
            return {**self._flatten(self._defs[source["$ref"].rpartition("/")[2]]), **outer}
        if "anyOf" in source:
            if "x-kubernetes-int-or-string" in source:
                return outer
            choices = [choice for choice in source["anyOf"] if choice.get("type") != "null"]
            # A real choice stays as it is, and `node` refuses it.
            return {**self._flatten(choices[0]), **outer} if len(choices) == 1 else dict(source)
        if "const" in source:
            outer["enum"] = [source["const"]]
        return outer

    def _set_default(self, flat: Schema) -> None:
        """Keep a default unless it is an empty list or object, which means the same as absence."""
        default = _without_empty(flat.pop("default", None))
        if self._defaults and default is not None:
            flat["default"] = default


def _without_empty(value: Any) -> Any:
    """Return a default without null and empty lists and objects, also nested ones; None if nothing is left."""
    if isinstance(value, dict):
        kept = {key: _without_empty(item) for key, item in cast(Schema, value).items()}
        value = {key: item for key, item in kept.items() if item is not None}
    return None if value in (None, [], {}) else value


def _one_line(text: str) -> str:
    """Return a docstring with the lines of each paragraph joined."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text.strip()))
