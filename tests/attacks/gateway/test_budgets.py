"""An owner gives a gateway little memory; then clients who fill its budgets want the kernel to kill it."""

from pathlib import Path

import pytest

from prfaas.http_server import MAX_HEAD_BYTES
from prfaas.memory import INDEX_ENTRY_BYTES, MAX_INDEX_BLOCKS, container_limit_bytes, gateway_budgets
from prfaas_gateway.limits import Limits
from prfaas_operator.render.gateway import GATEWAY_DEFAULTS

MIB, GIB = 1 << 20, 1 << 30
BUSY_BYTES = 80 * MIB
"""What a gateway takes besides."""
COPIES = 3.5
"""Of each body, at the worst: as it came or with its salt, where the encoder may keep half as much besides, parsed, and
as it is sent."""


def worst_bytes(limits: Limits) -> int:
    heads_bytes = limits.connections.most * 2 * MAX_HEAD_BYTES
    return BUSY_BYTES + heads_bytes + COPIES * limits.all_requests_bytes + limits.index_blocks * INDEX_ENTRY_BYTES


@pytest.mark.parametrize("limit_bytes", [256 * MIB, 512 * MIB, GIB, 4 * GIB, 64 * GIB])
def test_the_budgets_fit_into_every_limit(limit_bytes):
    limits = Limits().within(limit_bytes)
    assert worst_bytes(limits) < limit_bytes
    assert limits.all_requests_bytes >= limits.request_bytes, "one body of the largest size always has room"
    assert limits.index_blocks <= MAX_INDEX_BLOCKS


def test_control_the_budgets_of_the_usual_limit_would_not_fit_into_a_small_one():
    assert worst_bytes(Limits()) > 512 * MIB


def test_a_gateway_takes_the_limit_that_the_operator_gives_it(tmp_path: Path):
    assert GATEWAY_DEFAULTS.limits["memory"] == "4Gi"
    (tmp_path / "memory.max").write_text(f"{4 * GIB}\n")
    assert Limits().within(container_limit_bytes(tmp_path)) == Limits()
    assert Limits().all_requests_bytes == gateway_budgets(4 * GIB).bodies_bytes == 256 * MIB


@pytest.mark.parametrize("content", ["max\n", "", None])
def test_without_a_limit_the_usual_budgets_hold(tmp_path: Path, content):
    if content is not None:
        (tmp_path / "memory.max").write_text(content)
    assert container_limit_bytes(tmp_path) is None
    assert Limits().within(None) == Limits()
