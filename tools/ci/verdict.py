"""Judges a stage's results: what is red, what may be tried again, and what that means for tests/flaky.toml. Pure.

Only a test that waited in vain may be tried again (NotInTime in tests/waiting.py): a busy machine does that to a right
program. A wrong value, a leak, a traceback, a test of the stage `gate`, and a test that was listed three times are red
at once.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

MOST_SECOND_TRIES: Final = 3
"""Tests that may be tried again in a run of all stages."""
MOST_LISTED: Final = 8
LAST_COUNT: Final = 3
"""A test that is listed so often is not tried again."""


class Failure(NamedTuple):
    """A test that failed. It is late if all that went wrong is that something did not come in time."""

    test: str
    is_late: bool
    reason: str
    in_setup: bool = False

    @property
    def file(self) -> str:
        return self.test.partition("::")[0]


class StageResult(NamedTuple):
    """What a stage, or one file of it, came to. `broken` says why there is no result of all tests."""

    stage: str
    seconds: float
    passed: int = 0
    skipped: int = 0
    failures: tuple[Failure, ...] = ()
    broken: str = ""

    @property
    def is_green(self) -> bool:
        return not self.failures and not self.broken


class Plan(NamedTuple):
    """The files to try again, or why the stage is red as it is."""

    files: tuple[str, ...] = ()
    red: tuple[str, ...] = ()


def plan_second_tries(result: StageResult, counts: Mapping[str, int], tried: int) -> Plan:
    """Decide what a stage that is not green may do.

    `counts` says how often each test is listed as flaky, `tried` how many tests this run has tried again before.
    """
    red = [result.broken] if result.broken else []
    all_late = [one for one in result.failures if one.is_late]
    late = distinct(all_late)
    for one in result.failures:
        if result.stage == "gate" or not one.is_late:
            red.append(f"{one.test}: {one.reason}")
    for one in late:
        if result.stage != "gate" and counts.get(one.test, 0) >= LAST_COUNT:
            red.append(f"{one.test}: listed {LAST_COUNT} times in tests/flaky.toml, so not tried again: {one.reason}")
    if not red and len(late) + tried > MOST_SECOND_TRIES:
        red += [f"{one.test}: {one.reason}" for one in late]
        red.append(f"more than {MOST_SECOND_TRIES} tests of this run came too late: that is no chance")
    if red:
        return Plan(red=tuple(red))
    return Plan(files=tuple(dict.fromkeys(one.file for one in all_late)))


def distinct(failures: Iterable[Failure]) -> list[Failure]:
    """Return failures, but of tests that share a start which came too late only the first one."""
    kept: dict[str, Failure] = {}
    for one in failures:
        kept.setdefault(one.reason if one.in_setup else one.test, one)
    return list(kept.values())


def forgive(first: StageResult, file: str, second: StageResult) -> tuple[StageResult, tuple[Failure, ...]]:
    """Return a stage's result after the second try of one file, and the tests that passed only then.

    A second try in which a test was skipped proves nothing.
    """
    tried = tuple(one for one in first.failures if one.file == file)
    others = tuple(one for one in first.failures if one.file != file)
    first = first._replace(seconds=first.seconds + second.seconds)
    if second.is_green and not second.skipped:
        passed = first.passed + len({one.test for one in tried})
        return first._replace(failures=others, passed=passed), tried
    why = second.broken or "; ".join(f"{one.test}: {one.reason}" for one in second.failures) or "tests were skipped"
    again = (one._replace(reason=f"{one.reason} (the second try, alone, failed, too: {why})") for one in tried)
    return first._replace(failures=(*others, *again)), ()


def entry_of(failure: Failure, counts: Mapping[str, int]) -> str:
    """Return the entry that tests/flaky.toml has to hold from the next commit on."""
    test, cause = (text.replace("\\", "\\\\").replace('"', '\\"') for text in (failure.test, failure.reason))
    return f'[[test]]\nid = "{test}"\ncause = "{cause}"\ncount = {counts.get(failure.test, 0) + 1}\n'


def summarize(results: Sequence[StageResult], flaky: Sequence[Failure], counts: Mapping[str, int]) -> list[str]:
    """Return the last lines of a run: a table of its stages, what failed, what was tried twice, and the total."""
    lines = [f"{'stage':<8}{'passed':>8}{'failed':>8}{'skipped':>9}{'minutes':>9}"]
    for one in results:
        failed = len(one.failures) + bool(one.broken)
        lines.append(f"{one.stage:<8}{one.passed:>8}{failed:>8}{one.skipped:>9}{one.seconds / 60:>9.1f}")
    for one in results:
        if one.broken:
            lines.append(f"RED in {one.stage}: {one.broken}")
        lines += [f"RED in {one.stage}: {each.test}: {each.reason}" for each in one.failures]
        if one.skipped and one.is_green and not one.passed:
            lines.append(f"NOT RUN: {one.stage}: this machine lacks what it needs; the reason stands above")
    for number, each in enumerate(flaky, 1):
        lines.append(f"FLAKY {number}/{MOST_SECOND_TRIES}: {each.test}: {each.reason}")
    if flaky:
        lines += ["Take this into tests/flaky.toml (replace a listed test's entry):", ""]
        lines += [entry_of(each, counts) for each in flaky]
    passed, skipped = sum(one.passed for one in results), sum(one.skipped for one in results)
    failed = sum(len(one.failures) + bool(one.broken) for one in results)
    lines.append(f"{passed} passed, {failed} failed, {skipped} skipped")
    return lines
