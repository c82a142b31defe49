"""PrfaaSPolicy: joins a decode pool and prefill pools of two clusters behind one endpoint."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from prfaas.api.base import (
    AS_SET,
    ApiKeysSecretName,
    ApiModel,
    Column,
    DatacenterName,
    DnsLabel,
    Hint,
    ModelName,
    Resource,
    Rule,
    Scale,
)
from prfaas.api.policystatus import PrfaaSPolicyStatus, TokenCount
from prfaas.api.template import Resources
from prfaas.names import ORIGIN

Percent = Annotated[int, Field(ge=1, le=100)]
DatacenterSet = Annotated[list[DatacenterName], Field(max_length=32, json_schema_extra=AS_SET)]

Origin = Annotated[
    str,
    StringConstraints(pattern=ORIGIN, max_length=253),
    Hint("must be *, or an origin in lower case and without a path, such as https://chat.example"),
]


class ThresholdSpec(ApiModel):
    """The threshold of incremental length: a longer prompt is offloaded."""

    rules: ClassVar = (
        Rule(
            "self.min <= self.max",
            "threshold.min (default 256) must not exceed threshold.max (default 131072): lower min or raise max",
            field="min",
        ),
        Rule(
            "!(self.mode in ['Auto', 'Priced']) || (self.tokens >= self.min && self.tokens <= self.max)",
            "in modes Auto and Priced threshold.tokens (default 2048) must lie between threshold.min (default 256) and "
            "threshold.max (default 131072)",
            field="tokens",
        ),
    )

    mode: Literal["Auto", "Priced", "Fixed", "Disabled"] = "Auto"
    """Auto moves the threshold with the measured link. Priced decides each request by its price on either side, and
    moves the threshold for requests without a known price. Fixed keeps it at tokens. Disabled offloads nothing.
    """
    tokens: TokenCount = 2048
    """The threshold in mode Fixed. In other modes the start value, and the fallback when metrics are stale."""
    min: TokenCount = 256
    """Lowest threshold that modes Auto and Priced may choose, in tokens."""
    max: TokenCount = 131_072
    """Highest threshold that modes Auto and Priced may choose, in tokens."""


class Watermarks(ApiModel):
    """Utilisations of the link between which bandwidth is neither scarce nor abundant."""

    rules: ClassVar = (
        Rule(
            "self.lowUtilisationPercent < self.highUtilisationPercent",
            "link.lowUtilisationPercent (default 50) must be below link.highUtilisationPercent (default 80)",
            field="lowUtilisationPercent",
        ),
    )

    high_utilisation_percent: Percent = 80
    """Above this utilisation of effective capacity, in percent, bandwidth is scarce."""
    low_utilisation_percent: Percent = 50
    """Below this utilisation of effective capacity, in percent, bandwidth is abundant."""


class Intervals(ApiModel):
    """Periods of the scheduler's and the operator's measurements."""

    short_seconds: Annotated[int, Field(ge=1, le=300)] = 1
    """Seconds between two measurements of the link; each may move the threshold."""
    long_seconds: Annotated[int, Field(ge=10, le=3600)] = 60
    """Seconds between two decisions on load and capacity; each may convert or scale, if the policy allows it."""


Cooldown = Annotated[int, Field(ge=0, le=86_400)]


class Conversion(ApiModel):
    """Settings for converting instances of a Deployment that two pools share."""

    enabled: bool = False
    """Convert instances if that serves more requests. Pools whose replicas have another owner are left alone."""
    min_prefill: Annotated[int, Field(ge=0, le=10_000)] = 1
    """Fewest instances of the shared Deployment that prefill."""
    min_decode: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Fewest instances of the shared Deployment that decode."""
    cooldown_seconds: Cooldown = 300
    """Seconds after a change before the next conversion."""


class Scaling(ApiModel):
    """Settings for scaling the policy's pools."""

    mode: Literal["None", "Auto"] = "None"
    """Auto scales every pool that has maxReplicas set, within its bounds. Pools whose replicas have another owner are
    left alone.
    """
    target_load_percent: Percent = 70
    """Load in percent of the prefill or decode capacity above which instances are added. Instances are removed if the
    rest would stay below three quarters of it.
    """
    cooldown_seconds: Cooldown = 300
    """Seconds after a change before the next change of replicas."""


