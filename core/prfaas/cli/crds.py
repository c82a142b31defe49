"""`prfaas crds`: writes the generated CustomResourceDefinitions into the repository, or shows where they are stale."""

import difflib
from pathlib import Path
from typing import Annotated

import typer

from prfaas.api import crd
from prfaas.console import new_app
from prfaas.errors import ConfigError

# The chart carries its own copy, because Helm packages nothing from outside a chart's folder.
DIRECTORIES = (Path("crds"), Path("charts/prfaas/files/crds"))

app = new_app(help="Generate the CustomResourceDefinitions. Example: prfaas crds write", no_args_is_help=True)

Directories = Annotated[
    list[Path] | None,
    typer.Argument(help="Directories to write or compare [default: crds and the chart's copy]", show_default=False),
]


def _existing(directories: list[Path] | None) -> list[Path]:
    chosen = directories or list(DIRECTORIES)
    for directory in chosen:
        if not directory.is_dir():
            raise ConfigError(f"{directory} is not a directory: run this in the repository root, or name a directory")
    return chosen


def stale(directory: Path) -> dict[Path, str]:
    """Return the unified diff of each file in a directory that differs from what the models say, by path."""
    wanted = {directory / name: text for name, text in crd.files().items()}
    found = {path: path.read_text() for path in directory.glob("*.yaml")}
    diffs: dict[Path, str] = {}
    for path in sorted(wanted.keys() | found.keys()):
        old, new = found.get(path, ""), wanted.get(path, "")
        if old != new:
            lines = difflib.unified_diff(old.splitlines(True), new.splitlines(True), str(path), f"{path} (models)")
            diffs[path] = "".join(lines)
    return diffs


@app.command()
def write(directories: Directories = None) -> None:
    """Write one file per kind, and remove those of kinds that are gone. Example: prfaas crds write."""
    wanted = crd.files()
    for directory in _existing(directories):
        for path in stale(directory):
            if path.name in wanted:
                path.write_text(wanted[path.name])
                typer.echo(f"wrote {path}")
            else:
                path.unlink()
                typer.echo(f"removed {path}")


@app.command()
def diff(directories: Directories = None) -> None:
    """Show where the files differ from the models; exit code 1 if they do. Example: prfaas crds diff."""
    diffs = [text for directory in _existing(directories) for text in stale(directory).values()]
    for text in diffs:
        typer.echo(text, nl=False)
    if diffs:
        typer.echo("the files are stale: run `prfaas crds write`", err=True)
        raise typer.Exit(1)
