"""The operator's Prometheus metrics: durations of reconciles, errors, and the age of each contact.

Every scraped target has the label `cluster` of its own. Metrics about a cluster, or the hub, use `member_cluster`.
"""

import time
from collections.abc import Mapping
from datetime import datetime

import prometheus_client
from prometheus_client import Counter, Gauge, Histogram

from prfaas.api import PrfaaSPolicy
from prfaas.capacity.longloop import LongLoopDecision
from prfaas_operator.plan.conditions import CALLERS_CHECKED, ENCRYPTED, PLACES_KNOWN, READY, ConditionState

# They would add a series to each counter and histogram.
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

OBJECT_READY = Gauge("prfaas_operator_object_ready", "1 while an object's condition Ready is True.", ("kind", "name"))
OBJECT_ENCRYPTED = Gauge(
    "prfaas_operator_object_encrypted", "1 while an object's condition Encrypted is True.", ("kind", "name")
)
CALLERS_ARE_CHECKED = Gauge(
    "prfaas_operator_policy_callers_checked", "1 while a policy's condition CallersChecked is True.", ("name",)
)
PLACES_ARE_KNOWN = Gauge(
    "prfaas_operator_policy_places_known", "1 while a policy's condition PlacesKnown is True.", ("name",)
)
LEADER = Gauge("prfaas_operator_leader", "1 while this replica works: it holds the Lease, or there is no election.")
API_REQUESTS = Counter(
    "prfaas_operator_api_requests_total",
    "Calls to API servers, by HTTP status; `none` without an answer.",
    ("member_cluster", "verb", "code"),
)
QUEUE_WAIT_SECONDS = Histogram(
    "prfaas_operator_queue_wait_seconds",
    "Time from an object's wake-up to its reconcile.",
    ("kind",),
    buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30),
)
QUEUE_DEPTH = Gauge("prfaas_operator_queue_depth", "Objects that wait for their reconcile.")
DRIFT_REVERTED = Counter(
    "prfaas_operator_drift_reverted_total",
    "Children that were put right after an external edit or deletion.",
    ("kind",),
)
TOKEN_EXPIRES = Gauge(
    "prfaas_operator_member_token_expires_timestamp_seconds",
    "Unix time at which the token of a member cluster's kubeconfig expires.",
    ("member_cluster",),
)


CERTIFICATE_EXPIRES = Gauge(
    "prfaas_operator_certificate_expires_timestamp_seconds",
    "Unix time at which the certificate of a cluster's instances expires.",
    ("member_cluster",),
)
AUTHORITY_EXPIRES = Gauge(
    "prfaas_operator_authority_expires_timestamp_seconds",
    "Unix time at which the authority that signs the clusters' certificates expires.",
)
POOL_CHANGES = Counter(
    "prfaas_operator_pool_changes_total", "Conversions and changes of replicas by policies.", ("name", "reason")
)
LOAD_SHARE = Gauge("prfaas_operator_policy_load", "Arriving load as a share of a stage's capacity.", ("name", "stage"))
STAGES = ("prefill", "decode")


def contacted(cluster: str, now: float) -> None:
    """Note that a member answered at monotonic second `now`; the gauge grows from then on."""
    CONTACT_AGE.labels(cluster).set_function(lambda: time.monotonic() - now)


def balanced(name: str, decision: LongLoopDecision) -> None:
    """Report the loads that a policy's long loop used; no series while they are unknown."""
    for stage in STAGES:
        if decision.now is None:
            LOAD_SHARE.remove(name, stage)
        else:
            load = decision.now.prefill_load if stage == "prefill" else decision.now.decode_load
            LOAD_SHARE.labels(name, stage).set(load)


def judged(kind: str, name: str, conditions: Mapping[str, ConditionState]) -> None:
    """Report an object's conditions. Where its reconcile failed there is only Ready, and the others stay."""
    OBJECT_READY.labels(kind, name).set(READY in conditions and conditions[READY].good)
    if ENCRYPTED not in conditions:
        return
    OBJECT_ENCRYPTED.labels(kind, name).set(conditions[ENCRYPTED].good)
    if CALLERS_CHECKED in conditions:
        CALLERS_ARE_CHECKED.labels(name).set(conditions[CALLERS_CHECKED].good)
    if PLACES_KNOWN in conditions:
        PLACES_ARE_KNOWN.labels(name).set(conditions[PLACES_KNOWN].good)
    elif kind == PrfaaSPolicy.kind_name:
        PLACES_ARE_KNOWN.remove(name)


def forget_object(kind: str, name: str) -> None:
    """Stop reporting an object that was deleted; only policies have loads, callers and places."""
    if kind == PrfaaSPolicy.kind_name:
        CALLERS_ARE_CHECKED.remove(name)
        PLACES_ARE_KNOWN.remove(name)
        for stage in STAGES:
            LOAD_SHARE.remove(name, stage)
    OBJECT_READY.remove(kind, name)
    OBJECT_ENCRYPTED.remove(kind, name)


def forget_member(cluster: str) -> None:
    """Remove the metrics of a member cluster that no longer exists."""
    CONTACT_AGE.remove(cluster)
    TOKEN_EXPIRES.remove(cluster)


def token_expires(cluster: str, moment: datetime | None) -> None:
    """Report when a member's token expires; None for a credential without an expiry."""
    if moment is None:
        TOKEN_EXPIRES.remove(cluster)
    else:
        TOKEN_EXPIRES.labels(cluster).set(moment.timestamp())
