"""Proves that the owner of spec.replicas is its last writer."""

from datetime import UTC, datetime

import pytest

from prfaas_operator.plan.ownership import is_default, owner, written_before

REPLICAS = {"f:spec": {"f:replicas": {}}}


def entry(manager: str, second: int, fields: dict = REPLICAS, **more: str) -> dict:
    return {"manager": manager, "time": f"2026-01-01T00:00:0{second}Z", "fieldsV1": fields, **more}


SCALED = entry("kube-controller-manager", 5, subresource="scale")


@pytest.mark.parametrize(
    ("managed", "wanted"),
    [
        (None, "User"),
        ([entry("prfaas-operator", 1, {"f:status": {"f:replicas": {}}})], "User"),
        ([entry("kubectl-client-side-apply", 1)], "User"),
        ([entry("kubectl", 1), SCALED], "Autoscaler"),
        ([SCALED, entry("kubectl", 6, subresource="scale")], "User"),
        ([SCALED, entry("argocd", 6)], "User"),
        ([entry("kube-controller-manager", 1)], "User"),
        ([entry("kubectl", 1), entry("prfaas-operator", 2)], "Policy"),
    ],
)
def test_the_owner_is_the_last_writer_of_replicas(managed, wanted):
    assert owner({"metadata": {"managedFields": managed}}) == wanted


@pytest.mark.parametrize(
    ("managed", "default", "before"),
    [
        (None, True, True),
        ([entry("kubectl", 4)], False, True),
        ([entry("kubectl", 5)], False, False),
        ([entry("kubectl", 4), entry("argocd", 6)], False, False),
        ([{"manager": "kubectl", "subresource": "scale", "fieldsV1": REPLICAS}], False, False),
    ],
    ids=["no writer", "earlier", "at the same second", "later", "by /scale, which has no time"],
)
def test_only_a_write_that_is_surely_older_counts_as_older(managed, default, before):
    live = {"metadata": {"managedFields": managed, "creationTimestamp": "2026-01-01T00:00:00Z"}}
    assert is_default(live) is default
    assert written_before(live, datetime(2026, 1, 1, 0, 0, 5, tzinfo=UTC)) is before
