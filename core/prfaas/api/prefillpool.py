"""PrefillPool: instances that prefill. In a member cluster it is an offload pool, in the hub a local prefill pool (PD-P)."""

from typing import ClassVar

from prfaas.api.base import PoolStatus, Resource, Rule
from prfaas.api.pool import POOL_COLUMNS, PoolSpec

CLUSTER_IS_FIXED = Rule(
    "self.clusterName == oldSelf.clusterName",
    "clusterName cannot change: create a pool in the other cluster, add it to the policy, then delete this one",
)


class PrefillPoolSpec(PoolSpec):
    """Spec of a PrefillPool."""

    rules: ClassVar = (CLUSTER_IS_FIXED,)


class PrefillPool(Resource):
    """A pool of prefill instances."""

    kind_name: ClassVar = "PrefillPool"
    plural: ClassVar = "prefillpools"
    short_names: ClassVar = ("pfpool",)
    columns: ClassVar = POOL_COLUMNS
    scalable: ClassVar = True

    spec: PrefillPoolSpec
    status: PoolStatus = PoolStatus()
