"""MemberCluster: another cluster in which the hub's operator may run prefill pools, and its link to the hub."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from prfaas.api.base import (
    ApiModel,
    Column,
    Conditions,
    DataKey,
    DnsLabel,
    Generation,
    Hint,
    KubeconfigSecretName,
    Resource,
    Rule,
    Timestamp,
)

# Bytes that the hub acknowledged; without TLS the peer has no name.
DEFAULT_UTILISATION_QUERY = 'sum(rate(prfaas_link_sent_bytes_total{cluster="$cluster",peer=~"hub|"}[5s])) * 8 / 1e6'
KUBECONFIG_KEY = "kubeconfig"

Place = Annotated[
    str,
    StringConstraints(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$", max_length=63),
    Hint("must be letters, digits, '-', '_' and '.', and start and end with a letter or digit"),
]
NAMESPACE_IS_FIXED = Rule(
    "self == oldSelf",
    "namespace cannot change, because the operator would lose its pools there: "
    "register the cluster under another name with the new namespace and move the pools",
    reason="FieldValueForbidden",
)


class KubeconfigSecretRef(ApiModel):
    """The Secret with a kubeconfig for the member cluster, in the MemberCluster's own namespace.

    Only an inline CA with a token or an inline client certificate is accepted: exec, auth-provider, file paths, proxies
    and insecure TLS would run or be read inside the operator.
    """

    name: KubeconfigSecretName
    """Name of the Secret, NAME-kubeconfig. It has the label prfaas.io/secret=kubeconfig, as `prfaas cluster join`
    writes it.
    """
    key: DataKey = KUBECONFIG_KEY
    """Key of the Secret's data that holds the kubeconfig."""


class Link(ApiModel):
    """The path from the member cluster to the hub."""

    capacity_mbps: Annotated[int, Field(ge=1, le=100_000_000)]
    """Declared capacity toward the hub in Mbit/s."""
    utilisation_query: Annotated[str, StringConstraints(min_length=1, max_length=2048)] = DEFAULT_UTILISATION_QUERY
    """PromQL for one value: the link's present traffic toward the hub in Mbit/s; $cluster is the cluster's name."""
    round_trip_millis: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Round-trip time of the link in milliseconds."""


class MemberClusterSpec(ApiModel):
    """The access to the member cluster, and its link to the hub."""

    kubeconfig_secret_ref: KubeconfigSecretRef
    namespace: Annotated[DnsLabel, NAMESPACE_IS_FIXED] = "prfaas"
    """Namespace in the member cluster for everything the operator creates there; it cannot change."""
    datacenter: Place = ""
    """Datacenter of the cluster; policies name it in datacenters.prefer and datacenters.forbid."""
    region: Place = ""
    """Region of the cluster. Only for people; the operator does not use it."""
    addressing: Literal["PodIP", "HostIP"] = "PodIP"
    """Address of a worker pod that the hub uses: the pod's own, or its node's through a hostPort."""
    link: Link
    revoked: bool = False
    """Cut the cluster off: it gets no prompt and no certificate. Gateways and instances refuse its certificates once
    the kubelet has brought them the list, up to two minutes later; vLLM's API asks nobody for one. `prfaas cluster
    revoke` sets it, `prfaas cluster join` takes it back.
    """
    deletion_deadline_seconds: Annotated[int, Field(ge=0, le=86_400)] = 300
    """Seconds that the deletion of a pool waits for an unreachable cluster. Then the pool is deleted and its children
    there stay.
    """


class MemberClusterStatus(ApiModel):
    """The observed state of the member cluster."""

    observed_generation: Generation = 0
    """The metadata.generation that this status was computed from."""
    server_version: Annotated[str, StringConstraints(max_length=63)] = ""
    """Version of the member cluster's API server."""
    last_contact_time: Timestamp | None = None
    """Time of the last answer of the member cluster's API server."""
    token_expiration_time: Timestamp | None = None
    """Expiry of the token that the operator uses there; absent for a credential without an expiry."""
    admitted_time: Timestamp | None = None
    """Since when prompts may go there; absent while it is revoked. Cached bytes that it gave before serve no request.
    """
    conditions: Conditions = []
    """Reachable and Ready: the cluster answers, and pools can run there. If not, the condition names the cause."""


class MemberCluster(Resource):
    """A member cluster: another cluster in which the operator runs prefill pools, and its link to the hub."""

    kind_name: ClassVar = "MemberCluster"
    plural: ClassVar = "memberclusters"
    short_names: ClassVar = ("pmc",)
    rules: ClassVar = (
        Rule(
            "self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$') && self.metadata.name != 'hub'",
            "a MemberCluster's name must be lower-case letters, digits and '-', and not `hub`, the cluster you are in",
            field="metadata.name",
        ),
    )
    columns: ClassVar = (
        Column("Ready", '.status.conditions[?(@.type=="Ready")].status', description="True if pools can run there"),
        Column(
            "Reachable",
            '.status.conditions[?(@.type=="Reachable")].status',
            description="True if its API server answers",
            priority=1,
        ),
        Column("Version", ".status.serverVersion", description="Version of its API server"),
        Column("Link Mbit/s", ".spec.link.capacityMbps", "integer", "Declared capacity toward the hub"),
        Column(
            "Datacenter", ".spec.datacenter", description="Datacenter that policies may prefer or forbid", priority=1
        ),
        Column("Why", '.status.conditions[?(@.type=="Ready")].reason', description="Reason of the Ready condition"),
        Column("Contact", ".status.lastContactTime", "date", "Time since its API server last answered"),
    )

    spec: MemberClusterSpec
    status: MemberClusterStatus = MemberClusterStatus()
