"""Proves that annotations of kopf's with another writer count as absent, and that its own are read."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import kopf
import pytest

from prfaas_operator.controller.handlers import DiffBaseStorage, ProgressStorage

PREFIX = "internal.prfaas.io"
GARBAGE = ["{{", "[1, 2]", "7", '"x"', "[" * 5000]


def body(key: str, value: str) -> kopf.Body:
    return kopf.Body({"metadata": {"annotations": {f"{PREFIX}/{key}": value}}})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "value",
    [
        *GARBAGE,
        '{"started": 5}',
        '{"started": "yesterday"}',
        '{"retries": "many"}',
        '{"subrefs": [{}]}',
        '{"delayed": []}',
    ],
)
def test_progress_that_kopf_did_not_write_is_none(value: str):
    assert ProgressStorage(prefix=PREFIX).fetch(key="keep", body=body("keep", value)) is None


@pytest.mark.parametrize("value", [*GARBAGE, '{"metadata": 5}', '{"metadata": {"annotations": []}}', '{"spec": "x"}'])
def test_a_last_handled_state_that_kopf_did_not_write_is_none(value: str):
    assert DiffBaseStorage(prefix=PREFIX).fetch(body=body("last-handled-configuration", value)) is None


@pytest.mark.parametrize(
    "record", [{}, {"started": "2026-01-01T00:00:00.5+00:00", "retries": 2, "purpose": "delete", "success": False}]
)
def test_what_kopf_writes_is_read(record: dict[str, Any]):
    assert ProgressStorage(prefix=PREFIX).fetch(key="keep", body=body("keep", json.dumps(record))) == record
    essence = {"spec": {"a": [1]}, "metadata": {"labels": {"b": "c"}}}
    assert DiffBaseStorage(prefix=PREFIX).fetch(body=body("last-handled-configuration", json.dumps(essence))) == essence


@pytest.mark.parametrize(("ahead_seconds", "counts"), [(30, True), (3600, False), (10**9, False)])
def test_a_delay_of_a_clock_that_is_ahead_holds_up_no_deletion(ahead_seconds: int, counts: bool):
    delayed = (datetime.now(UTC) + timedelta(seconds=ahead_seconds)).isoformat()
    found = ProgressStorage(prefix=PREFIX).fetch(key="remove", body=body("remove", json.dumps({"delayed": delayed})))
    assert (found is not None) == counts


def test_what_is_not_there_is_none():
    empty = kopf.Body({"metadata": {}})  # pyright: ignore[reportArgumentType]
    assert ProgressStorage(prefix=PREFIX).fetch(key="keep", body=empty) is None
    assert DiffBaseStorage(prefix=PREFIX).fetch(body=empty) is None
