"""Parses flags from a struct, shows `--version`, and ends a command after an error with one line.

The flags of a deployable are the fields of one struct, each annotated with its typer option. So each flag is defined
once, and the code gets the struct, which may also cross a process boundary.
"""

import inspect
import ipaddress
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn, TypeVar, cast, get_origin, get_type_hints

import msgspec
import typer
from typer.exceptions import TyperException

from prfaas.errors import ConfigError, PrfaasError, install_extra
from prfaas.telemetry.logs import FORMAT_VARIABLE, LogFormat

T = TypeVar("T")

EXTRAS: Final = {
    "prfaas_operator": "operator",
    "prfaas_gateway": "gateway",
    "prfaas_scheduler": "scheduler",
    "prfaas_worker": "worker",
}
"""The extra that installs a package's imports."""

LogFormatOption = Annotated[LogFormat, typer.Option(envvar=FORMAT_VARIABLE, help="How log lines are written.")]
TableOrJson = Annotated[Literal["table", "json"], typer.Option("--output", "-o", help="How the result is printed.")]
TextOrJson = Annotated[Literal["text", "json"], typer.Option("--output", "-o", help="How the result is printed.")]
HubContext = Annotated[str | None, typer.Option(help="Kubeconfig context of the hub; the current one if not given.")]
HubKubeconfig = Annotated[Path | None, typer.Option(help="Kubeconfig file of the hub; the usual one if not given.")]
HubNamespace = Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the hub where prfaas is installed.")]


def new_app(**settings: Any) -> typer.Typer:
    """Return an app whose help is plain text and whose errors are left to `run_program`."""
    return typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None, **settings)


def read_options(options: Callable[..., T], name: str, text: str, arguments: Sequence[str] | None = None) -> T:
    """Return the struct of flags from a command line; exit with 2 after a mistake, with 0 after --help.

    Fields with a typer option are flags. `text` is the help, with an example. Without `arguments`, the process's own
    command line is read.
    """
    annotations = get_type_hints(options, include_extras=True)
    hints = {key: hint for key, hint in annotations.items() if get_origin(hint) is Annotated}
    read: list[T] = []

    def command(**flags: Any) -> None:
        del flags["version"]
        read.append(options(**flags))

    parameters = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[key])
        for key, field in inspect.signature(options).parameters.items()
        if key in hints
    ]
    parameters.append(
        inspect.Parameter("version", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=VersionOption)
    )
    vars(command)["__signature__"] = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app = new_app(add_completion=False)
    app.command(help=text)(command)
    code = _run(app, name, arguments)
    if not read:
        sys.exit(code)
    return read[0]


def echo_json(document: object) -> None:
    """Print a document as indented JSON."""
    typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def begin_logs(name: str, configure: Callable[[], object]) -> None:
    """Configure the log; exit with 2 and one line if the environment names an unknown level."""
    try:
        configure()
    except ConfigError as error:
        refuse(name, str(error))


def refuse(name: str, text: str) -> NoReturn:
    """Exit with 2 after one line on stderr."""
    _say(name, text)
    sys.exit(2)


def run_app(app: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a program of many commands; exit as `run_program` does."""
    run_program(name, lambda: _run(app, name, arguments))


def run_program(name: str, run: Callable[[], object], *, extra: str = "", config_code: int = 1) -> NoReturn:
    """Run a program and exit with the code that it returns; after an error of ours print one line.

    `extra` installs its imports; if empty, it is that of the package in which an import fails. `config_code` is the
    exit code of a ConfigError. Another error of ours is 1, a missing extra 2, Ctrl-C 130.
    """
    code: object = 1
    try:
        code = run()
    except ModuleNotFoundError as error:
        extra = extra or _extra_of(error)
        if not extra or (error.name or "").startswith("prfaas"):
            raise
        refuse(name, f"{error.name} is missing; {install_extra(extra)}")
    except (PrfaasError, BaseExceptionGroup) as error:
        for leaf in _ours(error):
            _say(name, str(leaf))
            code = config_code if isinstance(leaf, ConfigError) else code
    except KeyboardInterrupt:
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


def _run(app: typer.Typer, name: str, arguments: Sequence[str] | None) -> int:
    try:
        code = typer.main.get_command(app).main(arguments, prog_name=name, standalone_mode=False)
    except TyperException as error:
        _complain(name, error)
        return error.exit_code
    return code if isinstance(code, int) else 0


def whole_number(low: int, high: int = 1 << 31) -> Callable[[str], int]:
    """Return a parser of whole numbers within bounds; a default is taken as it is."""

    def parse(value: str | int) -> int:
        if isinstance(value, int):
            return value
        if not value.isdecimal() or not low <= int(value) <= high:
            raise typer.BadParameter(f"{value!r} is not a whole number from {low} to {high}")
        return int(value)

    return parse


def port_option(help_text: str, low: int = 1) -> Any:
    """Return the typer option of a port; with `low` 0 it may be none, or any."""
    return typer.Option(parser=whole_number(low, 65535), metavar="PORT", help=help_text)


def seconds_up_to(high: float) -> Callable[[str], float]:
    """Return a parser of seconds from 0 to `high`."""

    def parse(value: str | float) -> float:
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds <= high:
            raise typer.BadParameter(f"{value!r} is not a number of seconds from 0 to {high:g}")
        return seconds

    return parse


def ip_address(value: str) -> str:
    """Parse an IP address."""
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        raise typer.BadParameter(f"{value!r} is not an IP address; give the pod's address") from None


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("prfaas"))
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
]


def _complain(name: str, error: TyperException) -> None:
    """Print one line about a mistake on the command line, or the whole help if no argument was given."""
    text = error.format_message().replace("Value error, ", "")  # pydantic's opening
    if "\n" in text:
        typer.echo(text, err=True)
        return
    if possible := getattr(error, "possibilities", None):
        text = f"{error.message}; did you mean {' or '.join(sorted(possible))}?"
    context = getattr(error, "ctx", None)
    name = context.command_path if context else name
    _say(name, f"{text.rstrip('.')} (see {name} --help)")


def _say(name: str, text: str) -> None:
    typer.echo(f"{name}: {text}", err=True)


def _extra_of(error: ModuleNotFoundError) -> str:
    """Return the extra of our last package in the traceback of a failed import."""
    frames = traceback.walk_tb(error.__traceback__)
    packages = [str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame, _ in frames]
    return next((EXTRAS[package] for package in reversed(packages) if package in EXTRAS), "")


def _ours(error: BaseException) -> list[PrfaasError]:
    """Return the errors in a group; raise the group if it holds another error than ours."""
    if isinstance(error, PrfaasError):
        return [error]
    if not isinstance(error, BaseExceptionGroup):
        raise error
    group = cast("BaseExceptionGroup[BaseException]", error)
    return [leaf for one in group.exceptions for leaf in _ours(one)]
