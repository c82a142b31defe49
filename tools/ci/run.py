"""Runs one stage, or one file of it, with pytest in a process of its own, and reads its junit file.

The process has a session of its own: the kernel shares the CPU among sessions (autogroups), and the programs that tests
start have a session each. It ends with us, however we end.
"""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple
from xml.etree import ElementTree

from tests.stages import FOLDERS
from tools.ci.verdict import Failure, StageResult, distinct, forgive, plan_second_tries

from prfaas.processes import ends_with_us

ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = ROOT / ".prfaas" / "ci"
FLAKY: Final = ROOT / "tests" / "flaky.toml"
PRESSURE: Final = Path("/proc/pressure/cpu")
QUIET_PERCENT: Final = 20.0
QUIET_WITHIN_SECONDS: Final = 120.0
END_SECONDS: Final = 60.0
NO_TESTS_STATUS: Final = 5
NO_TESTS: Final = "no test was found"


class Stage(NamedTuple):
    """How the tests of a stage run: those of its folders, and those that are marked by its name, elsewhere.

    `before` are make's targets that have to pass first.
    """

    name: str
    folders: tuple[str, ...]
    workers: int = 0
    before: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


def folders(stage: str) -> tuple[str, ...]:
    """Return the folders whose tests belong to a stage, but for those with a mark of another one."""
    return tuple(folder for folder, name in FOLDERS.items() if name == stage)


STAGES: Final = {
    stage.name: stage
    for stage in (
        Stage("gate", ("tests/unit/", *folders("gate")), workers=2, before=("lint", "compiled")),
        Stage("system", folders("system"), workers=3, options=("--maxfail=25",)),
        Stage("quiet", folders("quiet"), before=("clients",)),
        Stage("vllm", folders("vllm"), before=("vllm", "clients")),
        Stage("kind", folders("quiet"), before=("docker",), options=("-s",)),
        Stage("release", folders("vllm"), before=("vllm", "clients")),
    )
}


def run_stage(name: str, tried: int, files: Sequence[str] = ()) -> tuple[StageResult, tuple[Failure, ...]]:
    """Run a stage, or only some files of it. Return its result, and the tests that passed only at the second try.

    `tried` is how many tests of this run were tried again before.
    """
    stage = STAGES[name]
    result = run_pytest(stage, files or paths_of(stage), workers=stage.workers, options=stage.options)
    if result.is_green:
        return result, ()
    plan = plan_second_tries(result, read_counts(), tried)
    flaky: tuple[Failure, ...] = ()
    for file in plan.files:
        print(f"\n{file} waited in vain for something: it is tried once again, alone", flush=True)
        wait_until_quiet()
        result, forgiven = forgive(result, file, run_pytest(stage, [file], options=stage.options))
        flaky += forgiven
    for line in plan.red:
        print(f"No second try: {line}", flush=True)
    return result, tuple(distinct(flaky))


def paths_of(stage: Stage) -> list[str]:
    """Return what pytest has to read for a stage: its folders, and the files elsewhere that name its mark."""
    files = (file for file in sorted((ROOT / "tests").rglob("test_*.py")) if f"mark.{stage.name}" in file.read_text())
    marked = (str(file.relative_to(ROOT)) for file in files)
    return [*stage.folders, *(file for file in marked if not file.startswith(stage.folders))]


def make(targets: Sequence[str]) -> str:
    """Make targets; return why that failed, or an empty text."""
    command = ["make", "--no-print-directory", "--jobs", "2", "--output-sync", *targets]
    done = subprocess.run(command, cwd=ROOT, check=False)
    return f"`make {' '.join(targets)}` ended with {done.returncode}" if done.returncode else ""


def run_pytest(stage: Stage, paths: Sequence[str], *, workers: int = 0, options: Sequence[str] = ()) -> StageResult:
    """Run the tests of a stage below `paths`; our own Ctrl-C is theirs, too."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    junit = RESULTS / f"{stage.name}.xml"
    junit.unlink(missing_ok=True)
    command = [*ends_with_us(), sys.executable, "-m", "pytest", "--stage", stage.name, f"--junitxml={junit}", *options]
    if workers:
        command += ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"]
    began = time.monotonic()
    process = subprocess.Popen([*command, *paths], cwd=ROOT, start_new_session=True)
    try:
        status = process.wait()
    except BaseException:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        raise
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return read_junit(stage.name, junit, status, time.monotonic() - began)


def read_junit(stage: str, junit: Path, status: int, seconds: float) -> StageResult:
    """Return what pytest's report holds. A report that does not fit pytest's exit status makes the stage red."""
    try:
        suites = list(ElementTree.parse(junit).getroot().iter("testsuite"))  # noqa: S314  # pytest wrote it just now
    except (OSError, ElementTree.ParseError) as error:
        return StageResult(stage, seconds, broken=f"pytest ended with {status} and left no report ({error})")
    passed = skipped = 0
    failures: list[Failure] = []
    for case in (case for suite in suites for case in suite.iter("testcase")):
        notes = [json.loads(each.get("value", "")) for each in case.iter("property") if each.get("name") == "failure"]
        bad = [each for each in case if each.tag in ("failure", "error")]
        failures += [Failure(each["test"], each["late"], each["reason"], each["when"] == "setup") for each in notes]
        if bad and not notes:
            name = f"{case.get('classname')}::{case.get('name')}"
            failures.append(Failure(name, False, (bad[0].get("message") or "it failed").splitlines()[0]))
        skipped += case.find("skipped") is not None
        passed += not bad and case.find("skipped") is None
    broken = ""
    if status not in (0, 1) or (status == 1) != bool(failures):
        broken = f"pytest ended with {status}, and its report names {len(failures)} failures"
    if status == NO_TESTS_STATUS:
        broken = NO_TESTS
    return StageResult(stage, seconds, passed, skipped, tuple(failures), broken)


def read_counts() -> dict[str, int]:
    """Return how often each test is listed in tests/flaky.toml."""
    return {each["id"]: each["count"] for each in tomllib.loads(FLAKY.read_text()).get("test", [])}


def wait_until_quiet() -> None:
    """Wait until nothing else wants the CPU, two minutes at most."""
    deadline = time.monotonic() + QUIET_WITHIN_SECONDS
    while (busy := pressure_percent()) >= QUIET_PERCENT and time.monotonic() < deadline:
        print(f"waiting for a quiet machine ({busy:.0f} % of the time something waits for the CPU)", flush=True)
        time.sleep(10)


def pressure_percent() -> float:
    """Return in how much of the last ten seconds something waited for the CPU; 0 where the kernel does not count."""
    try:
        return float(PRESSURE.read_text().split("avg10=")[1].split()[0])
    except (OSError, IndexError):
        return 0.0
