"""Proves that `prfaas status` puts every pool where it runs, names once what is wrong, and fits a terminal."""

import io
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from prfaas_operator import status_view
from prfaas_operator.status_view import NOT_SEEN, Overview, overview

NOW = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)


def condition(status: str, reason: str, message: str = "", type_: str = "Ready") -> dict[str, str]:
    since = "2026-01-01T00:00:00Z"
    return {"type": type_, "status": status, "reason": reason, "message": message, "lastTransitionTime": since}


def with_status(one: Any, *conditions: dict[str, str], **status: Any) -> Any:
    body = one.model_dump(by_alias=True, exclude_none=True)
    return type(one).model_validate({**body, "status": {**status, "conditions": list(conditions)}})


@pytest.fixture
def view(make) -> Overview:
    fine, silent = condition("True", "AllReady"), condition("False", "ClusterUnreachable", "us did not answer in 5 s")
    members = [
        with_status(make.member("us"), {**silent, "type": "Reachable"}, silent, lastContactTime="2026-01-01T10:00:00Z"),
        with_status(make.member("eu"), fine, lastContactTime="2026-01-01T11:59:30Z", serverVersion="v1.34.4"),
    ]
    pools = [
        with_status(make.decode_pool(replicas=4), fine, readyReplicas=4),
        with_status(make.prefill_pool("offload", replicas=3), condition("False", "InstancesNotReady", "2 of 3")),
        make.prefill_pool("far", clusterName="us"),
    ]
    policy = with_status(make.policy(), fine, thresholdTokens=2048, linkUtilisationPercent=72, offloadedPercent=34)
    return overview("ns", members, pools, [policy], NOW)


def test_the_hub_comes_first_and_every_pool_stands_in_its_cluster(view):
    assert [(each.name, [pool.name for pool in each.pools]) for each in view.clusters] == [
        ("hub", ["decode"]), ("eu", ["offload"]), ("us", ["far"])
    ]  # fmt: skip


def test_a_link_shows_what_the_policies_that_use_it_measure(view):
    assert [each.link_percent for each in view.clusters] == [None, 72, None]
    assert [each.contact_seconds for each in view.clusters] == [None, 30, 7200]


def test_names_everything_that_is_wrong_once_also_what_was_never_checked(view):
    assert [(each.kind, each.name, each.condition, each.reason) for each in view.failing] == [
        ("MemberCluster", "us", "Ready", "ClusterUnreachable"),
        ("PrefillPool", "offload", "Ready", "InstancesNotReady"),
        ("PrefillPool", "far", "Ready", NOT_SEEN),
    ]


def test_a_drawing_fits_120_columns_and_answers_all_questions(view):
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    console.print(status_view.drawn(view, "title"))
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert max(map(len, text.splitlines())) <= 120
    for part in ("●●●●", "4/4", "72 %", "above 2,048 tokens", "34 % offloaded", "us did not answer in 5 s", "2h ago"):
        assert part in text, part


def test_plain_lines_say_the_same_without_a_drawing(view):
    text = "\n".join(status_view.lines(view, "title"))
    assert text.isascii()
    assert "decode pool decode: 4 of 4 ready" in text
    assert "cluster us: ClusterUnreachable, link 100 Mbit/s not measured, last answer 2h ago" in text
    assert "wrong: PrefillPool offload: InstancesNotReady: 2 of 3" in text


def test_a_missing_instance_of_a_large_pool_is_seen(make):
    pool = with_status(make.prefill_pool("big", replicas=400), condition("False", "x"), readyReplicas=399)
    seen = overview("ns", [make.member()], [pool], [], NOW)
    assert status_view._draw_dots(seen.clusters[1].pools[0]).plain.count("○") == 1


def test_an_empty_namespace_is_nothing_wrong():
    empty = overview("ns", [], [], [], NOW)
    assert list(status_view.lines(empty, "t")) == ["t", "cluster hub: the hub", "nothing is wrong"]
