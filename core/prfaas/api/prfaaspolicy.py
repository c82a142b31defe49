"""PrfaaSPolicy: the declarative unit that joins a decode pool and prefill pools of two clusters behind one endpoint."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from prfaas.api.base import (
    AS_SET,
    ApiModel,
    Column,
    Conditions,
    Count,
    DatacenterName,
    DnsLabel,
    Generation,
    Image,
    ModelName,
    Resource,
    Rule,
)
from prfaas.api.pool import Resources

Tokens = Annotated[int, Field(ge=0, le=16_777_216)]
Percent = Annotated[int, Field(ge=1, le=100)]
DatacenterSet = Annotated[list[DatacenterName], Field(max_length=32, json_schema_extra=AS_SET)]


class ThresholdSpec(ApiModel):
    """The threshold of incremental length: a longer prompt is offloaded."""

    rules: ClassVar = (
        Rule(
            "self.min <= self.max",
            "threshold.min (default 256) must not exceed threshold.max (default 131072): lower min or raise max",
            field="min",
        ),
        Rule(
            "self.mode != 'Auto' || (self.tokens >= self.min && self.tokens <= self.max)",
            "in mode Auto threshold.tokens (default 2048) must lie between threshold.min (default 256) and "
            "threshold.max (default 131072)",
            field="tokens",
        ),
    )

    mode: Literal["Auto", "Fixed", "Disabled"] = "Auto"
    """Auto moves the threshold with the measured link, Fixed keeps it at tokens, Disabled offloads nothing."""
    tokens: Tokens = 2048
    """The threshold in mode Fixed; in mode Auto where it starts, and falls back to when metrics are stale."""
    min: Tokens = 256
    """Lowest threshold that mode Auto may choose, in tokens."""
    max: Tokens = 131_072
    """Highest threshold that mode Auto may choose, in tokens."""


class Watermarks(ApiModel):
    """Between which utilisations of the link bandwidth is neither scarce nor abundant."""

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
    """How often the scheduler looks at the link."""

    short_seconds: Annotated[int, Field(ge=1, le=300)] = 1
    """Seconds between two looks at the link, each of which may move the threshold."""


class Metrics(ApiModel):
    """Where the scheduler reads measurements; needed for threshold mode Auto."""

    rules: ClassVar = (
        Rule(
            "isURL(self.prometheusUrl) && url(self.prometheusUrl).getScheme() in ['http', 'https'] "
            "&& url(self.prometheusUrl).getHost() != ''",
            "metrics.prometheusUrl must be an http:// or https:// address, such as http://prometheus.monitoring.svc:9090",
            field="prometheusUrl",
        ),
    )

    prometheus_url: Annotated[str, StringConstraints(max_length=1024)]
    """Base address of Prometheus, as the gateway's pods reach it."""
    stale_after_seconds: Annotated[int, Field(ge=1, le=3600)] = 10
    """Age in seconds at which measurements no longer count."""


class Datacenters(ApiModel):
    """Where prompts may travel."""

    rules: ClassVar = (
        Rule(
            "!has(self.prefer) || !has(self.forbid) || !self.prefer.exists(d, d in self.forbid)",
            "a datacenter cannot be both in prefer and in forbid: remove it from one",
            field="prefer",
        ),
    )

    prefer: DatacenterSet = []
    """Datacenters to choose first among clusters that may serve."""
    forbid: DatacenterSet = []
    """Datacenters that no prompt of this policy may reach."""


class GatewaySpec(ApiModel):
    """The gateway Deployment that the operator renders for this policy."""

    replicas: Annotated[int, Field(ge=0, le=100)] = 1
    """Number of gateway pods."""
    image: Image = "prfaas/gateway:latest"
    """Container image of the gateway and its scheduler sidecar."""
    resources: Resources = Resources()
    """Requests and limits of the router container."""


class PrfaaSPolicySpec(ApiModel):
    """Which pools serve the model, and when a prompt is offloaded."""

    rules: ClassVar = (
        Rule(
            "self.threshold.mode != 'Auto' || has(self.metrics)",
            "threshold.mode Auto needs metrics.prometheusUrl: set it, or use mode Fixed",
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
    )

    model: ModelName
    """The model's name, as clients send it and the pools have it in model.name."""
    decode_pool: DnsLabel
    """DecodePool of this namespace that decodes."""
    prefill_pools: Annotated[list[DnsLabel], Field(max_length=16, json_schema_extra=AS_SET)] = []
    """PrefillPools of this namespace: offload pools in member clusters, and local prefill pools."""
    threshold: ThresholdSpec = ThresholdSpec()
    link: Watermarks = Watermarks()
    intervals: Intervals = Intervals()
    metrics: Metrics | None = None
    on_offload_failure: Literal["PrefillLocally", "Reject"] = "PrefillLocally"
    """What happens to a request whose offload fails: prefill it in the hub, or answer with an error."""
    datacenters: Datacenters = Datacenters()
    gateway: GatewaySpec = GatewaySpec()


class PrfaaSPolicyStatus(ApiModel):
    """What the operator (instances, Ready) and the scheduler (threshold, link) observed."""

    observed_generation: Generation = 0
    """The metadata.generation that this status was computed from."""
    threshold_tokens: Tokens | None = None
    """Threshold in force, in tokens of incremental length."""
    bandwidth: Literal["Scarce", "Abundant"] | None = None
    """Whether the link is short of bandwidth."""
    offloaded_percent: Annotated[int, Field(ge=0, le=100)] | None = None
    """Share of recent requests that were offloaded."""
    link_utilisation_percent: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Present traffic of the busiest link in percent of its effective capacity."""
    ready_prefill: Count = 0
    """Prefill instances that are ready, in all clusters."""
    ready_decode: Count = 0
    """Decode instances that are ready."""
    conditions: Conditions = []
    """Whether the policy serves, and whether metrics and link are in order."""


class PrfaaSPolicy(Resource):
    """A policy: one model endpoint over a decode pool and prefill pools, with a threshold that follows the link."""

    kind_name: ClassVar = "PrfaaSPolicy"
    plural: ClassVar = "prfaaspolicies"
    short_names: ClassVar = ("prfaas",)
    max_name_length: ClassVar = 50
    rules: ClassVar = (
        Rule(
            "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            "a policy's name becomes a Service's: it must be lower-case letters, digits and '-', "
            "start with a letter and end with a letter or digit",
            field="metadata.name",
        ),
    )
    columns: ClassVar = (
        Column("Ready", '.status.conditions[?(@.type=="Ready")].status', description="Whether the endpoint serves"),
        Column("Threshold", ".status.thresholdTokens", "integer", "Longer prompts are offloaded, in tokens"),
        Column("Bandwidth", ".status.bandwidth", description="Scarce or Abundant"),
        Column("Link %", ".status.linkUtilisationPercent", "integer", "Utilisation of the link"),
        Column("Offloaded %", ".status.offloadedPercent", "integer", "Share of requests that were offloaded"),
        Column("Prefill", ".status.readyPrefill", "integer", "Prefill instances that are ready"),
        Column("Decode", ".status.readyDecode", "integer", "Decode instances that are ready"),
        Column("Why", '.status.conditions[?(@.type=="Ready")].reason', description="Reason of the Ready condition"),
        Column("Age", ".metadata.creationTimestamp", "date", "Time since it was created"),
    )

    spec: PrfaaSPolicySpec
    status: PrfaaSPolicyStatus = PrfaaSPolicyStatus()
