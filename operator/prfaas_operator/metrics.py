"""What Prometheus is told about the operator: how long reconciles take, what fails, and how old each contact is.

A label `cluster` is every scraped target's own: what is about a cluster, the hub included, has `member_cluster`.
"""

import time
from datetime import datetime

import prometheus_client
from prometheus_client import Counter, Gauge, Histogram

from prfaas.api import PrfaaSPolicy
from prfaas.capacity.longloop import Decision

prometheus_client.disable_created_metrics()

RECONCILE_SECONDS = Histogram(
    "prfaas_operator_reconcile_seconds",
    "Duration of one reconcile of one object.",
    ("kind",),
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
RECONCILE_ERRORS = Counter(
    "prfaas_operator_reconcile_errors_total",
    "Reconciles that ended in an error, by condition reason.",
    ("kind", "reason"),
)
STATUS_WRITES = Counter("prfaas_operator_status_writes_total", "Statuses written.", ("kind",))
CHILD_WRITES = Counter("prfaas_operator_child_writes_total", "Children applied.", ("kind",))
CONTACT_AGE = Gauge(
    "prfaas_operator_member_contact_age_seconds",
    "Time since a member cluster's API server last answered.",
    ("member_cluster",),
)

OBJECT_READY = Gauge("prfaas_operator_object_ready", "Whether an object's condition Ready holds.", ("kind", "name"))
LEADER = Gauge("prfaas_operator_leader", "Whether this replica works: it holds the Lease, or there is no election.")
API_REQUESTS = Counter(
    "prfaas_operator_api_requests_total",
    "Calls to API servers, by HTTP status; `none` where no answer came.",
    ("member_cluster", "verb", "code"),
)
QUEUE_WAIT_SECONDS = Histogram(
    "prfaas_operator_queue_wait_seconds",
    "Time from an object's wake-up to its reconcile.",
    ("kind",),
    buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30),
)
QUEUE_DEPTH = Gauge("prfaas_operator_queue_depth", "Objects that were woken and not reconciled yet.")
DRIFT_HEALED = Counter(
    "prfaas_operator_drift_healed_total", "Children that somebody else had changed or deleted, put back.", ("kind",)
)
TOKEN_EXPIRES = Gauge(
    "prfaas_operator_member_token_expires_timestamp_seconds",
    "When the token of a member cluster's kubeconfig ends, as Unix time.",
    ("member_cluster",),
)


def count_request(cluster: str, verb: str, code: str) -> None:
    API_REQUESTS.labels(cluster, verb, code).inc()


CERTIFICATE_EXPIRES = Gauge(
    "prfaas_operator_certificate_expires_timestamp_seconds",
    "When the certificate that a cluster's instances hold ends, as Unix time.",
    ("member_cluster",),
)
AUTHORITY_EXPIRES = Gauge(
    "prfaas_operator_authority_expires_timestamp_seconds",
    "When the authority that signs the clusters' certificates ends, as Unix time.",
)
POOL_CHANGES = Counter(
    "prfaas_operator_pool_changes_total", "Conversions and changes in number that policies made.", ("name", "reason")
)
LOAD_SHARE = Gauge("prfaas_operator_policy_load", "What arrives, as a share of what a stage can do.", ("name", "stage"))
STAGES = ("prefill", "decode")


def contacted(cluster: str, now: float) -> None:
    """Note that a member answered at monotonic second `now`; the gauge grows by itself from there."""
    CONTACT_AGE.labels(cluster).set_function(lambda: time.monotonic() - now)


def reconciled(kind: str, name: str, *, ready: bool) -> None:
    OBJECT_READY.labels(kind, name).set(ready)


def balanced(name: str, decision: Decision) -> None:
    """Report the loads that a policy's long loop decided on; none while they are not known."""
    for stage in STAGES:
        if decision.now is None:
            LOAD_SHARE.remove(name, stage)
        else:
            load = decision.now.prefill_load if stage == "prefill" else decision.now.decode_load
            LOAD_SHARE.labels(name, stage).set(load)


def forget_object(kind: str, name: str) -> None:
    """Stop reporting an object that is no more; only policies have loads."""
    if kind == PrfaaSPolicy.kind_name:
        for stage in STAGES:
            LOAD_SHARE.remove(name, stage)
    OBJECT_READY.remove(kind, name)


def forget_certificate(cluster: str) -> None:
    CERTIFICATE_EXPIRES.remove(cluster)


def forget_member(cluster: str) -> None:
    CONTACT_AGE.remove(cluster)
    TOKEN_EXPIRES.remove(cluster)


def token_expires(cluster: str, moment: datetime | None) -> None:
    """Report when a member's token ends; None where nothing ends."""
    if moment is None:
        TOKEN_EXPIRES.remove(cluster)
    else:
        TOKEN_EXPIRES.labels(cluster).set(moment.timestamp())
