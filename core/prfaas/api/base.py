"""What all kinds share: the camelCase mapping, metadata, conditions, printer columns and CEL rules as data."""

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

DnsLabel = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", min_length=1, max_length=63)]
"""A name that becomes part of a label value or of a child's name."""
DnsName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", min_length=1, max_length=253)]
ShortText = Annotated[str, StringConstraints(min_length=1, max_length=253)]
LongText = Annotated[str, StringConstraints(max_length=4096)]


class Rule(NamedTuple):
    """One CEL rule of a model, and the sentence a user reads when it is broken."""

    rule: str
    message: str


class Column(NamedTuple):
    """One printer column of `kubectl get`."""

    name: str
    json_path: str
    type: Literal["string", "integer", "date"] = "string"
    description: str = ""
    priority: int = 0


class ApiModel(BaseModel):
    """Base of every object inside a custom resource: camelCase outside, snake_case inside, unknown fields ignored."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)

    rules: ClassVar[tuple[Rule, ...]] = ()


class Meta(ApiModel):
    """The part of ObjectMeta that the operator reads."""

    name: str
    namespace: str = ""
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Condition(ApiModel):
    """A metav1.Condition. Reasons are CamelCase and tell causes apart; messages name the object and what to do."""

    type: Annotated[str, StringConstraints(min_length=1, max_length=316)]
    status: Literal["True", "False", "Unknown"]
    reason: Annotated[str, StringConstraints(min_length=1, max_length=1024)]
    message: Annotated[str, StringConstraints(max_length=32768)] = ""
    observed_generation: Annotated[int, Field(ge=0)] = 0
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]


Conditions = Annotated[
    list[Condition],
    Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
]


class PoolStatus(ApiModel):
    """What both pools report. `selector` is a string, because /scale reads it."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    replicas: Annotated[int, Field(ge=0)] = 0
    ready_replicas: Annotated[int, Field(ge=0)] = 0
    selector: Annotated[str, StringConstraints(max_length=1024)] = ""
    conditions: Conditions = []


class Resource(ApiModel):
    """A custom resource. The class variables are what `crd` needs beyond the schema."""

    kind_name: ClassVar[str]
    plural: ClassVar[str]
    short_names: ClassVar[tuple[str, ...]] = ()
    columns: ClassVar[tuple[Column, ...]] = ()
    scalable: ClassVar[bool] = False

    metadata: Meta

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> "Resource":
        """Read an object as the API server gives it; raises pydantic.ValidationError when it does not fit."""
        return cls.model_validate(body)
