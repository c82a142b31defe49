"""Parts of PrefillPool and DecodePool: model, replicas, pod template, and the replacement of instances."""

from typing import Annotated, ClassVar

from pydantic import Field, StringConstraints

from prfaas.api.base import ApiModel, Column, Hint, ModelName, Rule, Scale, keyed_by
from prfaas.api.engine import Engine, Parallelism
from prfaas.api.engine_rules import pool_rules
from prfaas.api.template import PodTemplate

ClusterName = Annotated[
    str,
    StringConstraints(pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$", max_length=63),
    Hint("must be the name of a MemberCluster (lower-case letters, digits and '-'), or empty for the hub"),
]
IntOrPercent = Annotated[
    int | str,
    Field(json_schema_extra={"x-kubernetes-int-or-string": True, "maxLength": 4}),
    Rule(
        "type(self) == int ? self >= 0 && self <= 10000 : string(self).matches('^([1-9]?[0-9]|100)%$')",
        "must be a number of instances such as 1, or a percentage up to 100% such as 25%",
    ),
]


class ModelRef(ApiModel):
    """The model: its name for clients, and the place of its checkpoint."""

    name: ModelName
    """The name that clients send as `model`; the pools of a policy need the same name."""
    source: Annotated[
        str,
        StringConstraints(pattern=r"^(builtin:[a-z0-9][a-z0-9._-]*|/.+)$", max_length=1024),
        Hint("must be an absolute directory such as /models/kimi, or builtin:NAME such as builtin:kimi-linear-tiny"),
    ]
    """A directory in the container (mount it through template.volumes), or builtin:NAME for a model that ships with the
    worker."""


class PrefillPoint(ApiModel):
    """The time of one prefill."""

    tokens: Annotated[int, Field(ge=1, le=16_777_216)]
    """Length of the prompt, with nothing of it cached."""
    prefill_millis: Annotated[int, Field(ge=1, le=3_600_000)]
    """Time of its prefill on one instance that does nothing else, in milliseconds."""


class ProfileSpec(ApiModel):
    """What is known of an instance before it has served prompts. Measured figures replace it."""

    rules: ClassVar = (
        Rule(
            "has(self.builtin) || has(self.points) && self.points.size() > 0 || has(self.tokenBytes)",
            "give builtin, or points, tokenBytes or both, or leave profile out",
            field="points",
            reason="FieldValueRequired",
        ),
        Rule(
            "!has(self.builtin) "
            "|| !(has(self.points) && self.points.size() > 0 || has(self.tokenBytes) || has(self.stateBytes))",
            "a built-in profile has points and sizes: leave out points, tokenBytes and stateBytes, or builtin",
            field="builtin",
            reason="FieldValueForbidden",
        ),
        Rule(
            "!has(self.points) || self.points.size() != 1",
            "points holds one length, which makes no curve: measure another one",
            field="points",
        ),
        Rule(
            "!has(self.points) || self.points.all(a, "
            "self.points.all(b, a.tokens <= b.tokens || a.prefillMillis >= b.prefillMillis))",
            "a longer prompt never takes less: measure again, or look for swapped points",
            field="points",
        ),
        Rule(
            "!has(self.stateBytes) || has(self.tokenBytes)",
            "stateBytes needs tokenBytes beside it (0 for a model without attention)",
            field="tokenBytes",
            reason="FieldValueRequired",
        ),
    )

    builtin: (
        Annotated[
            str,
            StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=63),
            Hint("must be a name that `prfaas profile list` shows, such as qwen3.5-397b-fp8-8xh200"),
        ]
        | None
    ) = None
    """Name of a profile that ships with prfaas, in place of all other fields; `prfaas profile list` shows them."""
    points: Annotated[list[PrefillPoint], Field(max_length=16, json_schema_extra=keyed_by("tokens"))] = []
    """Prefill times of two lengths or more, far apart."""
    token_bytes: Annotated[int, Field(ge=0, le=1_000_000_000)] | None = None
    """Bytes of the cache for each token of a prompt, of all attention layers. The same for all pools of a policy."""
    state_bytes: Annotated[int, Field(ge=0, le=1_000_000_000_000)] | None = None
    """Bytes of the cache that no prompt's length changes: the linear layers' states. None if unset."""


