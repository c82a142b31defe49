"""The part of a pod that a pool's owner may set, typed: an allow-list instead of a PodSpec.

The operator's own fields (ports, probes, command, labels, security context) cannot be set, least of all in a member.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from prfaas.api.base import ApiModel, Count, DataKey, DnsLabel, DnsName, Hint, LongText, Rule, keyed_by

EnvName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=253),
    Hint("must be letters, digits and '_', and not start with a digit"),
]
LabelKey = Annotated[str, StringConstraints(min_length=1, max_length=317)]
KEY_PATTERN = "^([a-z0-9][-a-z0-9.]*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
KEY_RULE = (
    "must be NAME or PREFIX/NAME: the prefix a domain in lower case, the name at most 63 letters, digits, "
    "'-', '_' and '.', with a letter or digit at both ends"
)
LABEL_KEY = Rule(f"self.matches('{KEY_PATTERN}')", KEY_RULE)
LABEL_KEYS = Rule(f"self.all(key, key.matches('{KEY_PATTERN}'))", f"keys {KEY_RULE}")
LabelValue = Annotated[
    str,
    StringConstraints(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$", max_length=63),
    Hint("must be a label value: letters, digits, '-', '_' and '.', with a letter or digit at both ends"),
]
Quantity = Annotated[
    int | str,
    Field(json_schema_extra={"x-kubernetes-int-or-string": True, "maxLength": 64}),
    Rule(
        "isQuantity(string(self)) && sign(quantity(string(self))) >= 0",
        "must be a quantity of zero or more, such as 2, 500m or 8Gi",
    ),
]
LabelMap = Annotated[dict[LabelKey, LabelValue], Field(max_length=32), LABEL_KEYS]
KNOWN_RESOURCES = Rule(
    "self.all(k, k.contains('/') ? !k.matches('^([^/]*[.])?kubernetes[.]io/') "
    ": k in ['cpu', 'memory', 'ephemeral-storage'])",
    "must name cpu, memory, ephemeral-storage, or DOMAIN/NAME such as nvidia.com/gpu",
)
WHOLE_DEVICES = Rule(
    "self.all(k, !k.contains('/') || !isQuantity(string(self[k])) || quantity(string(self[k])).isInteger())",
    "a resource with a domain, such as nvidia.com/gpu, comes in whole numbers",
)
QuantityMap = Annotated[dict[LabelKey, Quantity], Field(max_length=16), LABEL_KEYS, KNOWN_RESOURCES, WHOLE_DEVICES]
MountPath = Annotated[
    str,
    StringConstraints(pattern=r"^/[^:]+$", max_length=1024),
    Hint("must be an absolute path other than /, without ':'"),
    Rule(
        "!self.matches('^/+(prfaas-vllm|etc/+prfaas)(/|$)')",
        "/prfaas-vllm and /etc/prfaas belong to the operator: mount elsewhere",
        reason="FieldValueForbidden",
    ),
]


class Resources(ApiModel):
    """The container's requests and limits."""

    rules: ClassVar = (
        Rule(
            "!has(self.requests) || !has(self.limits) || self.requests.all(k, !(k in self.limits) || "
            "!isQuantity(string(self.requests[k])) || !isQuantity(string(self.limits[k])) || "
            "quantity(string(self.requests[k])).compareTo(quantity(string(self.limits[k]))) <= 0)",
            "a request exceeds its limit: lower requests or raise limits",
            field="requests",
        ),
        Rule(
            "!has(self.requests) || self.requests.all(k, !k.contains('/') || "
            "(has(self.limits) && k in self.limits && string(self.requests[k]) == string(self.limits[k])))",
            "an extended resource such as nvidia.com/gpu must have the same value in limits as in requests",
            field="limits",
        ),
    )

    requests: QuantityMap = {}
    """Quantities by resource name that the scheduler reserves, such as cpu: 4 or nvidia.com/gpu: 1."""
    limits: QuantityMap = {}
    """Quantities by resource name that the container may not exceed."""


class Toleration(ApiModel):
    """A core/v1 Toleration: a node's taint that the pods accept."""

    rules: ClassVar = (
        Rule(
            "!has(self.operator) || self.operator != 'Exists' || !has(self.value)",
            "a toleration with operator Exists takes no value: remove value or use operator Equal",
            field="value",
            reason="FieldValueForbidden",
        ),
        Rule(
            "has(self.key) || (has(self.operator) && self.operator == 'Exists')",
            "a toleration without key matches every taint and needs operator Exists: set it, or name a key",
            field="operator",
        ),
        Rule(
            "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            "tolerationSeconds needs effect NoExecute: set it, or remove tolerationSeconds",
            field="effect",
        ),
    )

    key: LabelKey | None = None
    """Key of the taint; without it every taint matches."""
    operator: Literal["Exists", "Equal"] | None = None
    """Comparison of value with the taint's; Equal if unset."""
    value: LabelValue | None = None
    """Value of the taint, for operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; every effect if unset."""
    toleration_seconds: Count | None = None
    """Seconds that a pod stays on a node with such a NoExecute taint; for ever if unset."""


