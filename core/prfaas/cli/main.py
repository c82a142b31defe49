"""The `prfaas` command: what core offers itself, and the subcommands that installed parts register.

A deployable adds a typer app under the entry point group `prfaas.commands`. A part whose extra is not installed is
listed with the command that installs it, instead of vanishing or ending in a traceback.
"""

from importlib.metadata import EntryPoint, entry_points, version
from typing import Any, Final

import typer

from prfaas.cli import certs, crds
from prfaas.cli.bench import bench
from prfaas.cli.compare import compare
from prfaas.cli.plan import plan
from prfaas.cli.serve.command import serve
from prfaas.cli.simulate import simulate
from prfaas.console import EXTRAS, VersionOption, new_app, run_app
from prfaas.errors import install_extra

ENTRY_POINT_GROUP: Final = "prfaas.commands"
SANDBOX_COMMANDS: Final = {"demo": "make demo", "kind": "make kind", "sandbox": "make setup"}
"""Commands of the distribution prfaas-sandbox, which only a clone of the repository has."""
PASSED_ON: Final[dict[str, Any]] = {"ignore_unknown_options": True, "allow_extra_args": True}

app = new_app(help="Serve hybrid-attention models across two clusters. Example: prfaas demo", no_args_is_help=True)


@app.callback()
def prfaas(version: VersionOption = False) -> None:  # its callback shows it
    """Serve hybrid-attention models across two clusters. Example: prfaas demo."""


@app.command("version")
def show_version() -> None:
    """Print the version. Example: prfaas version."""
    typer.echo(version("prfaas"))


def _add(point: EntryPoint) -> None:
    """Add what an entry point names: an app of many commands as a group, one of a single command as that command."""
    try:
        part: typer.Typer = point.load()
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(point.module.partition(".")[0], "dev")
        _add_stand_in(point.name, f"{error.name} is missing; {install_extra(extra)}")
        return
    only = part.registered_commands[0] if len(part.registered_commands) == 1 else None
    if only and only.callback and not part.registered_callback:
        app.command(point.name)(only.callback)
    else:
        app.add_typer(part, name=point.name)


def _add_stand_in(name: str, problem: str) -> None:
    """Add, for a subcommand that is not installed, one that says so whatever its arguments are."""

    def explain() -> None:
        typer.echo(f"prfaas {name}: {problem}", err=True)
        raise typer.Exit(2)

    settings: dict[str, Any] = {**PASSED_ON, "help_option_names": []}
    app.command(name, help=f"({problem})", context_settings=settings)(explain)


def build() -> typer.Typer:
    """Return the whole command with every registered subcommand mounted."""
    app.command("bench", context_settings=PASSED_ON)(bench)
    app.command("plan")(plan)
    app.command("simulate")(simulate)
    app.command("compare")(compare)
    app.command("serve")(serve)
    app.add_typer(crds.app, name="crds")
    app.add_typer(certs.app, name="certs")
    points = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    for name in sorted(points.keys() | SANDBOX_COMMANDS):
        if name in points:
            _add(points[name])
        else:
            _add_stand_in(name, f"not installed: clone the repository and run `{SANDBOX_COMMANDS[name]}` there")
    return app


def main() -> None:
    """Run the command; our own errors end in one sentence and exit code 1, Ctrl-C in 130."""
    run_app(build(), "prfaas")


if __name__ == "__main__":
    main()
