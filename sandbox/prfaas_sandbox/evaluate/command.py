"""`prfaas evaluate`: flags, what is there already, Ctrl-C and the exit code."""

import asyncio
import random
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from prfaas.cli.plan import load
from prfaas.console import new_app
from prfaas.errors import ConfigError
from prfaas.evaluate.case import Case, runs_of, scenario_of
from prfaas.evaluate.record import VERSION, Run
from prfaas.simulate.scenario import POLICIES, PolicyName
from prfaas_sandbox.evaluate.objects import instances
from prfaas_sandbox.progress import progress
from prfaas_sandbox.tools import ensure_tools

app = new_app()
_PAPER: Final = Path("examples/paper.yaml")


@app.command()
def evaluate(  # noqa: PLR0913, PLR0917  # a command line has one parameter a flag
    file: Annotated[Path, typer.Option("--file", "-f", help="The case, as for prfaas plan.")] = _PAPER,
    systems: Annotated[str, typer.Option(help=f"Which to run, of {', '.join(POLICIES)}.")] = ",".join(POLICIES),
    loads: Annotated[str, typer.Option(help="Shares of what each system's plan carries.")] = "0.5,0.7,0.9,1",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each load from 0.9 on.")] = 1,
    requests: Annotated[int, typer.Option(min=20, help="Of each run.")] = 400,
    stretch: Annotated[float, typer.Option(min=1.0, help="All times are so many times as long.")] = 4.0,
    cache_scale: Annotated[int, typer.Option(min=1, help="Caches and the link are so many times as small.")] = 128,
    runs: Annotated[Path, typer.Option(help="Folder of the runs, which keeps those of earlier calls.")] = Path(
        ".prfaas/evaluation"
    ),
    state: Annotated[Path, typer.Option(help="Folder of the sandbox's logs.")] = Path(".prfaas"),
) -> None:
    """Run a case live on emulated instances. Example: prfaas evaluate --systems threshold,homogeneous --loads 0.7."""
    from prfaas_sandbox.evaluate.live import evaluate as run

    case = _case(file, requests, stretch, cache_scale)
    folder = runs / f"{case.name}-{case.digest}"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = _wanted(systems), _loads(loads)
    done = {run.key for run in read_runs(folder, case)}
    rng = random.Random(f"order of {case.digest}")  # noqa: S311 - the same order after an interruption is the purpose
    keys = runs_of(*wanted, seeds, done, rng)
    for key in keys:
        instances(scenario_of(case, key))  # what cannot be run is said before anything starts
    typer.echo(f"{len(done)} runs are in {folder}, {len(keys)} are missing")
    if not keys:
        return
    try:
        with progress() as report:
            ensure_tools(report)
            asyncio.run(run(case, keys, folder, state, report))
    except KeyboardInterrupt:
        typer.echo(f"\nInterrupted. Whole runs are kept in {folder}: the same command makes what is missing.", err=True)
        raise typer.Exit(130) from None


def read_runs(folder: Path, case: Case) -> list[Run]:
    """Return the runs of a case in a folder. Raises ConfigError for a file that is none, or of another case."""
    found: list[Run] = []
    for path in sorted(folder.glob("*.json")):
        try:
            run = msgspec.json.decode(path.read_bytes(), type=Run)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{path} is no run of an evaluation: {error}; remove it") from error
        if run.version != VERSION or run.case != case.digest:
            raise ConfigError(f"{path} is a run of another case or version; remove it")
        found.append(run)
    return found


def _case(file: Path, requests: int, stretch: float, cache_scale: int) -> Case:
    read = load(file)
    return Case(
        name=file.stem,
        file=read,
        requests=requests,
        stretch=stretch,
        cache_scale=cache_scale,
        text=file.read_text(encoding="utf-8"),
    )


def _wanted(text: str) -> list[PolicyName]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    wrong = [name for name in names if name not in POLICIES]
    if wrong or not names:
        raise ConfigError(f"--systems is {text!r}; give some of {', '.join(POLICIES)}, separated by commas")
    return [name for name in POLICIES if name in names]


def _loads(text: str) -> list[float]:
    try:
        loads = [float(word) for word in text.split(",")]
    except ValueError:
        loads = []
    if not loads or not all(0 < load <= 2 for load in loads):
        raise ConfigError(f"--loads is {text!r}; give shares above 0 and at most 2, such as 0.5,0.9")
    return sorted(set(loads))
