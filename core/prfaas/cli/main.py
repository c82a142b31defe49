"""The `prfaas` command: what core offers itself, and the subcommands that installed parts register.

A deployable adds a typer app under the entry point group `prfaas.commands`. A part whose extra is not installed is
listed with the command that installs it, instead of vanishing or ending in a traceback.
"""

import sys
from importlib.metadata import EntryPoint, entry_points, version
from typing import Any

import typer

from prfaas.cli import certs, crds
from prfaas.cli.bench import bench
from prfaas.cli.compare import compare
from prfaas.cli.plan import plan
from prfaas.cli.serve.command import serve
from prfaas.cli.simulate import simulate
from prfaas.errors import PrfaasError

ENTRY_POINT_GROUP = "prfaas.commands"
EXTRA_OF_PACKAGE = {"prfaas_operator": "operator", "prfaas_worker": "worker"}
# Commands of the distribution prfaas-sandbox, which only a clone of the repository has.
SANDBOX_COMMANDS = {"demo": "make demo", "kind": "make kind", "sandbox": "make setup"}

app = typer.Typer(
    help="Serve hybrid-attention models across two clusters. Example: prfaas demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command("version")
def show_version() -> None:
    """Print the version. Example: prfaas version."""
    typer.echo(version("prfaas"))


def _add_stand_in(name: str, reason: str, advice: str) -> None:
    """Add, for a subcommand that is not installed, one that says so whatever its arguments are."""

    def explain() -> None:
        typer.echo(f"prfaas {name}: {reason}: {advice}", err=True)
        raise typer.Exit(2)

    anything: dict[str, Any] = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    app.command(name, help=f"(needs: {advice})", context_settings=anything)(explain)


def build() -> typer.Typer:
    """Return the whole command with every registered subcommand mounted."""
    app.command("bench", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(bench)
    app.command("plan")(plan)
    app.command("simulate")(simulate)
    app.command("compare")(compare)
    app.command("serve")(serve)
    app.add_typer(crds.app, name="crds")
    app.add_typer(certs.app, name="certs")
    points = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    for name in sorted(points.keys() | SANDBOX_COMMANDS):
        if name not in points:
            _add_stand_in(name, "not installed", f"clone the repository and run `{SANDBOX_COMMANDS[name]}` there")
            continue
        try:
            app.add_typer(points[name].load(), name=name)
        except ImportError as error:
            _add_stand_in(name, f"{error.name} is missing", _install_advice(points[name]))
    return app


def _install_advice(point: EntryPoint) -> str:
    extra = EXTRA_OF_PACKAGE.get(point.module.split(".")[0], "dev")
    return f"run `pip install 'prfaas[{extra}]'`"


def main() -> None:
    """Run the command; our own errors end in one sentence and exit code 1, Ctrl-C in 130."""
    try:
        build()()
    except PrfaasError as error:
        typer.echo(f"prfaas: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
