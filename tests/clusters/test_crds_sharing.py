"""Proves on a real API server what a PrefillPool with shareWith may say, and that it cannot begin or stop to share."""

import pytest

from .reader import RefusedError

pytestmark = pytest.mark.clusters

MODEL = {"name": "m", "source": "builtin:m"}


@pytest.fixture(scope="module")
def place(hub):
    """The hub with the committed CRDs, and a namespace of this file."""
    hub.install_crds()
    hub.kubectl("create", "namespace", "crds-sharing")
    yield hub
    hub.kubectl("delete", "namespace", "crds-sharing", "--wait=false")


def apply(place, name: str, **spec) -> None:
    body = {"apiVersion": "prfaas.io/v1alpha1", "kind": "PrefillPool", "metadata": {"name": name}, "spec": spec}
    place.reader.apply("crds-sharing", body)


def refusal(place, name: str, **spec) -> str:
    with pytest.raises(RefusedError) as refused:
        apply(place, name, **spec)
    return str(refused.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"shareWith": "decode", "model": MODEL}, "leave out model, engine, template"),
        ({"shareWith": "decode", "engine": {}}, "leave out model, engine, template"),
        ({"shareWith": "decode", "template": {}}, "leave out model, engine, template"),
        ({"shareWith": "decode", "drainSeconds": 30}, "leave out model, engine, template"),
        ({"shareWith": "decode", "rollout": {}}, "leave out model, engine, template"),
        ({"shareWith": "decode", "egressMbps": 7}, "leave out model, engine, template"),
        ({"shareWith": "decode", "parallelism": {}}, "leave out model, engine, template"),
        ({"shareWith": "decode", "clusterName": "eu"}, "instances run in the hub"),
        ({"shareWith": "Decode_1"}, "must be the name of a DecodePool"),
        ({}, "spec.model: Required value"),
    ],
    ids=str,
)
def test_a_contradiction_is_refused_with_what_to_do(place, spec, message):
    assert message in refusal(place, "bad", **spec)


def test_sharing_neither_begins_nor_ends_nor_changes_and_all_else_may(place):
    apply(place, "swing", shareWith="decode")
    apply(place, "swing", shareWith="decode", replicas=3)
    assert "shareWith cannot change" in refusal(place, "swing", shareWith="other", replicas=3)
    assert "shareWith cannot change" in refusal(place, "swing", model=MODEL)
    apply(place, "own", model=MODEL)
    apply(place, "own", model=MODEL, drainSeconds=9)
    assert "shareWith cannot change" in refusal(place, "own", shareWith="decode")
