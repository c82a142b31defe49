"""MemberCluster: another cluster that the hub's operator may run prefill pools in, and the link from it to the hub."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from prfaas.api.base import ApiModel, Column, Conditions, DnsLabel, DnsName, Resource, ShortText

DEFAULT_UTILISATION_QUERY = 'sum(rate(prfaas_transfer_sent_bytes_total{cluster="$cluster"}[5s])) * 8 / 1e6'


class KubeconfigSecretRef(ApiModel):
    """The Secret, in the MemberCluster's own namespace, that holds a kubeconfig.

    Only an inline CA with a token or an inline client certificate is accepted: exec, auth-provider, file paths, proxies and
    insecure TLS would run or be read inside the operator.
    """

    name: DnsName
    key: ShortText = "kubeconfig"


class Link(ApiModel):
    """The path from the member cluster to the hub."""

    capacity_mbps: Annotated[int, Field(ge=1, le=100_000_000)]
    """Declared capacity toward the hub, Mbit/s."""
    utilisation_query: Annotated[str, StringConstraints(min_length=1, max_length=2048)] = DEFAULT_UTILISATION_QUERY
    """PromQL answering one value: the link's present traffic toward the hub in Mbit/s; $cluster is the cluster's name."""
    round_trip_millis: Annotated[int, Field(ge=0, le=10_000)] = 0


class MemberClusterSpec(ApiModel):
    """Spec of a MemberCluster."""

    kubeconfig_secret_ref: KubeconfigSecretRef
    namespace: DnsLabel = "prfaas"
    """Namespace in the member cluster for everything the operator creates there."""
    datacenter: Annotated[str, StringConstraints(max_length=63)] = ""
    region: Annotated[str, StringConstraints(max_length=63)] = ""
    addressing: Literal["PodIP", "HostIP"] = "PodIP"
    """Which address of a worker pod the hub reaches: its own, or its node's through a hostPort."""
    link: Link
    deletion_deadline_seconds: Annotated[int, Field(ge=0, le=86_400)] = 300
    """How long deleting a pool waits for an unreachable cluster before the pool goes and its children are left there."""


class MemberClusterStatus(ApiModel):
    """Status of a MemberCluster."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    server_version: Annotated[str, StringConstraints(max_length=63)] = ""
    last_contact_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})] | None = None
    conditions: Conditions = []


class MemberCluster(Resource):
    """A registered member cluster."""

    kind_name: ClassVar = "MemberCluster"
    plural: ClassVar = "memberclusters"
    short_names: ClassVar = ("pmc",)
    columns: ClassVar = (
        Column("Ready", '.status.conditions[?(@.type=="Ready")].status'),
        Column("Reachable", '.status.conditions[?(@.type=="Reachable")].status'),
        Column("Version", ".status.serverVersion"),
        Column("Link Mbit/s", ".spec.link.capacityMbps", "integer"),
        Column("Datacenter", ".spec.datacenter", priority=1),
        Column("Why", '.status.conditions[?(@.type=="Ready")].reason'),
        Column("Last contact", ".status.lastContactTime", "date"),
    )

    spec: MemberClusterSpec
    status: MemberClusterStatus = MemberClusterStatus()
