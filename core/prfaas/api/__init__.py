"""The custom resources of prfaas.io/v1alpha1 as pydantic models: the source of the CRDs, and what the operator reads.

Models read leniently (unknown fields are ignored), so that a newer CRD does not break an older operator. The API server
validates strictly, by the schema and CEL rules that `crd` generates from these models.
"""

from prfaas.api.base import Condition, Meta, PoolStatus
from prfaas.api.decodepool import DecodePool, DecodePoolSpec
from prfaas.api.engine import Engine
from prfaas.api.membercluster import MemberCluster, MemberClusterSpec, MemberClusterStatus
from prfaas.api.policystatus import PrfaaSPolicyStatus
from prfaas.api.pool import ModelRef
from prfaas.api.prefillpool import PrefillPool, PrefillPoolSpec
from prfaas.api.prfaaspolicy import PrfaaSPolicy, PrfaaSPolicySpec
from prfaas.api.template import PodTemplate

KINDS = (MemberCluster, PrefillPool, DecodePool, PrfaaSPolicy)

__all__ = [
    "KINDS",
    "Condition",
    "DecodePool",
    "DecodePoolSpec",
    "Engine",
    "MemberCluster",
    "MemberClusterSpec",
    "MemberClusterStatus",
    "Meta",
    "ModelRef",
    "PodTemplate",
    "PoolStatus",
    "PrefillPool",
    "PrefillPoolSpec",
    "PrfaaSPolicy",
    "PrfaaSPolicySpec",
    "PrfaaSPolicyStatus",
]
