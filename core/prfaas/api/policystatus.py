"""The status of a PrfaaSPolicy: what its scheduler observed, and what the operator concludes from it.

Two writers share it. The scheduler says what it measured, as a summary of bounded size; the operator plans on that
summary alone, so that it never asks a worker or a Prometheus. All figures are integers, as in every custom resource.
"""

from typing import Annotated, Literal

from pydantic import Field

from prfaas.api.base import ApiModel, Conditions, Count, DnsLabel, Generation, Timestamp, keyed_by

Tokens = Annotated[int, Field(ge=0, le=16_777_216)]
Large = Annotated[int, Field(ge=0, le=1_000_000_000_000_000)]
MilliPerSecond = Annotated[int, Field(ge=0, le=1_000_000_000_000)]
MAX_SLICES = 32


class ProfilePoint(ApiModel):
    """What a prefill of one length costs."""

    tokens: Tokens
    """Length of the prompt."""
    prefill_micros: Large
    """Time of its prefill on one instance, in microseconds."""
    cache_bytes: Large
    """Size of its cache."""


class ObservedPool(ApiModel):
    """A pool as its instances measure themselves."""

    name: DnsLabel
    """The pool; where a PrefillPool shares a DecodePool's instances, the DecodePool stands for both."""
    samples: Count = 0
    """Prefills that the profile stands on."""
    waiting_prefills: Count = 0
    """Prefills that wait for room."""
    profile: Annotated[list[ProfilePoint], Field(max_length=3)] = []
    """Three points of the curve of prefill times, which is a parabola, and of the line of cache sizes."""


class ObservedLink(ApiModel):
    """A member cluster's link toward the hub."""

    cluster_name: DnsLabel
    """The MemberCluster."""
    effective_mbps: Large
    """What it can carry now, as far as was seen, in Mbit/s."""


class Observed(ApiModel):
    """What the scheduler measured over the last minutes."""

    time: Timestamp
    """When it was summed up."""
    prompts: Count = 0
    """Prompts that one gateway routed, on which lengths stand."""
    gateway_arrival_milli_per_second: MilliPerSecond = 0
    """Requests that arrive at one gateway, in thousandths a second; each of several gateways sees its share."""
    length_tokens: Annotated[list[Tokens], Field(max_length=MAX_SLICES)] = []
    """Incremental lengths in slices of equally many prompts, shortest first: the mean of each."""
    output_milli_tokens: Large | None = None
    """Mean length of an answer, in thousandths of a token."""
    decode_step_micros: Large | None = None
    """Mean time of a decode step, in microseconds."""
    decode_batch: Count | None = None
    """Requests that an instance may decode together."""
    links: Annotated[list[ObservedLink], Field(max_length=64, json_schema_extra=keyed_by("clusterName"))] = []
    """Links of the policy's member clusters that are alive."""
    pools: Annotated[list[ObservedPool], Field(max_length=32, json_schema_extra=keyed_by("name"))] = []
    """Pools of the policy that were measured."""


class PlanStatus(ApiModel):
    """What the policy last made of its pools."""

    prefill: Count
    """Prefill instances in the hub, N_p."""
    decode: Count
    """Decode instances, N_d."""
    replicas: Annotated[dict[str, Count], Field(max_length=32)] = {}
    """Instances of each pool that it changed last."""
    last_change_time: Timestamp
    """When it decided so; the cooldown counts from here."""


class CapacityStatus(ApiModel):
    """What the capacity model says of the instances that there are, in thousandths of a request a second."""

    arrival_milli_per_second: MilliPerSecond
    """Requests that arrive at all gateways."""
    max_milli_per_second: MilliPerSecond
    """Requests that can be served: the first stage is full at this rate, Lambda_max."""
    offload_milli_per_second: MilliPerSecond
    """Long prompts that offload pools and links take, Theta_prfaas."""
    prefill_milli_per_second: MilliPerSecond
    """Short prompts that the hub's prefill instances take, Theta_pd-p."""
    decode_milli_per_second: MilliPerSecond
    """Requests that the decode instances finish, Theta_pd-d."""
    prefill_load_percent: Count
    """Share of what all prefill instances can do that arrives."""
    decode_load_percent: Count
    """Share of what the decode instances can do that arrives."""
    ttft_p90_millis: Large | None = None
    """Predicted P90 of the time to the first token, waits included; absent where more arrives than can be served."""
    best_prefill: Count
    """Prefill instances in the hub that would serve most, with as many instances as there are."""
    best_decode: Count
    """Decode instances beside them."""
    best_milli_per_second: MilliPerSecond
    """Requests that this division could serve."""


class PrfaaSPolicyStatus(ApiModel):
    """What the operator (instances, plan, Ready, Balanced) and the scheduler (threshold, link, observed) found."""

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
    observed: Observed | None = None
    """What the scheduler measured, for the long loop."""
    capacity: CapacityStatus | None = None
    """What the capacity model makes of it."""
    plan: PlanStatus | None = None
    """What conversion and scaling decided last."""
    conditions: Conditions = []
    """Whether the policy serves, whether metrics and link are in order, and whether its pools fit the load."""
