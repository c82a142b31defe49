"""DecodePool: instances that decode, next to the gateway in the hub."""

from typing import Annotated, ClassVar

from pydantic import Field

from prfaas.api.base import PoolStatus, Resource, Rule
from prfaas.api.pool import POOL_COLUMNS, POOL_NAME, POOL_SCALE, ClusterName, PoolSpec


class DecodePoolSpec(PoolSpec):
    """The model, the engine and the number of instances. They run in the hub, because the gateway reaches no pod
    elsewhere.
    """

    rules: ClassVar = (
        *PoolSpec.rules,
        Rule(
            "self.clusterName == ''",
            "a DecodePool runs in the hub, where the gateway reaches it: leave clusterName empty",
            field="clusterName",
            reason="FieldValueForbidden",
        ),
        Rule(
            "has(self.maxBatch) == has(self.stepMillis)",
            "maxBatch and stepMillis describe one measurement: give both, or none to have the present load measured",
            field="maxBatch",
            reason="FieldValueRequired",
        ),
    )

    cluster_name: ClusterName = ""
    """Must be empty: a DecodePool runs in the hub."""
    max_batch: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Requests that a full instance decodes together, for capacity planning; the engine's own limit if unset."""
    step_millis: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Milliseconds of a decode step with maxBatch requests; if unset, the measured time under the present load."""


class DecodePool(Resource):
    """A pool of decode instances, next to the gateway in the hub."""

    kind_name: ClassVar = "DecodePool"
    plural: ClassVar = "decodepools"
    short_names: ClassVar = ("dcpool",)
    columns: ClassVar = POOL_COLUMNS
    scale: ClassVar = POOL_SCALE
    max_name_length: ClassVar = 50
    rules: ClassVar = (POOL_NAME,)

    spec: DecodePoolSpec
    status: PoolStatus = PoolStatus()
