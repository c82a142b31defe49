"""A probe's result changes after as many attempts in a row as its thresholds say."""

import pytest

from prfaas_sandbox.node.container import ProbeCounter

PROBE = {"successThreshold": 2, "failureThreshold": 3}


def probe_results(probe: dict, attempts: str, initial: bool | None) -> list[bool | None]:
    counter = ProbeCounter(probe, initial=initial)
    return [counter.add(succeeded=attempt == "+") for attempt in attempts]


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
    assert probe_results(PROBE, attempts, initial) == expected


def test_defaults_are_one_success_and_three_failures():
    assert probe_results({}, "+---", None) == [True, True, True, False]
