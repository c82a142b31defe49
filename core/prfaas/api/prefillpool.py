"""PrefillPool: instances that prefill; an offload pool in a member cluster, a local prefill pool (PD-P) in the hub."""

from typing import Annotated, ClassVar

from prfaas.api.base import Obeys, PoolStatus, Resource, Rule
from prfaas.api.pool import POOL_COLUMNS, POOL_NAME, ClusterName, PoolSpec

# The default makes the field present in every stored object, so that the rule sees a move from or to the hub as well.
CLUSTER_IS_FIXED = Obeys(
    Rule(
        "self == oldSelf",
        "clusterName cannot change: create a pool in the other cluster, add it to the policy, then delete this one",
        reason="FieldValueForbidden",
    )
)


class PrefillPoolSpec(PoolSpec):
    """What the pool runs, where, and how many instances of it."""

    cluster_name: Annotated[ClusterName, CLUSTER_IS_FIXED] = ""
    """MemberCluster to run in; empty is the hub. It cannot change."""


class PrefillPool(Resource):
    """A pool of prefill instances: an offload pool in a member cluster, a local prefill pool in the hub."""

    kind_name: ClassVar = "PrefillPool"
    plural: ClassVar = "prefillpools"
    short_names: ClassVar = ("pfpool",)
    columns: ClassVar = POOL_COLUMNS
    scalable: ClassVar = True
    max_name_length: ClassVar = 50
    rules: ClassVar = (POOL_NAME,)

    spec: PrefillPoolSpec
    status: PoolStatus = PoolStatus()
