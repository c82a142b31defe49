"""Proves which runs come next: what is asked for, what is invalid once more, and loads that rise to the limit."""

from collections.abc import Iterable

import msgspec
import pytest

from prfaas.evaluate.limit import LoadOutcome, LoadVerdict
from prfaas.evaluate.next_runs import MOST_LOAD, WantedRuns, next_load, next_runs
from prfaas.evaluate.record import Run, RunKey
from prfaas.evaluate.rows import LoadResult, LoadRow

from .cases import invalid
from .test_steady import run_of

Loads = dict[float, tuple[LoadOutcome, int]]
"""The outcome of each load, and how many seeds of it are there."""


def row(load: float, outcome: LoadOutcome, seeds: int = 1, counted: bool = True) -> LoadRow:
    numbers = tuple(range(1, 1 + seeds))
    return LoadRow(
        policy="threshold",
        load=load,
        rate_per_second=load,
        seeds=numbers,
        counted_seeds=numbers if counted else (),
        requests=100,
        lost=0,
        fallbacks=0,
        result=LoadResult(
            figures=None,
            saturated_per_second=None,
            saturated_counted=None,
            verdict=LoadVerdict(rate_per_second=load, outcome=outcome, why=""),
        ),
        planned=None,
        simulated_result=None,
    )


def run(key: RunKey) -> Run:
    return msgspec.structs.replace(run_of([]), key=key)


def rising(loads: Loads, asked: Iterable[float], seeds: int = 1, tried: Iterable[tuple[float, int]] = ()):
    """Return load and seed of the runs that come next, where one seed of each load below 0.9 is asked for."""
    wanted = [RunKey("threshold", load, seed) for load in asked for seed in range(1, 1 + (seeds if load >= 0.9 else 1))]
    rows = [row(load, outcome, there) for load, (outcome, there) in loads.items()]
    runs = [run(RunKey("threshold", one.load, seed)) for one in rows for seed in one.seeds]
    found = next_runs(
        WantedRuns(asked=tuple(wanted), rising=("threshold",), seeds=seeds),
        runs,
        rows,
        {RunKey("threshold", *one) for one in tried},
    )
    return [(key.load, key.seed) for key in found]


def test_what_is_asked_for_comes_first_in_its_order_and_then_loads_rise():
    assert rising({0.5: ("held", 1)}, asked=(0.7, 0.5, 0.6)) == [(0.7, 1), (0.6, 1)]
    assert rising({0.5: ("held", 1), 0.7: ("held", 1)}, asked=(0.7, 0.5)) == [(0.8, 1)]
    assert rising({0.5: ("held", 1)}, asked=(0.5,), seeds=3) == [(0.6, 1), (0.6, 2), (0.6, 3)]


def test_without_rising_policies_no_load_rises():
    key = RunKey("threshold", 0.5, 1)

    assert next_runs(WantedRuns(asked=(key,)), [run(key)], [row(0.5, "held")]) == []


def test_a_run_that_is_invalid_is_made_once_more_if_the_call_asks_for_it():
    key, other = RunKey("threshold", 0.5, 1), RunKey("naive", 0.5, 1)
    slow = [invalid(run(key)), invalid(run(other))]

    assert next_runs(WantedRuns(asked=(key,)), slow, []) == [key]
    assert next_runs(WantedRuns(asked=(), rising=("naive",)), slow, []) == [other]
    assert next_runs(WantedRuns(asked=(key,)), slow, [], tried={key}) == []


def test_a_failed_run_stops_nothing_but_its_own_figure():
    assert rising({0.5: ("held", 1)}, asked=(0.5, 0.7), tried=[(0.7, 1)]) == [(0.6, 1)]
    assert rising({0.9: ("held", 2)}, asked=(0.9,), seeds=3, tried=[(0.9, 3)]) == [(1.0, 1), (1.0, 2), (1.0, 3)]
    risen: Loads = {0.9: ("held", 3), 1.0: ("held", 2)}
    assert rising(risen, asked=(0.9,), seeds=3, tried=[(1.0, 3)]) == [(1.1, 1), (1.1, 2), (1.1, 3)]


def test_a_load_of_which_all_runs_failed_ends_the_rise():
    assert rising({0.5: ("held", 1)}, asked=(0.5,), tried=[(0.6, 1)]) == []


@pytest.mark.parametrize("interrupted", [0.8, 1.0])
def test_an_interrupted_load_is_made_whole_wherever_it_lies(interrupted: float):
    """A middle lies below the loads that are repeated otherwise."""
    loads: Loads = {0.7: ("held", 1), interrupted: ("open", 1)}
    loads |= {0.9: ("broken", 3)} if interrupted < 0.9 else {0.9: ("held", 3)}

    assert rising(loads, asked=(0.7, 0.9), seeds=3) == [(interrupted, 2), (interrupted, 3)]


@pytest.mark.parametrize(
    ("rows", "load"),
    [
        ([], None),
        ([row(0.5, "held")], 0.6),
        ([row(0.5, "held"), row(0.9, "open")], 1.0),
        ([row(MOST_LOAD, "held")], None),
        ([row(0.5, "open", counted=False)], None),
        ([row(0.5, "broken")], None),
        ([row(0.5, "held"), row(1.6, "broken")], 1.05),
        ([row(0.5, "held"), row(0.55, "broken")], None),
        ([row(0.5, "held"), row(0.7, "open"), row(0.75, "broken")], 0.6),
        ([row(0.65, "held"), row(0.7, "open"), row(0.8, "broken")], 0.75),
        ([row(0.65, "held"), row(0.7, "open"), row(0.75, "broken")], None),
        ([row(0.5, "open"), row(0.7, "broken")], 0.6),
        ([row(0.5, "held"), row(0.6, "broken"), row(0.7, "held"), row(0.8, "broken")], 0.55),
        ([row(0.5, "held"), row(0.6, "broken"), row(0.7, "held")], 0.8),
    ],
)
def test_the_next_load_is_higher_until_one_breaks_and_then_in_the_first_wide_gap_below_it(rows, load):
    assert next_load(rows) == load
