"""DecodePool: instances that decode, next to the gateway in the hub."""

from typing import ClassVar

from prfaas.api.base import PoolStatus, Resource, Rule
from prfaas.api.pool import POOL_COLUMNS, POOL_NAME, PoolSpec


class DecodePoolSpec(PoolSpec):
    """What the pool runs, and how many instances of it, all in the hub: the gateway reaches no pod elsewhere."""

    rules: ClassVar = (
        Rule(
            "self.clusterName == ''",
            "a DecodePool runs in the hub, where the gateway reaches it: leave clusterName empty",
            field="clusterName",
            reason="FieldValueForbidden",
        ),
    )


class DecodePool(Resource):
    """A pool of decode instances, next to the gateway in the hub."""

    kind_name: ClassVar = "DecodePool"
    plural: ClassVar = "decodepools"
    short_names: ClassVar = ("dcpool",)
    columns: ClassVar = POOL_COLUMNS
    scalable: ClassVar = True
    max_name_length: ClassVar = 50
    rules: ClassVar = (POOL_NAME,)

    spec: DecodePoolSpec
    status: PoolStatus = PoolStatus()
