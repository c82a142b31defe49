"""What is red at once, what is tried again, and what a run says at its end."""

import re

import pytest
from tools.ci.run import FLAKY, ROOT, read_counts
from tools.ci.verdict import (
    LAST_COUNT,
    MOST_LISTED,
    MOST_SECOND_TRIES,
    Failure,
    Plan,
    StageResult,
    distinct,
    entry_of,
    forgive,
    plan_second_tries,
    summarize,
)

LATE = Failure("tests/e2e/test_a.py::test_one", is_late=True, reason="not within 120 s: a pod")
WRONG = Failure("tests/e2e/test_b.py::test_two", is_late=False, reason="assert 1 == 2")


def result(*failures: Failure, stage: str = "system", broken: str = "") -> StageResult:
    return StageResult(stage, 60.0, passed=10, failures=failures, broken=broken)


def test_what_waited_in_vain_is_tried_again_by_its_whole_file():
    other = LATE._replace(test="tests/e2e/test_a.py::test_other")
    assert plan_second_tries(result(LATE, other), {}, 0) == Plan(files=("tests/e2e/test_a.py",))


@pytest.mark.parametrize(
    ("failed", "counts", "tried"),
    [
        (result(WRONG), {}, 0),
        (result(LATE, WRONG), {}, 0),
        (result(LATE, stage="gate"), {}, 0),
        (result(broken="pytest ended with 3"), {}, 0),
        (result(LATE), {LATE.test: LAST_COUNT}, 0),
        (result(LATE), {}, MOST_SECOND_TRIES),
    ],
    ids=["wrong value", "wrong beside late", "gate", "no report", "listed three times", "fourth of a run"],
)
def test_all_else_is_red_at_once(failed: StageResult, counts: dict[str, int], tried: int):
    plan = plan_second_tries(failed, counts, tried)
    assert plan.files == ()
    assert plan.red


def test_a_start_that_came_too_late_counts_once_for_all_tests_that_needed_it():
    late = [LATE._replace(test=f"tests/e2e/test_{n % 3}.py::test_{n}", in_setup=True) for n in range(9)]
    files = ("tests/e2e/test_0.py", "tests/e2e/test_1.py", "tests/e2e/test_2.py")
    assert plan_second_tries(result(*late), {}, MOST_SECOND_TRIES - 1).files == files
    assert distinct(late) == late[:1]
    each_on_its_own = [one._replace(in_setup=False) for one in late]
    assert plan_second_tries(result(*each_on_its_own), {}, 0).red


def test_a_second_try_that_is_green_makes_the_stage_green_and_the_test_flaky():
    second = StageResult("system", 5.0, passed=3)
    forgiven, flaky = forgive(result(LATE), LATE.file, second)
    assert forgiven.is_green
    assert (forgiven.passed, flaky) == (11, (LATE,))
    assert forgiven.seconds == 65.0


def test_a_second_try_that_skips_a_test_forgives_nothing():
    still, flaky = forgive(result(LATE), LATE.file, StageResult("system", 5.0, passed=2, skipped=1))
    assert not still.is_green
    assert flaky == ()
    assert "skipped" in still.failures[0].reason


def test_a_second_try_that_fails_leaves_it_red_and_shows_both_reasons():
    second = result(LATE._replace(reason="assert 'a' == 'b'"))
    still, flaky = forgive(result(LATE), LATE.file, second)
    assert flaky == ()
    assert not still.is_green
    assert "pod" in still.failures[0].reason
    assert "'a' == 'b'" in still.failures[0].reason


def test_the_last_lines_name_stage_tests_reasons_and_the_total():
    found = summarize([result(stage="gate"), result(WRONG)], [LATE], {LATE.test: 1})
    text = "\n".join(found)
    assert f"RED in system: {WRONG.test}: {WRONG.reason}" in text
    assert f"FLAKY 1/{MOST_SECOND_TRIES}: {LATE.test}" in text
    assert f'id = "{LATE.test}"' in text
    assert "count = 2" in text
    assert found[-1] == "20 passed, 1 failed, 0 skipped"


def test_a_stage_of_which_nothing_ran_is_named():
    skipped = StageResult("kind", 1.0, skipped=18)
    assert any(line.startswith("NOT RUN: kind") for line in summarize([skipped], [], {}))


def test_an_entry_is_toml_for_any_reason(tmp_path, monkeypatch):
    odd = LATE._replace(reason='not within 1 s: a "pod" of C:\\x')
    file = tmp_path / "flaky.toml"
    file.write_text(entry_of(odd, {}) + "\n" + entry_of(WRONG, {}))
    monkeypatch.setattr("tools.ci.run.FLAKY", file)
    assert read_counts() == {odd.test: 1, WRONG.test: 1}


def test_the_list_of_flaky_tests_is_short_and_names_tests_that_exist():
    counts = read_counts()
    assert len(counts) <= MOST_LISTED, f"mend one of those in {FLAKY} first"
    for test, count in counts.items():
        file, name = re.fullmatch(r"(tests/[\w/]+\.py)::(\w+)(\[.*\])?", test).group(1, 2)
        assert f"def {name}(" in (ROOT / file).read_text()
        assert 1 <= count <= LAST_COUNT