class SecretSource(ApiModel):
    """Files from a Secret of the pod's namespace."""

    secret_name: DnsName
    """Name of the Secret."""


class ConfigMapSource(ApiModel):
    """Files from a ConfigMap of the pod's namespace."""

    name: DnsName
    """Name of the ConfigMap."""


class ClaimSource(ApiModel):
    """A PersistentVolumeClaim of the pod's namespace, usually with model weights."""

    claim_name: DnsName
    """Name of the PersistentVolumeClaim."""
    read_only: bool = True
    """True attaches the claim read-only."""


class EmptyDirSource(ApiModel):
    """Scratch space that lives as long as the pod."""

    medium: Literal["", "Memory"] = ""
    """Memory keeps it in RAM, counted against the container's limit; empty is the node's disk."""
    size_limit: Quantity | None = None
    """Size limit, such as 8Gi."""


class Volume(ApiModel):
    """A volume with exactly one source; never hostPath, which would expose a node's files to a remote user."""

    rules: ClassVar = (
        Rule(
            "[has(self.secret), has(self.configMap), has(self.persistentVolumeClaim), has(self.emptyDir)]"
            ".filter(x, x).size() == 1",
            "a volume needs exactly one of secret, configMap, persistentVolumeClaim, emptyDir",
        ),
        Rule(
            "!self.name.startsWith('prfaas-')",
            "names that start with prfaas- belong to the operator's volumes: use another name",
            field="name",
            reason="FieldValueForbidden",
        ),
    )

    name: DnsLabel
    """Name that volumeMounts refer to."""
    secret: SecretSource | None = None
    config_map: ConfigMapSource | None = None
    persistent_volume_claim: ClaimSource | None = None
    empty_dir: EmptyDirSource | None = None


class VolumeMount(ApiModel):
    """The mount of a volume in the worker container."""

    name: DnsLabel
    """Name of an entry of volumes."""
    mount_path: MountPath
    """Absolute path in the container."""
    read_only: bool = True
    """True makes the mount read-only."""


class KeyRef(ApiModel):
    """One key of a Secret or ConfigMap of the pod's namespace."""

    name: DnsName
    """Name of the object."""
    key: DataKey
    """Key of its data."""


class EnvSource(ApiModel):
    """The source of an environment variable's value."""

    rules: ClassVar = (
        Rule(
            "has(self.secretKeyRef) != has(self.configMapKeyRef)",
            "valueFrom needs exactly one of secretKeyRef, configMapKeyRef",
        ),
    )

    secret_key_ref: KeyRef | None = None
    """A key of a Secret."""
    config_map_key_ref: KeyRef | None = None
    """A key of a ConfigMap."""


class EnvVar(ApiModel):
    """An environment variable of the worker container."""

    rules: ClassVar = (
        Rule("has(self.value) != has(self.valueFrom)", "an env entry needs exactly one of value, valueFrom"),
        Rule(
            "!(self.name in ['POD_IP', 'POD_NAME', 'POD_NAMESPACE'])",
            "POD_IP, POD_NAME and POD_NAMESPACE are set by the operator: use another name",
            field="name",
            reason="FieldValueForbidden",
        ),
        Rule(
            "self.name != 'PYTHONPATH' || has(self.value)",
            "PYTHONPATH must be a literal value, because the operator may have to add a folder: use value",
            field="valueFrom",
            reason="FieldValueForbidden",
        ),
    )

    name: EnvName
    """Name of the variable."""
    value: LongText | None = None
    """Its literal value."""
    value_from: EnvSource | None = None


class NodeRequirement(ApiModel):
    """A core/v1 NodeSelectorRequirement: a requirement on a node's label."""

    rules: ClassVar = (
        Rule(
            "self.operator in ['Exists', 'DoesNotExist'] ? !has(self.values) || self.values.size() == 0 "
            ": has(self.values) && self.values.size() > 0",
            "operators In, NotIn, Gt and Lt need values, Exists and DoesNotExist take none",
            field="values",
        ),
        Rule(
            "!(self.operator in ['Gt', 'Lt']) || (has(self.values) && self.values.size() == 1 "
            "&& self.values[0].matches('^[0-9]+$'))",
            "operators Gt and Lt need exactly one value, a whole number",
            field="values",
        ),
    )

    key: Annotated[LabelKey, LABEL_KEY]
    """Label of the node, such as topology.kubernetes.io/zone."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"] = "In"
    """Comparison of the label's value with values."""
    values: Annotated[list[LabelValue], Field(max_length=64)] = []
    """Values to compare with."""


