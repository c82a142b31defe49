"""What Prometheus is told about the operator: how long reconciles take, what fails, and how old each contact is."""

import time

import prometheus_client
from prometheus_client import Counter, Gauge, Histogram

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


def contacted(cluster: str, now: float) -> None:
    """Note that a member answered at monotonic second `now`; the gauge grows by itself from there."""
    CONTACT_AGE.labels(cluster).set_function(lambda: time.monotonic() - now)


def forget_member(cluster: str) -> None:
    """Stop reporting a member that is no more."""
    CONTACT_AGE.remove(cluster)
