"""`make soak N=4`: run the stages with processes N times and show which tests fail how often.

Each round runs `system`, `quiet` and `vllm`, or, with FILES, these files of them; every third round stands beside two
busy loops. Each stage adds a line to .prfaas/ci/soak.jsonl as soon as it ends, so that a soak that was stopped
continues with the stage that it was in. Lines of other commits stay in the file and do not count; files that were
changed meanwhile end it.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.stages import FOLDERS
from tools.ci.run import NO_TESTS, RESULTS, ROOT, STAGES, make, run_stage

from prfaas.processes import ends_with_us

RECORD: Final = RESULTS / "soak.jsonl"
SOAKED: Final = ("system", "quiet", "vllm")
BUSY_EVERY: Final = 3
BUSY_LOOPS: Final = 2
EXAMPLE: Final = "example: make soak N=20 FILES=tests/vllm/test_resume.py"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.ci.soak", description=__doc__, epilog=EXAMPLE)
    parser.add_argument("--rounds", type=int, default=4, help="how many rounds this commit shall have in all")
    parser.add_argument("files", nargs="*", help="test files, instead of whole stages")
    options = parser.parse_args(arguments)
    paths = [Path(file).resolve() for file in options.files]
    if strange := [str(path) for path in paths if not path.is_relative_to(ROOT) or not path.is_file()]:
        parser.error(f"no test file of this checkout: {', '.join(strange)}")
    files = sorted(str(path.relative_to(ROOT)) for path in paths)
    wanted = [name for name in SOAKED if not files or any(name in stages_of(file) for file in files)]
    key = {"commit": commit(), "files": files}
    for number in range(1, options.rounds + 1):
        done = {line["stage"] for line in lines(key) if line["round"] == number}
        for stage in (name for name in wanted if name not in done):
            print(f"\n===== round {number} of {options.rounds}, stage {stage} =====", flush=True)
            if commit() != key["commit"] or is_changed():
                print(f"The files are no longer those of {key['commit']}: commit, and begin again", file=sys.stderr)
                return 2
            if (before := STAGES[stage].before) and (broken := make(before)):
                print(broken, file=sys.stderr)
                return 1
            with busy_loops(number):
                add(key | {"round": number} | soak(stage, files))
    found = list(lines(key))
    print(table(found))
    if not any(line["passed"] for line in found):
        print("No test was found", file=sys.stderr)
        return 1
    return 1 if any(line["red"] for line in found) else 0


def soak(stage: str, files: Sequence[str]) -> dict[str, Any]:
    """Run a stage once; return its line of the record."""
    mine = [file for file in files if stage in stages_of(file)]
    result, flaky = run_stage(stage, 0, mine)
    if mine and result.broken == NO_TESTS:  # a file whose tests are all of another stage
        result = result._replace(broken="")
    red = {one.test: one.reason for one in result.failures} | ({"": result.broken} if result.broken else {})
    return {
        "stage": stage,
        "passed": result.passed,
        "seconds": round(result.seconds),
        "red": list(red.items()),
        "flaky": [(one.test, one.reason) for one in flaky],
    }


def stages_of(file: str) -> tuple[str, ...]:
    """Return the stages that may have tests of a file: its folder's, or those that its marks may name."""
    folder = next((stage for start, stage in FOLDERS.items() if file.startswith(start)), "system")
    return ("system", "quiet") if folder == "system" else (folder,)


def commit() -> str:
    return git("rev-parse", "--short", "HEAD")


def is_changed() -> bool:
    """Return whether files differ from the commit."""
    return bool(git("status", "--porcelain"))


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def lines(key: dict[str, Any], record: Path = RECORD) -> Iterator[dict[str, Any]]:
    """Yield the lines of this soak; one that was cut off while it was written does not count."""
    for text in record.read_text().splitlines() if record.exists() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if key.items() <= line.items():
            yield line


def add(line: dict[str, Any]) -> None:
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    with RECORD.open("a") as file:
        file.write(json.dumps(line) + "\n")


@contextmanager
def busy_loops(number: int) -> Iterator[None]:
    """Keep every core busy meanwhile, in each third round."""
    count = 0 if number % BUSY_EVERY else BUSY_LOOPS
    command = [*ends_with_us(), sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return what the rounds came to: a row a stage, then the tests that failed, and how often."""
    rows = [f"{'round':<7}{'stage':<8}{'passed':>8}{'red':>5}{'flaky':>7}{'minutes':>9}"]
    for line in found:
        counts = f"{line['passed']:>8}{len(line['red']):>5}{len(line['flaky']):>7}{line['seconds'] / 60:>9.1f}"
        rows.append(f"{line['round']:<7}{line['stage']:<8}{counts}")
    for name in ("red", "flaky"):
        times = Counter(test for line in found for test, _ in line[name])
        reasons = {test: reason for line in found for test, reason in line[name]}
        rows += [f"{name} {count}x {test}: {reasons[test]}" for test, count in times.most_common()]
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