class Spread(ApiModel):
    """A core/v1 TopologySpreadConstraint over the pool's own instances."""

    topology_key: Annotated[LabelKey, LABEL_KEY]
    """Label of nodes whose values distinguish places, such as kubernetes.io/hostname."""
    max_skew: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Largest difference in the number of instances between places."""
    when_unsatisfiable: Literal["ScheduleAnyway", "DoNotSchedule"] = "ScheduleAnyway"
    """Action if no such place exists: start the instance elsewhere, or let it wait."""


Spreads = Annotated[list[Spread], Field(max_length=8, json_schema_extra=keyed_by("topologyKey"))]


class LocalRef(ApiModel):
    """An object of the pod's namespace by name."""

    name: DnsName
    """Name of the object."""


class PodTemplate(ApiModel):
    """The part of a pod that a pool's owner may set; the operator owns the rest."""

    rules: ClassVar = (
        Rule(
            "!has(self.volumeMounts) || self.volumeMounts.all(m, has(self.volumes) && "
            "self.volumes.exists(v, v.name == m.name))",
            "every volumeMounts[].name must name an entry of volumes",
            field="volumeMounts",
        ),
        Rule(
            "!has(self.labels) || !self.labels.exists(k, k.startsWith('prfaas.io/') || "
            "k.startsWith('app.kubernetes.io/'))",
            "labels under prfaas.io/ and app.kubernetes.io/ are set by the operator: use another prefix",
            field="labels",
            reason="FieldValueForbidden",
        ),
        Rule(
            "!has(self.annotations) || !self.annotations.exists(k, k.startsWith('prfaas.io/'))",
            "annotations under prfaas.io/ are set by the operator: use another prefix",
            field="annotations",
            reason="FieldValueForbidden",
        ),
        Rule(
            "!has(self.priorityClassName) || !self.priorityClassName.startsWith('system-')",
            "classes whose names start with system- are Kubernetes' own and preempt a cluster's parts: use another one",
            field="priorityClassName",
            reason="FieldValueForbidden",
        ),
    )

    labels: LabelMap = {}
    """Labels added to the pods."""
    annotations: Annotated[dict[LabelKey, LongText], Field(max_length=32), LABEL_KEYS] = {}
    """Annotations added to the pods."""
    resources: Resources = Resources()
    """Requests and limits of the worker container. Unless named here: 50m of cpu; 1Gi of memory, at most 32Gi, and
    128Gi for each GPU of another engine than prfaas.
    """
    connector_resources: Resources = Resources()
    """The same of the init container that brings our connector to vLLM. Unless named here: 50m of cpu, at most 1; 64Mi
    of memory, at most 256Mi.
    """
    node_selector: LabelMap = {}
    """Labels that a node must have."""
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = []
    """Taints that the pods accept."""
    volumes: Annotated[list[Volume], Field(max_length=16, json_schema_extra=keyed_by("name"))] = []
    """Volumes that volumeMounts may use."""
    volume_mounts: Annotated[list[VolumeMount], Field(max_length=16, json_schema_extra=keyed_by("mountPath"))] = []
    """Mounts of the volumes in the worker container; one at /tmp or /dev/shm replaces the operator's."""
    env: Annotated[list[EnvVar], Field(max_length=64, json_schema_extra=keyed_by("name"))] = []
    """Environment variables of the worker container; they replace the operator's of the same name, such as HOME."""
    image_pull_secrets: Annotated[list[LocalRef], Field(max_length=8, json_schema_extra=keyed_by("name"))] = []
    """Secrets for pulling the image."""
    priority_class_name: DnsName | None = None
    """PriorityClass of the pods."""
    service_account_name: DnsName | None = None
    """ServiceAccount of the pods, for rights such as access to a bucket, or pull secrets. Its token is not mounted."""
    runtime_class_name: DnsName | None = None
    """RuntimeClass of the pods, such as nvidia."""
    scheduler_name: DnsName | None = None
    """Scheduler of the pods; the cluster's default one if unset."""
    node_affinity: Annotated[list[NodeRequirement], Field(max_length=16)] = []
    """Requirements that a node must meet, all of them."""
    topology_spread: Spreads | None = None
    """Places over which the instances spread; by default zones and nodes, as far as possible; an empty list means no
    spread.
    """
