"""Parts of all kinds: the camelCase mapping, metadata, conditions, printer columns and CEL rules as data.

Attribute docstrings are the text of `kubectl explain`, so their reader is the person who writes the YAML.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, StringConstraints
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from prfaas.names import API_KEYS_SECRET_SUFFIX, KUBECONFIG_SECRET_SUFFIX

VALIDATIONS = "x-kubernetes-validations"


class Rule(NamedTuple):
    """One CEL rule of a model or of an annotated type, where `self` is the value, and its error message for users.

    `field` is the property at fault below the model, such as `threshold.tokens`: the API server names it in the error.
    """

    rule: str
    message: str
    field: str = ""
    reason: Literal["FieldValueInvalid", "FieldValueForbidden", "FieldValueRequired", "FieldValueDuplicate"] = (
        "FieldValueInvalid"
    )

    def to_schema(self) -> JsonDict:
        """Return the rule as one entry of `x-kubernetes-validations`."""
        entry: JsonDict = {"rule": self.rule, "message": self.message}
        if self.field:
            entry["fieldPath"] = f".{self.field}"
        if self.reason != "FieldValueInvalid":
            entry["reason"] = self.reason
        return entry

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        schema[VALIDATIONS] = [*schema.get(VALIDATIONS, []), self.to_schema()]
        return schema


@dataclass(frozen=True)
class Hint:
    """The error message for a string that breaks its pattern.

    The API server would print the bare regular expression, so the pattern becomes a CEL rule with this message.
    """

    message: str

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        schema[VALIDATIONS] = [Rule(f"self.matches(r'{schema.pop('pattern')}')", self.message).to_schema()]
        return schema


@dataclass(frozen=True)
class OneOf:
    """The only values of a string, as a Literal has them; for values that a program computes."""

    values: tuple[str, ...]

    def __get_pydantic_core_schema__(self, *_: Any) -> CoreSchema:
        return core_schema.literal_schema(list(self.values))


DnsLabel = Annotated[
    str,
    StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63),
    Hint("must be lower-case letters, digits and '-', and start and end with a letter or digit"),
]
"""A name that becomes part of a label value or of a child's name."""
DnsName = Annotated[
    str,
    StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$", max_length=253),
    Hint("must be the name of an object: lower-case letters, digits, '-' and '.', with a letter or digit at both ends"),
]
# The API server refuses a new object with another name. The operator still reads older objects.
KubeconfigSecretName = Annotated[
    str,
    StringConstraints(max_length=253),
    Rule(
        f"self.matches(r'^[a-z0-9]([-.a-z0-9]*[a-z0-9])?{KUBECONFIG_SECRET_SUFFIX}$')",
        f"must be the name of a Secret that ends with {KUBECONFIG_SECRET_SUFFIX}: no pool may mount such a Secret",
    ),
]
ApiKeysSecretName = Annotated[
    str,
    StringConstraints(max_length=253),
    Rule(
        f"self.matches(r'^[a-z0-9]([-.a-z0-9]*[a-z0-9])?{API_KEYS_SECRET_SUFFIX}$')",
        f"must be the name of a Secret that ends with {API_KEYS_SECRET_SUFFIX}: no pool may mount such a Secret",
    ),
]
DataKey = Annotated[
    str,
    StringConstraints(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253),
    Hint("must be a key of the object's data: letters, digits, '-', '_' and '.'"),
]
LongText = Annotated[str, StringConstraints(max_length=4096)]
DatacenterName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$", max_length=63),
    Hint("must be letters, digits, '-', '_' and '.', and start and end with a letter or digit"),
]
ModelName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", max_length=253),
    Hint("must be letters, digits, '.', '_', '/' and '-', and start with a letter or digit"),
]
Image = Annotated[
    str,
    StringConstraints(pattern=r"^\S+$", max_length=512),
    Hint("must be an image reference without spaces, such as registry.example/prfaas/worker:1.0"),
]
Count = Annotated[int, Field(ge=0, le=2_147_483_647)]
Generation = Annotated[int, Field(ge=0)]
Timestamp = Annotated[str, Field(json_schema_extra={"format": "date-time"})]

AS_SET: JsonDict = {"x-kubernetes-list-type": "set"}
"""A list without order or duplicates, which several field managers may share."""


def keyed_by(key: str) -> JsonDict:
    """Return the schema extension of a list whose entries are identified by the property `key`."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


class Column(NamedTuple):
    """One printer column of `kubectl get`; priority 1 shows it with `-o wide` only."""

    name: str
    json_path: str
    type: Literal["string", "integer", "date"] = "string"
    description: str = ""
    priority: int = 0


class Scale(NamedTuple):
    """The numbers behind the subresource /scale: paths of the wanted one, of the present one and of a selector."""

    wanted: str
    present: str
    selector: str = ""


def add_rules(schema: JsonDict, model: type["ApiModel"]) -> None:
    """Put a model's CEL rules at its own level of the schema."""
    if model.rules:
        schema[VALIDATIONS] = [rule.to_schema() for rule in model.rules]


class ApiModel(BaseModel):
    """Base of every object inside a custom resource: camelCase outside, snake_case inside, unknown fields ignored."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="ignore",
        frozen=True,
        use_attribute_docstrings=True,
        json_schema_extra=add_rules,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()


class Meta(ApiModel):
    """The part of ObjectMeta that the operator reads."""

    name: str
    namespace: str = ""
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Condition(ApiModel):
    """A metav1.Condition. Reasons are CamelCase and distinguish causes; messages name the object and the remedy."""

    type: Annotated[str, StringConstraints(min_length=1, max_length=316)]
    """The subject of the condition, such as Ready."""
    status: Literal["True", "False", "Unknown"]
    """True if the condition holds."""
    reason: Annotated[str, StringConstraints(min_length=1, max_length=1024)]
    """The cause in one CamelCase word."""
    message: Annotated[str, StringConstraints(max_length=32768)] = ""
    """The cause in a sentence that names the object and the remedy."""
    observed_generation: Generation = 0
    """The metadata.generation that this condition was computed from."""
    last_transition_time: Timestamp
    """Time of the last change of `status`."""


Conditions = Annotated[list[Condition], Field(max_length=16, json_schema_extra=keyed_by("type"))]


class PoolStatus(ApiModel):
    """The observed state of the pool."""

    observed_generation: Generation = 0
    """The metadata.generation that this status was computed from."""
    replicas: Count = 0
    """Instances that exist, ready or not."""
    ready_replicas: Count = 0
    """Instances that are ready to serve."""
    selector: Annotated[str, StringConstraints(max_length=1024)] = ""
    """Label selector of the pool's pods as one string, for /scale and autoscalers."""
    replicas_owner: Literal["User", "Autoscaler", "Policy"] | None = None
    """The last writer of spec.replicas: a user, a HorizontalPodAutoscaler, or the policy's scaling."""
    conditions: Conditions = []
    """Ready: the pool works. If not, the condition names the cause."""


class Resource(ApiModel):
    """A custom resource. The class variables hold the facts that `crd` needs beyond the schema."""

    kind_name: ClassVar[str]
    plural: ClassVar[str]
    short_names: ClassVar[tuple[str, ...]] = ()
    columns: ClassVar[tuple[Column, ...]] = ()
    scale: ClassVar[Scale | None] = None
    max_name_length: ClassVar[int] = 63
    """Longest metadata.name in characters, because names and labels of children contain it."""

    metadata: Meta
