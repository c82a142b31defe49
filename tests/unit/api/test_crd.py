"""Proves how a pydantic model becomes a structural schema: exact small schemas, what is refused, and stable text."""

from typing import Annotated, Any, ClassVar, Literal

import pytest
import yaml
from pydantic import Field, StringConstraints

from prfaas.api import PrefillPool, crd
from prfaas.api.base import AS_SET, ApiModel, Hint, Rule, keyed_by
from prfaas.errors import InternalError

Short = Annotated[str, StringConstraints(max_length=9)]


class Inner(ApiModel):
    """An inner object.

    It has a second paragraph that is
    written on two lines.
    """

    name: Short


def properties(model: type[ApiModel], **options: bool) -> dict[str, Any]:
    return crd.structural(model, **options)["properties"]


def test_optional_field_loses_null_and_default():
    class Model(ApiModel):
        optional_text: Short | None = None

    assert crd.structural(Model) == {
        "type": "object",
        "properties": {"optionalText": {"type": "string", "maxLength": 9}},
    }


def test_reference_is_inlined_and_the_fields_own_words_win():
    class Model(ApiModel):
        described: Inner
        """What this one is for."""
        plain: Inner

    inner = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string", "maxLength": 9}}}
    text = "An inner object.\n\nIt has a second paragraph that is written on two lines."
    assert properties(Model) == {
        "described": {"description": "What this one is for.", **inner},
        "plain": {"description": text, **inner},
    }


def test_defaults_stay_unless_they_are_empty_containers():
    class Part(ApiModel):
        size: int = 3
        names: list[Short] = Field([], max_length=2)

    class Model(ApiModel):
        text: Short = ""
        number: int = 0
        flag: bool = True
        names: list[Short] = Field([], max_length=2)
        part: Part = Part()

    defaults = {name: schema.get("default", "none") for name, schema in properties(Model).items()}
    assert defaults == {"text": "", "number": 0, "flag": True, "names": "none", "part": {"size": 3}}


def test_status_carries_no_defaults():
    class Model(ApiModel):
        number: int = 0

    assert properties(Model, defaults=False) == {"number": {"type": "integer"}}


def test_constant_and_choice_become_enums():
    class Model(ApiModel):
        one: Literal["a"]
        two: Literal["a", "b"]

    assert properties(Model) == {
        "one": {"type": "string", "enum": ["a"]},
        "two": {"type": "string", "enum": ["a", "b"]},
    }


def test_lists_name_their_type():
    class Model(ApiModel):
        plain: Annotated[list[Short], Field(max_length=2)]
        unordered: Annotated[list[Short], Field(max_length=2, json_schema_extra=AS_SET)]
        keyed: Annotated[list[Inner], Field(max_length=2, json_schema_extra=keyed_by("name"))]

    kinds = {name: schema["x-kubernetes-list-type"] for name, schema in properties(Model).items()}
    assert kinds == {"plain": "atomic", "unordered": "set", "keyed": "map"}
    assert properties(Model)["keyed"]["x-kubernetes-list-map-keys"] == ["name"]
    assert properties(Model)["plain"]["items"] == {"type": "string", "maxLength": 9}


def test_map_keeps_its_bound_and_its_values_schema():
    class Model(ApiModel):
        labels: Annotated[dict[Short, Short], Field(max_length=4)]

    assert properties(Model)["labels"] == {
        "type": "object",
        "maxProperties": 4,
        "additionalProperties": {"type": "string", "maxLength": 9},
    }


def test_int_or_string_has_no_type():
    class Model(ApiModel):
        quantity: Annotated[int | str, Field(json_schema_extra={"x-kubernetes-int-or-string": True, "maxLength": 9})]

    assert properties(Model)["quantity"] == {"maxLength": 9, "x-kubernetes-int-or-string": True}


def test_rules_stand_at_the_level_of_their_model_and_type():
    class Part(ApiModel):
        rules: ClassVar = (Rule("self.a == 'x'", "a must be x", field="a", reason="FieldValueForbidden"),)
        a: Annotated[
            str,
            StringConstraints(pattern=r"^\d$", max_length=9),
            Hint("must be a digit"),
            Rule("self == oldSelf", "cannot change"),
        ]

    class Model(ApiModel):
        part: Part

    part = properties(Model)["part"]
    assert part["x-kubernetes-validations"] == [
        {"rule": "self.a == 'x'", "message": "a must be x", "fieldPath": ".a", "reason": "FieldValueForbidden"}
    ]
    assert part["properties"]["a"] == {
        "type": "string",
        "maxLength": 9,
        "x-kubernetes-validations": [
            {"rule": r"self.matches(r'^\d$')", "message": "must be a digit"},
            {"rule": "self == oldSelf", "message": "cannot change"},
        ],
    }
    assert "x-kubernetes-validations" not in crd.structural(Model)


@pytest.mark.parametrize(
    ("annotation", "complaint"),
    [
        (float, "Model.field: type 'number' has no place"),
        (Annotated[int, Field(gt=0)], "Model.field: no structural schema can express exclusiveMinimum"),
        (Annotated[int, Field(lt=9)], "Model.field: no structural schema can express exclusiveMaximum"),
        (int | bool, "Model.field: no structural schema can express anyOf"),
        (tuple[int, int], "Model.field: no structural schema can express prefixItems"),
        (Annotated[dict[str, float], Field(max_length=2)], "Model.field{}: type 'number' has no place"),
        (Annotated[list[float], Field(max_length=2)], "Model.field[]: type 'number' has no place"),
        (Any, "Model.field: type None has no place"),
    ],
)
def test_what_no_structural_schema_can_say_is_refused(annotation, complaint):
    model = type("Model", (ApiModel,), {"__annotations__": {"field": annotation}})
    with pytest.raises(InternalError) as refused:
        crd.structural(model)
    assert complaint in str(refused.value)


def test_yaml_reads_back_and_is_the_same_every_time():
    document = crd.crd(PrefillPool)
    text = crd.to_yaml(document)
    assert yaml.safe_load(text) == document
    assert crd.to_yaml(crd.crd(PrefillPool)) == text


def test_yaml_has_no_anchors():
    shared = {"a": [1]}
    assert crd.to_yaml({"x": shared, "y": shared}).endswith("x:\n  a:\n    - 1\ny:\n  a:\n    - 1\n")
