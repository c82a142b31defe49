"""DecodePool: instances that decode, next to the gateway in the hub."""

from typing import ClassVar

from prfaas.api.base import PoolStatus, Resource, Rule
from prfaas.api.pool import POOL_COLUMNS, PoolSpec


class DecodePoolSpec(PoolSpec):
    """Spec of a DecodePool. Only the hub's pods are reached by the gateway, so it cannot be elsewhere."""

    rules: ClassVar = (
        Rule("self.clusterName == ''", "a DecodePool runs in the hub, where the gateway reaches it: leave clusterName empty"),
    )


class DecodePool(Resource):
    """A pool of decode instances."""

    kind_name: ClassVar = "DecodePool"
    plural: ClassVar = "decodepools"
    short_names: ClassVar = ("dcpool",)
    columns: ClassVar = POOL_COLUMNS
    scalable: ClassVar = True

    spec: DecodePoolSpec
    status: PoolStatus = PoolStatus()
