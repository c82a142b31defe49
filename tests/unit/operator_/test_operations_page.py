"""Proves that docs/operate/operations.md explains every reason that the code can give."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas_operator.plan.pod_facts import WAITING_REASONS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "operate" / "operations.md").read_text()
CAMEL = re.compile(r"[A-Z][a-z]+([A-Z][a-z]+)*")
CALLS_WITH_REASON = {"yes", "no", "ConditionState", "post"}
"""Calls with a reason among their positional arguments; `reason=` is one in every call."""
NO_REASONS = {"True", "False", "Unknown", "Normal", "Warning"}
"""Other arguments of the same calls: a condition's status, an Event's type."""


def reasons(path: Path) -> Iterator[str]:
    """Yield the reasons that one module sets: in a condition or an Event, as a constant, or by an error."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            values: list[ast.expr | None] = list(node.args) if name in CALLS_WITH_REASON else []
            values += [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
        elif isinstance(node, ast.AnnAssign) and (path.parent.name == "plan" or path.name == "errors.py"):
            values = [node.value]
        else:
            continue
        for value in values:
            if isinstance(value, ast.Constant) and isinstance(value.value, str) and CAMEL.fullmatch(value.value):
                yield value.value


def all_reasons() -> list[str]:
    modules = [
        *(ROOT / "operator/prfaas_operator").rglob("*.py"),
        *(ROOT / "scheduler/prfaas_scheduler" / name for name in ("status.py", "conditions.py")),
        ROOT / "core/prfaas/capacity/longloop.py",
    ]
    found = {reason for path in modules for reason in reasons(path)} | set(WAITING_REASONS.values())
    return sorted(found - NO_REASONS)


def test_the_search_finds_reasons_of_every_form():
    assert {"AllReady", "TokenExpired", "InstancesNotReady", "TokenNotRenewed", "NotConfigured", "NotMeasured"} <= set(
        all_reasons()
    )


@pytest.mark.parametrize("reason", all_reasons())
def test_every_reason_is_explained(reason):
    assert f"`{reason}`" in PAGE
