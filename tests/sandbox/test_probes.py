"""A probe's verdict changes after as many attempts in a row as its thresholds say."""

import pytest

from prfaas_sandbox.node.container import Outcomes

PROBE = {"successThreshold": 2, "failureThreshold": 3}


def verdicts(probe: dict, attempts: str, initial: bool | None) -> list[bool | None]:
    outcomes = Outcomes(probe, initial=initial)
    return [outcomes.add(succeeded=attempt == "+") for attempt in attempts]


@pytest.mark.parametrize(
    ("attempts", "initial", "expected"),
    [
        ("+++", False, [False, True, True]),
        ("+-++", False, [False, False, False, True]),
        ("---", True, [True, True, False]),
        ("--+---", True, [True, True, True, True, True, False]),
        ("--", None, [None, None]),
    ],
)
def test_thresholds(attempts, initial, expected):
    assert verdicts(PROBE, attempts, initial) == expected


def test_defaults_are_one_success_and_three_failures():
    assert verdicts({}, "+---", None) == [True, True, True, False]
