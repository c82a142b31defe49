"""Proves that an edit of a child is reported with its author and fields, and that an endless one is slowed down."""

import pytest

from prfaas_operator.controller.children import EditLimiter
from prfaas_operator.plan.drift import AppliedManifest, edit, view

MANIFEST = {
    "spec": {
        "replicas": 2,
        "containers": [{"name": "worker", "image": "a", "args": ["x", "y"]}],
        "selector": {"a": "b"},
    }
}
WORKER = {'k:{"name":"worker"}': {".": {}, "f:image": {}}}


def entry(manager: str, time: str, fields: dict, **more: str) -> dict:
    return {"manager": manager, "time": time, "fieldsV1": fields, "operation": "Update", **more}


def live(managed: list[dict] | None = None, **spec: object) -> dict:
    good = MANIFEST["spec"] | {"unseen": 1} | spec
    return {"metadata": {"managedFields": managed or []}, "spec": good}


LAST = AppliedManifest(MANIFEST, view(live(), MANIFEST))


def test_an_object_as_we_left_it_has_no_edit():
    assert edit(live(unseen=2), LAST) is None


def test_the_owner_of_a_changed_field_is_its_editor_and_not_the_last_writer():
    managed = [
        entry("prfaas-operator", "2026-01-01T00:00:09Z", {"f:spec": {"f:replicas": {}}}),
        entry("kubectl-edit", "2026-01-01T00:00:01Z", {"f:spec": {"f:containers": WORKER}}),
        entry("kube-controller-manager", "2026-01-01T00:00:05Z", {"f:metadata": {}}),
        entry("hpa", "2026-01-01T00:00:08Z", {"f:spec": {"f:containers": WORKER}}, subresource="status"),
    ]
    changed = live(managed, containers=[{"name": "worker", "image": "b", "args": ["x", "y"]}])
    assert str(edit(changed, LAST)) == "kubectl-edit changed spec.containers[worker].image"


def test_ascribes_a_removed_field_to_the_last_writer_if_one_is_known():
    reduced = {"spec": {"replicas": 2}}
    managed = [entry("old", "2026-01-01T00:00:01Z", {}), entry("new", "2026-01-01T00:00:02Z", {})]
    assert (
        str(edit({"metadata": {"managedFields": managed}, **reduced}, LAST))
        == "new changed spec.containers, spec.selector"
    )
    assert str(edit({"metadata": {}, **reduced}, LAST)) == "somebody changed spec.containers, spec.selector"


@pytest.mark.parametrize("keys", ["[" * 5000, "{", "[]", '{"name":"other"}'])
def test_keys_that_cannot_be_read_name_no_element(keys):
    managed = [
        entry("odd", "2026-01-01T00:00:02Z", {"f:spec": {"f:containers": {f"k:{keys}": {"f:image": {}}, **WORKER}}}),
        entry("last", "2026-01-01T00:00:03Z", {"f:spec": {"f:containers": {f"k:{keys}": {"f:image": {}}}}}),
    ]
    changed = live(managed, containers=[{"name": "worker", "image": "b", "args": ["x", "y"]}])
    assert str(edit(changed, LAST)) == "odd changed spec.containers[worker].image"


def test_an_owned_leaf_covers_what_is_below():
    managed = [
        entry("bulk", "2026-01-01T00:00:01Z", {"f:spec": {"f:selector": {}}}),
        entry("x", "2026-01-01T00:00:02Z", {}),
    ]
    assert str(edit(live(managed, selector={"a": "c"}), LAST)) == "bulk changed spec.selector.a"


def test_many_changes_are_summed_up():
    manifest = {"data": {f"k{index}": "v" for index in range(9)}}
    last = AppliedManifest(manifest, view(manifest, manifest))
    changed = {"metadata": {}, "data": dict.fromkeys(manifest["data"], "w")}
    assert str(edit(changed, last)) == "somebody changed data.k0, data.k1, data.k2, data.k3 and 5 more"


def test_a_few_edits_are_put_back_at_once_and_endless_ones_in_their_turn():
    now = [0.0]
    limiter = EditLimiter(lambda: now[0])
    puts_back: list[float] = []
    for second in range(120):  # an edit every second
        now[0] = float(second)
        if limiter.may_revert("u"):
            limiter.reverted("u")
            puts_back.append(now[0])
    assert puts_back == [0.0, 1.0, 2.0, 3.0, 4.0, 61.0, 62.0, 63.0, 64.0, 65.0]
    assert limiter.may_revert("another")


def test_a_child_that_is_left_in_peace_is_forgotten():
    now = [0.0]
    limiter = EditLimiter(lambda: now[0])
    for _ in range(5):
        limiter.reverted("u")
    assert not limiter.may_revert("u")
    now[0] = 61.0
    limiter.reverted("another")
    assert limiter.may_revert("u")