class Slo(ApiModel):
    """The service level objective for users."""

    ttft_millis: Annotated[int, Field(ge=1, le=3_600_000)] | None = None
    """P90 of the time to the first token, in milliseconds. Conversion and scaling keep the predicted one below it, and
    a gateway refuses a request whose wait for its prefill would be longer.
    """


class Metrics(ApiModel):
    """The scheduler's source of measurements; required by threshold modes Auto and Priced."""

    rules: ClassVar = (
        Rule(
            "isURL(self.prometheusUrl) && url(self.prometheusUrl).getScheme() in ['http', 'https'] "
            "&& url(self.prometheusUrl).getHost() != ''",
            "metrics.prometheusUrl must be an http:// or https:// address, such as http://prometheus.monitoring.svc:9090",
            field="prometheusUrl",
        ),
        Rule(
            "!self.prometheusUrl.matches('^[^/]*//[^/?#]*@')",
            "metrics.prometheusUrl must hold no user and no password, because who may view policies reads it: "
            "give the address of a proxy that adds them",
            field="prometheusUrl",
        ),
    )

    prometheus_url: Annotated[str, StringConstraints(max_length=1024)]
    """Base address of Prometheus for the gateway's pods."""
    stale_after_seconds: Annotated[int, Field(ge=1, le=3600)] = 10
    """Age in seconds at which measurements expire."""


class Datacenters(ApiModel):
    """Where prompts may be sent."""

    rules: ClassVar = (
        Rule(
            "!has(self.prefer) || !has(self.forbid) || !self.prefer.exists(p, self.forbid.exists(f, "
            "p.lowerAscii() == f.lowerAscii() || p.lowerAscii().startsWith(f.lowerAscii() + '-')))",
            "a datacenter cannot be both in prefer and in forbid: remove it from one",
            field="prefer",
        ),
    )

    prefer: DatacenterSet = []
    """Datacenters to choose first among the permitted clusters. A name covers the places within it, in upper or lower
    case: us covers us-east-1.
    """
    forbid: DatacenterSet = []
    """Datacenters that no prompt of this policy may reach, by names as in prefer. With any, no prompt reaches a
    MemberCluster that names no datacenter. While one is the place of no cluster, nothing is offloaded.
    """


class ApiKeysSecretRef(ApiModel):
    """The Secret in the policy's own namespace with the gateway's clients: each entry is a name and its keys."""

    name: ApiKeysSecretName
    """Name of the Secret, NAME-api-keys, with the label prfaas.io/secret=api-keys. The gateway's pods mount it and
    reread it when it changes.
    """


class GatewaySpec(ApiModel):
    """The gateway Deployment that the operator renders for this policy."""

    replicas: Annotated[int, Field(ge=0, le=100)] = 1
    """Number of gateway pods."""
    resources: Resources = Resources()
    """Requests and limits of the gateway container. Unless named here: 100m of cpu; 256Mi of memory, at most 4Gi."""
    scheduler_resources: Resources = Resources()
    """The same of the scheduler container. Unless named here: 25m of cpu; 64Mi of memory, at most 256Mi."""
    api_keys_secret_ref: ApiKeysSecretRef | None = None
    """API keys of the gateway's clients: each entry holds a client's keys, one a line, or a JSON object with keys and
    limits. Without it the gateway asks for no key.
    """
    shared_cache: bool = False
    """Let clients of different API keys share what is cached of their prompts, as system prompts and tools. Each then
    learns by the time to the first token what others sent. Without it each client has a cache of its own.
    """
    cors_origins: Annotated[list[Origin], Field(max_length=32, json_schema_extra=AS_SET)] = []
    """Origins whose pages may call the gateway from a browser; * allows all. Without any, browsers refuse the calls."""
    drain_seconds: Annotated[int, Field(ge=0, le=3600)] = 60
    """Seconds that a leaving gateway pod has to finish its requests, streams included."""


