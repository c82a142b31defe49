"""`prfaas profile`: what is known of instances. Lists and shows the built-in profiles; `measure` has its own file.

A built-in profile goes into a plan's file or a pool's spec by its name, `{builtin: NAME}`. `show -o yaml` prints its
figures as a section of a plan's file, for those who know some of them better.
"""

from typing import Annotated, Any, Literal

import typer
import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from prfaas.capacity.builtin import Builtin, all_builtins, read_builtin
from prfaas.capacity.profile import cache_bytes, prefill_seconds
from prfaas.cli.profile_measure import measure
from prfaas.console import TableOrJson, echo_json, new_app

WIDTH = 120
LENGTHS = {"8K": 8_192, "32K": 32_768, "128K": 131_072}

app = new_app(help="What is known of models on hardware. Example: prfaas profile list", no_args_is_help=True)
app.command("measure")(measure)


@app.command("list")
def list_profiles(output: TableOrJson = "table") -> None:
    """List the built-in profiles. Example: prfaas profile list."""
    profiles = all_builtins()
    if output == "json":
        echo_json(profiles)
        return
    table = _table(
        "name", "model", "precision", "hardware", *(f"{length}, s" for length in LENGTHS), "32K, GB", "basis"
    )
    for one in profiles:
        curve = one.profile()
        seconds = (f"{prefill_seconds(curve, tokens):.3g}" for tokens in LENGTHS.values())
        cache = f"{cache_bytes(curve, LENGTHS['32K']) / 1e9:.2f}"
        table.add_row(one.name, one.model, one.precision, _hardware(one), *seconds, cache, one.basis)
    console = Console(width=WIDTH, highlight=False, markup=False, emoji=False)
    console.print(table)
    console.print(
        "Seconds of a prefill by its length, and the size of its cache. `prfaas profile show NAME` has the rest."
    )


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A name that `prfaas profile list` shows.")],
    output: Annotated[
        Literal["text", "yaml", "json"],
        typer.Option("--output", "-o", help="How it is printed; yaml is a section of a plan's file."),
    ] = "text",
) -> None:
    """Show the figures of a built-in profile and their source. Example: prfaas profile show qwen3.5-35b-bf16-2xl40s."""
    builtin = read_builtin("NAME", name)
    if output == "json":
        echo_json(builtin)
    elif output == "yaml":
        typer.echo(yaml.safe_dump({"profiles": {name: _section(builtin)}}, sort_keys=False), nl=False)
    else:
        _show(builtin)


def _show(one: Builtin) -> None:
    console = Console(width=WIDTH, highlight=False, markup=False, emoji=False)
    memory = one.memory
    for title, text in (
        ("model", f"{one.model}, {one.precision}, on {_hardware(one)}, {one.parallelism}"),
        ("source", f"{one.source}"),
        ("weights", f"{memory.weights_bytes / 1e9:,.1f} of {memory.total_bytes / 1e9:,.0f} GB"),
        ("cache", f"{one.state_bytes:,} bytes, and {one.token_bytes:,} for each token"),
        ("note", one.note),
    ):
        if text:
            console.print(f"{title:8}{text}")
    curve = one.profile()
    prefills = _table("tokens", "prefill, s", "by the curve, s", "off by", "")
    for point in sorted((*one.points, *one.checks), key=lambda point: point.tokens):
        ours = prefill_seconds(curve, point.tokens)
        fitted = "not fitted to" if point in one.checks else ""
        prefills.add_row(
            f"{point.tokens:,}", f"{point.seconds:.4g}", f"{ours:.4g}", f"{ours / point.seconds - 1:+.1%}", fitted
        )
    console.print(prefills)
    if one.decode_steps:
        steps = _table("batch", "decode step, ms")
        for step in one.decode_steps:
            steps.add_row(str(step.batch), f"{step.seconds * 1000:.4g}")
        console.print(steps)
        console.print(f"Decode steps read {one.context_tokens:,} tokens a request.")


def _section(one: Builtin) -> dict[str, Any]:
    """Return a profile as a section of a plan's file."""
    points = [{"tokens": point.tokens, "seconds": point.seconds} for point in one.points]
    hardware = {"gpu": one.device, "gpus": one.devices, "weightsGb": one.weights_bytes / 1e9}
    return {"model": one.cache_model, "points": points, **hardware}


def _hardware(one: Builtin) -> str:
    return f"{one.devices} x {one.device.upper()}"


def _table(*titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for title in titles:
        is_text = title in {"", "name", "model", "precision", "hardware", "basis"}
        table.add_column(title, justify="left" if is_text else "right", no_wrap=True)
    return table
