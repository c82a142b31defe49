"""PrfaaSPolicy: the declarative unit that joins a decode pool and prefill pools of two clusters behind one endpoint."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from prfaas.api.base import ApiModel, Column, Conditions, DnsLabel, Resource, Rule
from prfaas.api.pool import Resources

Tokens = Annotated[int, Field(ge=0, le=16_777_216)]
Percent = Annotated[int, Field(ge=1, le=100)]
DatacenterName = Annotated[str, StringConstraints(min_length=1, max_length=63)]


class ThresholdSpec(ApiModel):
    """The threshold of incremental length: a longer prompt is offloaded.

    Auto moves it between `min` and `max` with the measured link, starting from `tokens` and falling back to it when metrics are
    stale; Fixed uses `tokens`; Disabled offloads nothing.
    """

    rules: ClassVar = (
        Rule("self.min <= self.max", "threshold.min must not exceed threshold.max"),
        Rule("self.tokens >= self.min && self.tokens <= self.max", "threshold.tokens must lie between threshold.min and threshold.max"),
    )

    mode: Literal["Auto", "Fixed", "Disabled"] = "Auto"
    tokens: Tokens = 2048
    min: Tokens = 256
    max: Tokens = 131_072


class Watermarks(ApiModel):
    """Link utilisation in percent of effective capacity: above `high` bandwidth is scarce, below `low` abundant."""

    rules: ClassVar = (
        Rule("self.lowUtilisationPercent < self.highUtilisationPercent", "link.lowUtilisationPercent must be below link.highUtilisationPercent"),
    )

    high_utilisation_percent: Percent = 80
    low_utilisation_percent: Percent = 50


class Intervals(ApiModel):
    """How often the scheduler looks at the link."""

    short_seconds: Annotated[int, Field(ge=1, le=300)] = 1


class Metrics(ApiModel):
    """Where the scheduler reads measurements; needed for threshold mode Auto."""

    rules: ClassVar = (
        Rule("self.prometheusUrl.startsWith('http://') || self.prometheusUrl.startsWith('https://')", "metrics.prometheusUrl must start with http:// or https://"),
    )

    prometheus_url: Annotated[str, StringConstraints(min_length=8, max_length=1024)]
    stale_after_seconds: Annotated[int, Field(ge=1, le=3600)] = 10


class Datacenters(ApiModel):
    """Where prompts may travel: `forbid` is absolute, `prefer` breaks ties between clusters that may serve."""

    rules: ClassVar = (
        Rule("!has(self.prefer) || !has(self.forbid) || !self.prefer.exists(d, d in self.forbid)", "a datacenter cannot be both in prefer and in forbid"),
    )

    prefer: Annotated[list[DatacenterName], Field(max_length=32, json_schema_extra={"x-kubernetes-list-type": "set"})] = []
    forbid: Annotated[list[DatacenterName], Field(max_length=32, json_schema_extra={"x-kubernetes-list-type": "set"})] = []


class GatewaySpec(ApiModel):
    """The gateway Deployment that the operator renders for this policy."""

    replicas: Annotated[int, Field(ge=0, le=100)] = 1
    image: Annotated[str, StringConstraints(min_length=1, max_length=512)] = "prfaas/gateway:latest"
    resources: Resources = Resources()


class PrfaaSPolicySpec(ApiModel):
    """Spec of a PrfaaSPolicy."""

    rules: ClassVar = (
        Rule(
            "self.threshold.mode != 'Auto' || has(self.metrics)",
            "threshold.mode Auto needs metrics.prometheusUrl: set it, or use mode Fixed",
        ),
        Rule("self.threshold.mode == 'Disabled' || self.prefillPools.size() > 0", "prefillPools is empty: name one, or set threshold.mode to Disabled"),
    )

    model: Annotated[str, StringConstraints(min_length=1, max_length=253)]
    decode_pool: DnsLabel
    prefill_pools: Annotated[list[DnsLabel], Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "set"})] = []
    threshold: ThresholdSpec = ThresholdSpec()
    link: Watermarks = Watermarks()
    intervals: Intervals = Intervals()
    metrics: Metrics | None = None
    on_offload_failure: Literal["PrefillLocally", "Reject"] = "PrefillLocally"
    datacenters: Datacenters = Datacenters()
    gateway: GatewaySpec = GatewaySpec()


class PrfaaSPolicyStatus(ApiModel):
    """Status of a PrfaaSPolicy: the operator writes the plan and Ready, the scheduler the figures of the link."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    threshold_tokens: Tokens | None = None
    bandwidth: Literal["Scarce", "Abundant"] | None = None
    offloaded_percent: Annotated[int, Field(ge=0, le=100)] | None = None
    link_utilisation_percent: Annotated[int, Field(ge=0, le=1000)] | None = None
    ready_prefill: Annotated[int, Field(ge=0)] = 0
    ready_decode: Annotated[int, Field(ge=0)] = 0
    conditions: Conditions = []


class PrfaaSPolicy(Resource):
    """A policy: one model endpoint over a decode pool and prefill pools."""

    kind_name: ClassVar = "PrfaaSPolicy"
    plural: ClassVar = "prfaaspolicies"
    short_names: ClassVar = ("prfaas",)
    columns: ClassVar = (
        Column("Ready", '.status.conditions[?(@.type=="Ready")].status'),
        Column("Threshold", ".status.thresholdTokens", "integer"),
        Column("Bandwidth", ".status.bandwidth"),
        Column("Link %", ".status.linkUtilisationPercent", "integer"),
        Column("Offloaded %", ".status.offloadedPercent", "integer"),
        Column("Prefill", ".status.readyPrefill", "integer"),
        Column("Decode", ".status.readyDecode", "integer"),
        Column("Why", '.status.conditions[?(@.type=="Ready")].reason'),
        Column("Age", ".metadata.creationTimestamp", "date"),
    )

    spec: PrfaaSPolicySpec
    status: PrfaaSPolicyStatus = PrfaaSPolicyStatus()
