"""Strangers want a process killed for its memory: what they make it hold at the worst fits into its container's limit.

The bounds stand in the code, the limits in a chart or in what the operator renders: who changes one finds the other
here. The gateway's budgets, which follow its limit, are in gateway/test_budgets.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
import yaml

from prfaas.engines import ENGINES
from prfaas.kube import session, watch
from prfaas_operator.clusters import client, informer
from prfaas_operator.controller.child_cache import FOLLOWED
from prfaas_operator.render.gateway import SCHEDULER_DEFAULTS
from prfaas_scheduler import prometheus
from prfaas_worker.front import serving

MIB, GIB = 1 << 20, 1 << 30
VALUES: Final = Path(__file__).parents[2] / "charts/prfaas/values.yaml"
OPERATOR_BYTES: Final = 214 * MIB
"""With 1,000 pools, by its benchmark."""
SCHEDULER_BYTES: Final = 100 * MIB
"""The most that it takes at rest: tests/unit/scheduler/test_process.py."""
WORKER_BYTES: Final = 1 * GIB
"""At rest, with its cache on a CPU: its request."""
VALUE_BYTES: Final = 200
"""Of an object with one member."""
PARSED: Final = 16
"""So many bytes for each byte of Prometheus's JSON: an element of 30 took 347."""
QUERIES: Final = 17
"""At once: the scheduler's own, and one for each cluster of 16 pools."""
COPIES: Final = 4
"""Of each body, at the worst: in pieces, whole, parsed, and as tokens."""


def operator_bytes() -> int:
    """Return the most memory of an operator with a hostile member: one long answer as it is read, short ones at all
    other connections, an event of each watch, and what is kept, old and new, while it is listed again."""
    long_answer = session.MAX_ANSWER_BYTES + session.MAX_ANSWER_VALUES * VALUE_BYTES
    short_answers = session.CONNECTIONS * session.LONG_ANSWER_BYTES
    events = (1 + len(FOLLOWED)) * watch.MAX_EVENT_BYTES
    return OPERATOR_BYTES + long_answer + short_answers + events + 2 * client.MAX_OBJECTS * informer.MAX_ITEM_BYTES


def scheduler_bytes() -> int:
    return SCHEDULER_BYTES + (QUERIES + PARSED) * prometheus.MAX_ANSWER_BYTES


def worker_bytes() -> int:
    return WORKER_BYTES + COPIES * serving.MAX_UNREAD_BYTES


def bytes_of(quantity: int | str) -> int:
    return int(str(quantity).removesuffix("Mi")) * MIB


WORST: Final[dict[str, Callable[[], int]]] = {
    "operator": operator_bytes,
    "scheduler": scheduler_bytes,
    "worker": worker_bytes,
}
LIMITS: Final = {
    "operator": bytes_of(yaml.safe_load(VALUES.read_text())["operator"]["resources"]["limits"]["memory"]),
    "scheduler": bytes_of(SCHEDULER_DEFAULTS.limits["memory"]),
    "worker": ENGINES["prfaas"].memory_gib * GIB,
}


@pytest.mark.parametrize("process", WORST)
def test_what_strangers_make_a_process_hold_fits_into_its_limit(process):
    assert WORST[process]() < LIMITS[process]


@pytest.mark.parametrize(
    ("process", "bound", "more"),
    [
        ("operator", "prfaas.kube.session.MAX_ANSWER_VALUES", 2_000_000),
        ("operator", "prfaas.kube.session.LONG_ANSWER_BYTES", session.MAX_ANSWER_BYTES),
        ("operator", "prfaas_operator.clusters.client.MAX_OBJECTS", 80_000),
        ("scheduler", "prfaas_scheduler.prometheus.MAX_ANSWER_BYTES", 16 * MIB),
        ("worker", "prfaas_worker.front.serving.MAX_UNREAD_BYTES", 16 * GIB),
    ],
)
def test_control_a_higher_bound_does_not(monkeypatch, process, bound, more):
    monkeypatch.setattr(bound, more)
    assert WORST[process]() > LIMITS[process]
