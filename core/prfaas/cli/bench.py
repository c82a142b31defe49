"""`prfaas bench NAME`: runs a benchmark, which is a module in a checkout's benchmarks/."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from prfaas.console import TableOrJson
from prfaas.errors import ConfigError

SHARED = {"report"}  # modules that benchmarks share


def bench(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(help="Name of the benchmark; without it, all names are listed.", show_default=False)
    ] = None,
    output: TableOrJson = "table",
) -> None:
    """Measure a part against its rival in the same run. Example: prfaas bench gateway -o json.

    Further flags go to the benchmark. Example: prfaas bench worker --plots plots.
    """
    root = _checkout()
    names = sorted(
        {path.stem for path in (root / "benchmarks").glob("*.py")}.union(
            path.parent.name for path in (root / "benchmarks").glob("*/__main__.py")
        )
        - SHARED
    )
    if name is None:
        typer.echo("\n".join(names))
        return
    if name not in names:
        raise ConfigError(f"no benchmark is called {name!r}; there are: {', '.join(names)}")
    command = [sys.executable, "-m", f"benchmarks.{name}", "-o", output, *context.args]
    raise typer.Exit(subprocess.run(command, cwd=root, check=False).returncode)


def _checkout() -> Path:
    """Return the nearest folder, from here upward, that holds benchmarks/."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "benchmarks" / "report.py").is_file():
            return folder
    raise ConfigError(f"benchmarks run from a checkout of the repository; there is none at {here} or above")
