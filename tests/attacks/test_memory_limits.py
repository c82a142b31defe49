"""Strangers want a process killed for its memory: what they make it hold at the worst fits into its container's limit.

An owner may give less than the chart and the operator do. Then the bounds are lower, or the process does not start. The
gateway's budgets are in gateway/test_budgets.py.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Final, cast

import pytest
import yaml

from prfaas.engines import ENGINES
from prfaas.errors import ConfigError
from prfaas.http_server import DEFAULT_BOUNDS, MAX_HEAD_BYTES, bounds_within
from prfaas.kube import session, watch
from prfaas.memory import MAX_BODY_BYTES, OPERATOR, SCHEDULER, UsualMemory, bounds_part, worker_budgets
from prfaas_operator.clusters import client, informer
from prfaas_operator.controller.child_cache import FOLLOWED
from prfaas_scheduler import prometheus
from prfaas_worker.front.engine_client import EngineClient
from prfaas_worker.front.serving import FrontState
from prfaas_worker.options import parse

MIB, GIB = 1 << 20, 1 << 30
VALUES: Final = Path(__file__).parents[2] / "charts/prfaas/values.yaml"
POOLS_BYTES: Final = 86 * MIB
"""Of 1,000 pools, by the operator's benchmark. Under a lower limit there are fewer: they are its owner's."""
IDLE_WORKER_BYTES: Final = 717 * MIB
"""By its benchmark. Weights and cache are its owner's, who sets the limit to have room for them."""
VALUE_BYTES: Final = 200
"""Of an object with one member."""
PARSED: Final = 16
"""So many bytes for each byte of Prometheus's JSON: an element of 30 took 347."""
QUERIES: Final = 17
"""At once: the scheduler's own, and one for each cluster of 16 pools."""
COPIES: Final = 4
"""Of each body, at the worst: in pieces, whole, parsed, and as tokens."""


def operator_bytes(part: float) -> float:
    """Return the most memory of an operator with a hostile member: one long answer as it is read, short ones or
    refusals at all other connections, an event of each watch, and what is kept, old and new, while it is listed."""
    long_answer = session.MAX_ANSWER_BYTES + session.MAX_ANSWER_VALUES * VALUE_BYTES
    short_answers = session.CONNECTIONS * max(session.LONG_ANSWER_BYTES, session.MAX_REFUSAL_BYTES)
    events = (1 + len(FOLLOWED)) * watch.MAX_EVENT_BYTES
    kept = 2 * client.MAX_OBJECTS * informer.MAX_ITEM_BYTES
    return OPERATOR.rest_mib * MIB + part * (POOLS_BYTES + long_answer + short_answers + events + kept)


def scheduler_bytes(part: float) -> float:
    return SCHEDULER.rest_mib * MIB + part * (QUERIES + PARSED) * prometheus.MAX_ANSWER_BYTES


def worker_bytes(limit_bytes: int | None) -> int:
    budgets = worker_budgets(limit_bytes)
    heads_bytes = bounds_within(budgets.heads_bytes).most * 2 * MAX_HEAD_BYTES
    return IDLE_WORKER_BYTES + COPIES * budgets.bodies_bytes + heads_bytes


WORST: Final[dict[UsualMemory, Callable[[float], float]]] = {OPERATOR: operator_bytes, SCHEDULER: scheduler_bytes}


@pytest.mark.parametrize(
    ("usual", "limit_mib"),
    [(OPERATOR, mib) for mib in (2048, 512, 256, 204)] + [(SCHEDULER, mib) for mib in (1024, 256, 128, 88)],
)
def test_what_strangers_make_a_process_hold_fits_into_its_limit(usual: UsualMemory, limit_mib: int):
    assert WORST[usual](bounds_part(usual, limit_mib * MIB)) < limit_mib * MIB


@pytest.mark.parametrize(("usual", "limit_mib"), [(OPERATOR, 256), (SCHEDULER, 128)])
def test_control_under_half_the_limit_the_usual_bounds_would_not(usual: UsualMemory, limit_mib: int):
    assert WORST[usual](1.0) > limit_mib * MIB


@pytest.mark.parametrize(
    ("usual", "bound", "more"),
    [
        (OPERATOR, "prfaas.kube.session.MAX_ANSWER_VALUES", 2_000_000),
        (OPERATOR, "prfaas.kube.session.LONG_ANSWER_BYTES", session.MAX_ANSWER_BYTES),
        (OPERATOR, "prfaas_operator.clusters.client.MAX_OBJECTS", 80_000),
        (SCHEDULER, "prfaas_scheduler.prometheus.MAX_ANSWER_BYTES", 16 * MIB),
    ],
)
def test_control_a_higher_bound_does_not(monkeypatch, usual: UsualMemory, bound: str, more: int):
    monkeypatch.setattr(bound, more)
    assert WORST[usual](1.0) > usual.limit_mib * MIB


@pytest.mark.parametrize(("usual", "limit_mib", "least_mib"), [(OPERATOR, 203, 204), (SCHEDULER, 87, 88)])
def test_under_a_limit_that_leaves_too_little_a_process_does_not_start(usual, limit_mib: int, least_mib: int):
    words = f"limit of {limit_mib} MiB is too low for the {usual.process}: give it {least_mib} MiB or more"
    with pytest.raises(ConfigError, match=words):
        bounds_part(usual, limit_mib * MIB)


def test_without_a_limit_and_under_the_usual_one_the_usual_bounds_hold():
    chart = yaml.safe_load(VALUES.read_text())["operator"]["resources"]["limits"]["memory"]
    assert chart == f"{OPERATOR.limit_mib}Mi"
    for usual in WORST:
        assert bounds_part(usual, None) == bounds_part(usual, usual.limit_mib * MIB) == 1.0
    assert worker_budgets(None) == worker_budgets(ENGINES["prfaas"].memory_gib * GIB)
    assert worker_budgets(None).bodies_bytes == 256 * MIB
    assert bounds_within(worker_budgets(None).heads_bytes) == DEFAULT_BOUNDS


@pytest.mark.parametrize("limit_gib", [32, 16, 8, 1])
def test_what_strangers_make_a_worker_hold_fits_into_its_limit(limit_gib: int):
    assert worker_bytes(limit_gib * GIB) < limit_gib * GIB


def test_control_under_a_low_limit_a_workers_usual_budgets_would_not():
    assert worker_bytes(None) > GIB


def test_a_worker_takes_its_budgets_and_has_room_for_the_longest_body():
    flags = ["--model-source", "x", "--model-name", "tiny", "--instance", "pod-1"]
    engine = cast(EngineClient, SimpleNamespace(listeners=[]))
    front = FrontState(parse(flags), engine, limit_bytes=GIB // 2)
    assert front.bodies.all.most_bytes == MAX_BODY_BYTES
    assert front.connections.most == 512
