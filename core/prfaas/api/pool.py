"""What PrefillPool and DecodePool share: model, engine, replicas and a typed pod template.

The template is an allow-list, not a PodSpec: what the operator must own (ports, probes, command, labels, security context)
cannot be overridden, in a member cluster least of all.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from prfaas.api.base import ApiModel, Column, DnsLabel, DnsName, LongText, Rule, ShortText

EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", min_length=1, max_length=253)]
LabelKey = Annotated[str, StringConstraints(min_length=1, max_length=317)]
LabelValue = Annotated[str, StringConstraints(max_length=63)]
Quantity = Annotated[
    int | str,
    Field(json_schema_extra={"x-kubernetes-int-or-string": True}),
]
MountPath = Annotated[str, StringConstraints(pattern=r"^/[^:]+$", min_length=2, max_length=1024)]


class ModelRef(ApiModel):
    """The model: the name clients ask for, and where its checkpoint lies.

    `source` is a directory in the container (mount it through `template.volumes`) or `builtin:NAME` for a model that
    ships with the worker.
    """

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", min_length=1, max_length=253)]
    source: Annotated[str, StringConstraints(pattern=r"^(builtin:[a-z0-9][a-z0-9._-]*|/.+)$", max_length=1024)]


class Engine(ApiModel):
    """The software that runs the model. `args` are appended to the worker's own flags."""

    type: Literal["prfaas"] = "prfaas"
    image: Annotated[str, StringConstraints(min_length=1, max_length=512)] = "prfaas/worker:latest"
    args: Annotated[list[LongText], Field(max_length=64)] = []


class Resources(ApiModel):
    """Requests and limits of the worker container."""

    requests: Annotated[dict[LabelKey, Quantity], Field(max_length=16)] = {}
    limits: Annotated[dict[LabelKey, Quantity], Field(max_length=16)] = {}


class Toleration(ApiModel):
    """A core/v1 Toleration."""

    rules: ClassVar = (Rule("!has(self.operator) || self.operator != 'Exists' || !has(self.value)", "a toleration with operator Exists takes no value: remove value or use operator Equal"),)

    key: LabelKey | None = None
    operator: Literal["Exists", "Equal"] | None = None
    value: LabelValue | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: Annotated[int, Field(ge=0)] | None = None


class SecretSource(ApiModel):
    """Files from a Secret of the pod's namespace."""

    secret_name: DnsName


class ConfigMapSource(ApiModel):
    """Files from a ConfigMap of the pod's namespace."""

    name: DnsName


class ClaimSource(ApiModel):
    """A PersistentVolumeClaim of the pod's namespace; the usual home of model weights."""

    claim_name: DnsName
    read_only: bool = True


class EmptyDirSource(ApiModel):
    """Scratch space that lives as long as the pod."""

    medium: Literal["", "Memory"] = ""
    size_limit: Quantity | None = None


class Volume(ApiModel):
    """A volume with exactly one source. hostPath is left out on purpose: it would hand a node's files to a remote user."""

    rules: ClassVar = (
        Rule(
            "[has(self.secret), has(self.configMap), has(self.persistentVolumeClaim), has(self.emptyDir)].filter(x, x).size() == 1",
            "a volume needs exactly one of secret, configMap, persistentVolumeClaim, emptyDir",
        ),
    )

    name: DnsLabel
    secret: SecretSource | None = None
    config_map: ConfigMapSource | None = None
    persistent_volume_claim: ClaimSource | None = None
    empty_dir: EmptyDirSource | None = None


class VolumeMount(ApiModel):
    """Where a volume appears in the worker container."""

    name: DnsLabel
    mount_path: MountPath
    read_only: bool = True


class KeyRef(ApiModel):
    """One key of a Secret or ConfigMap."""

    name: DnsName
    key: ShortText


class EnvSource(ApiModel):
    """Where an environment variable's value comes from."""

    rules: ClassVar = (Rule("has(self.secretKeyRef) != has(self.configMapKeyRef)", "valueFrom needs exactly one of secretKeyRef, configMapKeyRef"),)

    secret_key_ref: KeyRef | None = None
    config_map_key_ref: KeyRef | None = None


class EnvVar(ApiModel):
    """An environment variable of the worker container."""

    rules: ClassVar = (Rule("has(self.value) != has(self.valueFrom)", "an env entry needs exactly one of value, valueFrom"),)

    name: EnvName
    value: LongText | None = None
    value_from: EnvSource | None = None


class LocalRef(ApiModel):
    """An object of the pod's namespace by name."""

    name: DnsName


class PodTemplate(ApiModel):
    """The part of a pod that a pool's owner may set."""

    rules: ClassVar = (
        Rule(
            "!has(self.volumeMounts) || self.volumeMounts.all(m, has(self.volumes) && self.volumes.exists(v, v.name == m.name))",
            "every volumeMounts[].name must name an entry of volumes",
        ),
    )

    labels: Annotated[dict[LabelKey, LabelValue], Field(max_length=32)] = {}
    annotations: Annotated[dict[LabelKey, LongText], Field(max_length=32)] = {}
    resources: Resources = Resources()
    node_selector: Annotated[dict[LabelKey, LabelValue], Field(max_length=32)] = {}
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = []
    volumes: Annotated[list[Volume], Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]})] = []
    volume_mounts: Annotated[
        list[VolumeMount], Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["mountPath"]})
    ] = []
    env: Annotated[list[EnvVar], Field(max_length=64, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]})] = []
    image_pull_secrets: Annotated[list[LocalRef], Field(max_length=8)] = []
    priority_class_name: DnsName | None = None


class PoolSpec(ApiModel):
    """Spec of a pool of identical instances in one cluster. An empty `clusterName` is the hub."""

    cluster_name: Annotated[str, StringConstraints(pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$", max_length=63)] = ""
    model: ModelRef
    engine: Engine = Engine()
    replicas: Annotated[int, Field(ge=0, le=10_000)] = 1
    template: PodTemplate = PodTemplate()
    drain_seconds: Annotated[int, Field(ge=0, le=3600)] = 30


POOL_COLUMNS = (
    Column("Ready", '.status.conditions[?(@.type=="Ready")].status'),
    Column("Instances", ".status.readyReplicas", "integer"),
    Column("Wanted", ".spec.replicas", "integer"),
    Column("Cluster", ".spec.clusterName"),
    Column("Model", ".spec.model.name"),
    Column("Why", '.status.conditions[?(@.type=="Ready")].reason'),
    Column("Age", ".metadata.creationTimestamp", "date"),
)
