"""Objects of another version as they are read: what is not understood, and what of it counts while they are deleted."""

import pytest

from prfaas.api import PrefillPool
from prfaas_operator.errors import InvalidObjectError
from prfaas_operator.plan.reading import read

METADATA = {"name": "away", "namespace": "prfaas", "uid": "1"}
FUTURE = {
    "clusterName": "eu",
    "replicas": "many",
    "engine": {"type": "future", "image": "x:1", "ports": {"http": "seven"}},
    "template": [{"nodeSelector": 7}],
}


def body(spec, **metadata):
    return {
        "apiVersion": "prfaas.io/v1alpha1",
        "kind": "PrefillPool",
        "metadata": {**METADATA, **metadata},
        "spec": spec,
    }


def test_what_is_not_understood_is_not_acted_upon():
    with pytest.raises(InvalidObjectError, match="does not fit this version"):
        read(PrefillPool, body(FUTURE))


def test_what_is_being_deleted_is_read_as_far_as_it_is_understood():
    document = body(FUTURE, deletionTimestamp="2026-01-01T00:00:00Z")
    pool = read(PrefillPool, document)
    assert pool.spec.cluster_name == "eu"
    assert pool.metadata.uid == "1"
    assert document["spec"] == FUTURE, "what is left out is left out of a copy"


@pytest.mark.parametrize("spec", [7, {"clusterName": ["eu"]}])
def test_where_it_was_is_not_guessed(spec):
    document = body(spec, deletionTimestamp="2026-01-01T00:00:00Z")
    with pytest.raises(InvalidObjectError):
        read(PrefillPool, document)