class Rollout(ApiModel):
    """The replacement of instances when their template changes."""

    rules: ClassVar = (
        Rule(
            "!(string(self.maxSurge) in ['0', '0%'] && string(self.maxUnavailable) in ['0', '0%'])",
            "rollout.maxSurge (default 25%) and rollout.maxUnavailable (default 0) cannot both be 0: raise one of them",
            field="maxSurge",
        ),
    )

    max_surge: IntOrPercent = "25%"
    """Instances that may exist beyond replicas, rounded up; each needs room on a node, and an accelerator. Use 0 if a
    cluster has no room. Always 0 in a cluster with addressing HostIP.
    """
    max_unavailable: IntOrPercent = 0
    """Instances that may be missing meanwhile, rounded down. At least 1 in a cluster with addressing HostIP, because
    the old instance must free its node's port first.
    """

    @property
    def may_lack(self) -> bool:
        """True if any instance may be missing."""
        return str(self.max_unavailable) not in {"0", "0%"}


REPLICAS_WITHIN_BOUNDS = Rule(
    "(!has(self.minReplicas) || self.replicas >= self.minReplicas) "
    "&& (!has(self.maxReplicas) || self.replicas <= self.maxReplicas)",
    "replicas (default 1) must lie between minReplicas and maxReplicas: change the bounds first",
    field="replicas",
)


class PoolSpec(ApiModel):
    """Spec of a pool of identical instances in one cluster."""

    rules: ClassVar = (REPLICAS_WITHIN_BOUNDS, *pool_rules())

    cluster_name: ClusterName = ""
    """MemberCluster to run in; empty is the hub."""
    model: ModelRef
    engine: Engine = Engine()
    parallelism: Parallelism | None = None
    replicas: Annotated[int, Field(ge=0, le=10_000)] = 1
    """Number of wanted instances; /scale writes it."""
    min_replicas: Annotated[int, Field(ge=0, le=10_000)] | None = None
    """Lowest permitted value of replicas; no bound if unset."""
    max_replicas: Annotated[int, Field(ge=0, le=10_000)] | None = None
    """Highest permitted value of replicas; no bound if unset."""
    template: PodTemplate = PodTemplate()
    profile: ProfileSpec | None = None
    """Prefill times and cache sizes until they are measured; an engine may need them for good. See
    docs/use/engines.md."""
    drain_seconds: Annotated[int, Field(ge=0, le=3600)] = 30
    """Seconds that a leaving instance has to finish its requests; 0 cuts them off."""
    rollout: Rollout = Rollout()


POOL_NAME = Rule(
    "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
    "a pool's name must be lower-case letters, digits and '-', start with a letter and end with a letter or digit",
    field="metadata.name",
)

POOL_SCALE = Scale(".spec.replicas", ".status.replicas", ".status.selector")

POOL_COLUMNS = (
    Column("Ready", '.status.conditions[?(@.type=="Ready")].status', description="True if all wanted instances serve"),
    Column("Instances", ".status.readyReplicas", "integer", "Instances that are ready"),
    Column("Wanted", ".spec.replicas", "integer", "Instances that should exist"),
    Column("Cluster", ".spec.clusterName", description="MemberCluster of the pool; empty is the hub"),
    Column("Model", ".spec.model.name", description="Model it serves", priority=1),
    Column(
        "Proven",
        '.status.conditions[?(@.type=="EngineProven")].reason',
        description="Experimental if prfaas was not run against its engine",
        priority=1,
    ),
    Column("Why", '.status.conditions[?(@.type=="Ready")].reason', description="Reason of the Ready condition"),
    Column("Age", ".metadata.creationTimestamp", "date", "Time since it was created"),
)
