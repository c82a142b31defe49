"""Proves what a PrefillPool that shares instances may say: how many of them prefill, and nothing of what they run."""

from prfaas.api import PrefillPool, crd
from prfaas.api.prefillpool import NO_MODEL, OF_THE_DECODE_POOL

OF_THE_POOL = {"clusterName", "shareWith", "replicas", "minReplicas", "maxReplicas"}


def spec_schema() -> dict:
    return crd.crd(PrefillPool)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]


def test_every_field_belongs_to_the_pool_or_is_refused_where_instances_are_shared():
    """A field that fails here is new: a pool that shares must act on it, or its rule must refuse it."""
    assert spec_schema()["properties"].keys() == OF_THE_POOL | set(OF_THE_DECODE_POOL)
    (refusal,) = (
        rule["rule"] for rule in spec_schema()["x-kubernetes-validations"] if "has(self.engine) || has(" in rule["rule"]
    )
    assert all(f"has(self.{name})" in refusal for name in OF_THE_DECODE_POOL)


def test_no_default_makes_a_refused_field_present():
    properties = spec_schema()["properties"]
    assert [name for name in OF_THE_DECODE_POOL if "default" in properties[name]] == []
    assert "required" not in spec_schema()


def test_a_pool_that_shares_declares_no_model():
    body = {"metadata": {"name": "swing"}, "spec": {"shareWith": "decode"}}
    assert PrefillPool.model_validate(body).spec.model == NO_MODEL