class PrfaaSPolicySpec(ApiModel):
    """The pools that serve the model, and the rules for offloading a prompt."""

    rules: ClassVar = (
        Rule(
            "!(self.threshold.mode in ['Auto', 'Priced']) || has(self.metrics)",
            "threshold.mode Auto or Priced needs metrics.prometheusUrl: set it, or use mode Fixed",
            field="metrics",
            reason="FieldValueRequired",
        ),
        Rule(
            "self.threshold.mode == 'Disabled' || (has(self.prefillPools) && self.prefillPools.size() > 0)",
            "prefillPools is empty: name one, or set threshold.mode to Disabled",
            field="prefillPools",
            reason="FieldValueRequired",
        ),
        Rule(
            "!has(self.metrics) || self.metrics.staleAfterSeconds >= self.intervals.shortSeconds",
            "metrics.staleAfterSeconds (default 10) must be at least intervals.shortSeconds (default 1), or every "
            "measurement would be stale",
            field="metrics.staleAfterSeconds",
        ),
        Rule(
            "has(self.metrics) || (self.scaling.mode == 'None' && !self.conversion.enabled)",
            "conversion and scaling need measurements: set metrics.prometheusUrl, or turn them off",
            field="metrics",
            reason="FieldValueRequired",
        ),
    )

    model: ModelName
    """The model's name: clients send it as `model`, and the pools have it in model.name."""
    decode_pool: DnsLabel
    """DecodePool of this namespace."""
    prefill_pools: Annotated[list[DnsLabel], Field(max_length=16, json_schema_extra=AS_SET)] = []
    """PrefillPools of this namespace: offload pools in member clusters, and local prefill pools."""
    threshold: ThresholdSpec = ThresholdSpec()
    link: Watermarks = Watermarks()
    intervals: Intervals = Intervals()
    metrics: Metrics | None = None
    conversion: Conversion = Conversion()
    scaling: Scaling = Scaling()
    slo: Slo = Slo()
    on_offload_failure: Literal["PrefillLocally", "Reject"] = "PrefillLocally"
    """Action after a failed offload: prefill in the hub, or answer with an error."""
    datacenters: Datacenters = Datacenters()
    gateway: GatewaySpec = GatewaySpec()


class PrfaaSPolicy(Resource):
    """A policy: one model endpoint over a decode pool and prefill pools, with a threshold that follows the link."""

    kind_name: ClassVar = "PrfaaSPolicy"
    plural: ClassVar = "prfaaspolicies"
    short_names: ClassVar = ("prfaas",)
    # For people who may set the threshold and nothing else: the right to this subresource gives no other field.
    scale: ClassVar = Scale(".spec.threshold.tokens", ".status.thresholdTokens")
    max_name_length: ClassVar = 50
    rules: ClassVar = (
        Rule(
            "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            "a policy's name is also a Service's name: it must be lower-case letters, digits and '-', "
            "start with a letter and end with a letter or digit",
            field="metadata.name",
        ),
    )
    columns: ClassVar = (
        Column("Ready", '.status.conditions[?(@.type=="Ready")].status', description="True if the endpoint serves"),
        Column("Threshold", ".status.thresholdTokens", "integer", "Longer prompts are offloaded, in tokens"),
        Column("Bandwidth", ".status.bandwidth", description="Scarce or Abundant", priority=1),
        Column("Link %", ".status.linkUtilisationPercent", "integer", "Utilisation of the link"),
        Column("Offloaded %", ".status.offloadedPercent", "integer", "Share of requests offloaded", priority=1),
        Column("Prefill", ".status.readyPrefill", "integer", "Prefill instances that are ready"),
        Column("Decode", ".status.readyDecode", "integer", "Decode instances that are ready"),
        Column("Balanced", '.status.conditions[?(@.type=="Balanced")].reason', description="Of the pools", priority=1),
        Column("Why", '.status.conditions[?(@.type=="Ready")].reason', description="Reason of the Ready condition"),
        Column("Age", ".metadata.creationTimestamp", "date", "Time since it was created"),
    )

    spec: PrfaaSPolicySpec
    status: PrfaaSPolicyStatus = PrfaaSPolicyStatus()
