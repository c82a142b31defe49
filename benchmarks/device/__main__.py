"""All that needs an accelerator, within ten minutes: our worker's model, copies to shared memory, vLLM's blocks.

    benchmarks/device/run.sh [FOLDER]
    prfaas bench device [--device cpu] [--rows FILE] [-o json]

Parity is held to the same model in fp32 on the CPU. Copies are the connector's own, into memory as its mover has it,
alone and beside matrix products. Blocks are read and written in every form that vLLM gives its caches. Without an
accelerator `--device cpu` runs all of it in small, which proves the program and measures nothing.

Exit status 1: a value is wrong, or a figure is missing that has to be there.
"""

import platform
import time
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
import typer
from benchmarks.device.cases import PARTS, run_part
from benchmarks.device.rows import markdown
from benchmarks.report import Report, append, make_report, say, show

from prfaas.console import TableOrJson, new_app, run_app
from prfaas.errors import ConfigError
from prfaas.util import Deadline

RUN_SECONDS = 540.0


class DeviceReport(Report, frozen=True, kw_only=True):
    """Figures of a device, what was left out, and why the run has failed, if it has."""

    device: str
    left_out: list[str]
    failures: list[str]


def measure(device: str, seconds: float) -> DeviceReport:
    """Run all parts."""
    deadline, name = Deadline(seconds), describe(device)  # after a part has failed there might be no name
    outcomes = [one for part in PARTS for one in run_part(part, device, deadline)]
    report = make_report("device", [figure for one in outcomes for figure in one.figures])
    return DeviceReport(
        **msgspec.structs.asdict(report),
        device=name,
        left_out=[f"{one.case.name}: {one.reason}" for one in outcomes if one.reason],
        failures=[failure for one in outcomes for failure in one.failures],
    )


def describe(device: str) -> str:
    """Return the device and torch's version."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPUs ({platform.machine()})"
    return f"{name}, torch {torch.__version__}"


def command(
    output: TableOrJson = "table",
    device: Literal["cuda", "cpu"] = "cuda",
    seconds: Annotated[float, typer.Option(help="When to stop; what is left out then is named.")] = RUN_SECONDS,
    rows: Annotated[Path | None, typer.Option(help="Also write rows for docs/understand/benchmarks.md here.")] = None,
    record: Annotated[bool, typer.Option("--record", help="Also append the figures to benchmarks/log/.")] = False,
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("torch finds no GPU: give --device cpu for a small trial, which measures nothing")
    began = time.monotonic()
    report = measure(device, seconds)
    show(report, output)
    text = markdown(report.device, report.commit, report.figures, report.left_out)
    if rows is not None:
        rows.write_text(text, encoding="utf-8")
    elif output == "table":
        typer.echo(text)
    if record:
        append(report)
    for failure in report.failures:
        say(f"FAILED {failure}")
    say(f"{len(report.figures)} figures in {time.monotonic() - began:.0f} s, {len(report.left_out)} cases left out")
    raise typer.Exit(1 if report.failures else 0)


if __name__ == "__main__":
    app = new_app(add_completion=False)
    app.command(help=(__doc__ or "").partition("\n")[0])(command)
    run_app(app, "prfaas bench device")
