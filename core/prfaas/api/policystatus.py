"""The status of a PrfaaSPolicy: the scheduler's measurements, and the operator's conclusions.

Two writers share it. The scheduler writes its measurements, as a summary of bounded size. The operator plans on that
summary only, so it never asks a worker or a Prometheus. All figures are integers, as in every custom resource.
"""

from typing import Annotated, Literal

from pydantic import Field

from prfaas.api.base import ApiModel, Conditions, Count, DnsLabel, Generation, Timestamp, keyed_by

TokenCount = Annotated[int, Field(ge=0, le=16_777_216)]
Large = Annotated[int, Field(ge=0, le=1_000_000_000_000_000)]
MilliPerSecond = Annotated[int, Field(ge=0, le=1_000_000_000_000)]
MAX_SLICES = 32


class ProfilePoint(ApiModel):
    """The cost of a prefill of one length."""

    tokens: TokenCount
    """Length of the prompt."""
    prefill_micros: Large
    """Time of its prefill on one instance, in microseconds."""
    cache_bytes: Large
    """Size of its cache."""


class ObservedPool(ApiModel):
    """The measurements of a pool's instances."""

    name: DnsLabel
    """The pool; if a PrefillPool shares a DecodePool's instances, the DecodePool stands for both."""
    samples: Count = 0
    """Number of prefills behind the profile."""
    waiting_prefills: Count = 0
    """Prefills of which nothing is computed yet, as far as the engine tells."""
    running: Count | None = None
    """Requests that run at its instances."""
    cache_used_percent: Annotated[int, Field(ge=0, le=100)] | None = None
    """Mean share of its instances' cache that requests hold."""
    profile: Annotated[list[ProfilePoint], Field(max_length=3)] = []
    """Three points of the curve of prefill times, a parabola, and of the line of cache sizes."""


class ObservedLink(ApiModel):
    """A member cluster's link toward the hub."""

    cluster_name: DnsLabel
    """The MemberCluster."""
    effective_mbps: Large
    """Its effective capacity in Mbit/s, as far as measured."""


class Observed(ApiModel):
    """The scheduler's measurements over the last minutes."""

    time: Timestamp
    """Time of this summary."""
    prompts: Count = 0
    """Prompts that one gateway routed, from which the lengths come."""
    gateway_arrival_milli_per_second: MilliPerSecond = 0
    """Requests that arrive at one gateway, in thousandths a second; each of several gateways receives a share."""
    length_tokens: Annotated[list[TokenCount], Field(max_length=MAX_SLICES)] = []
    """Mean incremental length of each of several slices with equally many prompts, shortest first."""
    output_milli_tokens: Large | None = None
    """Mean length of an answer, in thousandths of a token."""
    decode_step_micros: Large | None = None
    """Mean time of a decode step, in microseconds."""
    decode_batch: Count | None = None
    """Requests that an instance may decode together."""
    first_token_p90_millis: Large | None = None
    """P90 of the time to the first token at the instances that decode, as they measured it."""
    links: Annotated[list[ObservedLink], Field(max_length=64, json_schema_extra=keyed_by("clusterName"))] = []
    """Links of the policy's member clusters that are alive."""
    pools: Annotated[list[ObservedPool], Field(max_length=32, json_schema_extra=keyed_by("name"))] = []
    """Pools of the policy that were measured."""


class PlanStatus(ApiModel):
    """The policy's last plan for its pools."""

    prefill: Count
    """Prefill instances in the hub, N_p."""
    decode: Count
    """Decode instances, N_d."""
    replicas: Annotated[dict[str, Count], Field(max_length=32)] = {}
    """Instances of each pool that the last plan changed."""
    last_change_time: Timestamp
    """Time of the decision; the cooldown starts here."""


class CapacityStatus(ApiModel):
    """The capacity model's result for the present instances, in thousandths of a request a second."""

    arrival_milli_per_second: MilliPerSecond
    """Requests that arrive at all gateways."""
    max_milli_per_second: MilliPerSecond
    """Requests that can be served: at this rate the first stage is saturated, Lambda_max."""
    offload_milli_per_second: MilliPerSecond
    """Long prompts that offload pools and links can take, Theta_prfaas."""
    prefill_milli_per_second: MilliPerSecond
    """Short prompts that the hub's prefill instances can take, Theta_pd-p."""
    decode_milli_per_second: MilliPerSecond
    """Requests that the decode instances can finish, Theta_pd-d."""
    prefill_load_percent: Count
    """Arriving load as a share of the capacity of all prefill instances."""
    decode_load_percent: Count
    """Arriving load as a share of the capacity of the decode instances."""
    ttft_p90_millis: Large | None = None
    """Predicted P90 of the time to the first token, waits included; absent if more requests arrive than can be
    served."""
    best_prefill: Count
    """Prefill instances in the best division of the hub's present instances."""
    best_decode: Count
    """Decode instances in that division."""
    best_milli_per_second: MilliPerSecond
    """Requests that this division could serve."""


class PrfaaSPolicyStatus(ApiModel):
    """The status by the operator (instances, plan, Ready, Balanced) and the scheduler (threshold, link, observed)."""

    observed_generation: Generation = 0
    """The metadata.generation that this status was computed from."""
    threshold_tokens: TokenCount | None = None
    """Threshold in force, in tokens of incremental length."""
    bandwidth: Literal["Scarce", "Abundant"] | None = None
    """True if the link's bandwidth is scarce."""
    offloaded_percent: Annotated[int, Field(ge=0, le=100)] | None = None
    """Share of recent requests that were offloaded."""
    link_utilisation_percent: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Present traffic of the busiest link in percent of its effective capacity."""
    ready_prefill: Count = 0
    """Prefill instances that are ready, in all clusters."""
    ready_decode: Count = 0
    """Decode instances that are ready."""
    observed: Observed | None = None
    """The scheduler's measurements, for the long loop."""
    capacity: CapacityStatus | None = None
    """The capacity model's result."""
    plan: PlanStatus | None = None
    """The last decision of conversion and scaling."""
    conditions: Conditions = []
    """Conditions: the policy serves, metrics and link are healthy, and its pools fit the load."""
