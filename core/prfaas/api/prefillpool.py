"""PrefillPool: instances that prefill; an offload pool in a member cluster, a local prefill pool (PD-P) in the hub.

A local one may share a DecodePool's instances instead of having its own (`shareWith`). Then it sets only how many of
them prefill. Fields that it must not set have no default in the schema, so that "left out" differs from "set to the
default".
"""

from typing import Annotated, Any, ClassVar, Final

from pydantic import ConfigDict, Field, StringConstraints
from pydantic.config import JsonDict

from prfaas.api.base import ApiModel, Column, Hint, PoolStatus, Resource, Rule, add_rules
from prfaas.api.engine_rules import prefill_pool_rules
from prfaas.api.pool import POOL_COLUMNS, POOL_NAME, POOL_SCALE, ClusterName, ModelRef, PoolSpec

# The default makes the field present in every stored object, so that the rule also sees a move from or to the hub.
CLUSTER_IS_FIXED = Rule(
    "self == oldSelf",
    "clusterName cannot change: create a pool in the other cluster, add it to the policy, then delete this one",
    reason="FieldValueForbidden",
)
SHARING_IS_FIXED = Rule(
    "self == oldSelf",
    "shareWith cannot change: create another pool, add it to the policy, then delete this one",
    reason="FieldValueForbidden",
)
DecodePoolName = Annotated[
    str,
    StringConstraints(pattern=r"^([a-z]([-a-z0-9]*[a-z0-9])?)?$", max_length=50),
    Hint("must be the name of a DecodePool, or empty for instances of the pool's own"),
]
NO_MODEL: Final = ModelRef.model_construct(name="", source="")
"""The model of a pool without instances of its own; no request names it."""
OF_THE_DECODE_POOL: Final = (
    "model",
    "engine",
    "template",
    "profile",
    "drainSeconds",
    "rollout",
    "egressMbps",
    "parallelism",
)
"""Fields that describe instances, or belong to a Deployment: a sharing pool's are the DecodePool's."""


def _add_rules_without_defaults(schema: JsonDict, model: type[ApiModel]) -> None:
    """Put the rules into the schema, and remove the defaults that would make a field always present."""
    add_rules(schema, model)
    properties: Any = schema["properties"]
    for name in OF_THE_DECODE_POOL:
        properties[name].pop("default", None)


class PrefillPoolSpec(PoolSpec):
    """The model, the engine, the cluster and the number of instances."""

    model_config = ConfigDict(json_schema_extra=_add_rules_without_defaults)

    rules: ClassVar = (
        *PoolSpec.rules,
        Rule(
            "self.shareWith != '' || has(self.model)",
            "set model for the instances, or share a DecodePool's instances with shareWith",
            field="model",
            reason="FieldValueRequired",
        ),
        Rule(
            f"self.shareWith == '' || !({' || '.join(f'has(self.{name})' for name in OF_THE_DECODE_POOL)})",
            f"a pool that shares instances must leave out {', '.join(OF_THE_DECODE_POOL)}, which are the DecodePool's",
            field="shareWith",
            reason="FieldValueForbidden",
        ),
        *prefill_pool_rules(),
        Rule(
            "self.shareWith == '' || self.clusterName == ''",
            "a DecodePool's instances run in the hub: leave clusterName empty, or leave out shareWith",
            field="clusterName",
            reason="FieldValueForbidden",
        ),
    )

    cluster_name: Annotated[ClusterName, CLUSTER_IS_FIXED] = ""
    """MemberCluster to run in; empty is the hub. It cannot change."""
    share_with: Annotated[DecodePoolName, SHARING_IS_FIXED] = ""
    """DecodePool of this namespace whose instances are shared: one Deployment runs the instances of both pools, and
    `replicas` of them prefill. An instance that changes its role loads no model. It cannot change.
    """
    model: ModelRef = NO_MODEL
    egress_mbps: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """Egress cap of all the pool's instances together, in Mbit/s; no cap if unset. Each instance's share is this
    divided by the wanted instances, rounded down, at least 1. A change reaches them in about a minute and restarts
    none.
    """


class PrefillPool(Resource):
    """A pool of prefill instances: an offload pool in a member cluster, a local prefill pool in the hub."""

    kind_name: ClassVar = "PrefillPool"
    plural: ClassVar = "prefillpools"
    short_names: ClassVar = ("pfpool",)
    columns: ClassVar = (
        *POOL_COLUMNS[:-1],
        Column("Shares", ".spec.shareWith", description="DecodePool whose instances it shares", priority=1),
        POOL_COLUMNS[-1],
    )
    scale: ClassVar = POOL_SCALE
    max_name_length: ClassVar = 50
    rules: ClassVar = (POOL_NAME,)

    spec: PrefillPoolSpec
    status: PoolStatus = PoolStatus()
