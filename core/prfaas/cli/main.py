"""The `prfaas` command: core's own subcommands, and the subcommands that installed parts register.

A deployable registers a typer app under the entry point group `prfaas.commands`. A subcommand whose extra is missing
is listed with the command that installs the extra. A call imports only the subcommand that the command line names.
"""

from importlib.metadata import EntryPoint, entry_points, version
from typing import Any, Final

import typer
from typer.core import TyperGroup

from prfaas.console import EXTRAS, VersionOption, new_app, run_app
from prfaas.errors import install_extra

ENTRY_POINT_GROUP: Final = "prfaas.commands"
CORE_COMMANDS: Final = {
    "bench": "prfaas.cli.bench:bench",
    "contract": "prfaas.cli.contract.command:contract",
    "explain": "prfaas.cli.explain:explain",
    "plan": "prfaas.cli.plan:plan",
    "profile": "prfaas.cli.profile:app",
    "simulate": "prfaas.cli.simulate:simulate",
    "compare": "prfaas.cli.simulate:compare",
    "serve": "prfaas.cli.serve.command:serve",
    "crds": "prfaas.cli.crds:app",
    "verify": "prfaas.cli.verify.command:verify",
    "certs": "prfaas.cli.certs:app",
}
SANDBOX_COMMANDS: Final = {"demo": "make demo", "evaluate": "make setup", "kind": "make kind", "sandbox": "make setup"}
"""Commands of the distribution prfaas-sandbox, which only a clone of the repository has."""
PASSED_ON: Final[dict[str, Any]] = {"ignore_unknown_options": True, "allow_extra_args": True}


class _Subcommands(TyperGroup):
    """Imports a subcommand when the command line names it; help and a misspelt name import all."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = list(dict.fromkeys([*self.commands, *CORE_COMMANDS, *sorted(_registered().keys() | SANDBOX_COMMANDS)]))
        self.commands = {name: self.get_command(ctx, name) for name in names}
        return names

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            part = new_app()
            if cmd_name in CORE_COMMANDS:
                _add(part, EntryPoint(cmd_name, CORE_COMMANDS[cmd_name], ENTRY_POINT_GROUP))
            elif point := _registered().get(cmd_name):
                _add(part, point)
            elif how := SANDBOX_COMMANDS.get(cmd_name):
                _add_stand_in(part, cmd_name, f"not installed: clone the repository and run `{how}` there")
            else:
                self.list_commands(ctx)  # the error suggests a name from self.commands
                return None
            self.commands[cmd_name] = typer.main.get_group(part).commands[cmd_name]
        return self.commands[cmd_name]


def _registered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _add(app: typer.Typer, point: EntryPoint) -> None:
    """Add the object that an entry point names: an app of many commands as a group, else one command."""
    try:
        part: Any = point.load()
    except ModuleNotFoundError as error:
        if point.name in CORE_COMMANDS:
            raise
        extra = EXTRAS.get(point.module.partition(".")[0], "dev")
        _add_stand_in(app, point.name, f"{error.name} is missing; {install_extra(extra)}")
        return
    if not isinstance(part, typer.Typer):
        app.command(point.name, context_settings=PASSED_ON if point.name == "bench" else None)(part)
    elif len(part.registered_commands) == 1 and not part.registered_callback:
        app.command(point.name)(part.registered_commands[0].callback or part)
    else:
        app.add_typer(part, name=point.name)


def _add_stand_in(app: typer.Typer, name: str, problem: str) -> None:
    """Add, for a subcommand that is not installed, a command that prints the problem, whatever its arguments are."""

    def explain() -> None:
        typer.echo(f"prfaas {name}: {problem}", err=True)
        raise typer.Exit(2)

    settings: dict[str, Any] = {**PASSED_ON, "help_option_names": []}
    app.command(name, help=f"({problem})", context_settings=settings)(explain)


SUMMARY: Final = "Serve hybrid-attention models across two clusters. Example: prfaas demo"
app = new_app(cls=_Subcommands, help=SUMMARY, no_args_is_help=True)


@app.callback()
def prfaas(version: VersionOption = False) -> None:  # the option's callback shows the version
    pass


@app.command("version")
def show_version() -> None:
    """Print the version. Example: prfaas version."""
    typer.echo(version("prfaas"))


def main() -> None:
    """Run the command; our own errors end in one sentence and exit code 1, Ctrl-C in 130."""
    run_app(app, "prfaas")


if __name__ == "__main__":
    main()
