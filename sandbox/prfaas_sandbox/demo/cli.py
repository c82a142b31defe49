"""`prfaas demo`: flags, Ctrl-C and the exit code."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from prfaas.console import new_app
from prfaas.errors import ConfigError
from prfaas_sandbox.demo.records import DemoResults, EngineType
from prfaas_sandbox.progress import progress
from prfaas_sandbox.vllm import ensure_vllm

app = new_app()


@app.command()
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave everything running afterwards, until Ctrl-C.")] = False,
    state: Annotated[
        Path, typer.Option("--state", help="Folder for logs, kubeconfigs and demo.json.", file_okay=False)
    ] = Path(".prfaas"),
    engine: Annotated[
        EngineType, typer.Option("--engine", help="Run our own workers, or a real vLLM without a GPU (6 GB of disk).")
    ] = "prfaas",
) -> None:
    """Run the whole system on this machine and show it at work. Example: prfaas demo --keep."""
    # The OpenAI client and what else a demo needs would cost every other `prfaas` command a second.
    from prfaas_sandbox.demo.display import DemoDisplay
    from prfaas_sandbox.demo.install import ON_VLLM, OUR_WORKERS
    from prfaas_sandbox.demo.steps import run

    console = Console(soft_wrap=not sys.stdout.isatty())  # a log keeps its lines whole
    results = DemoResults()
    try:
        state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--state {state} cannot be made: {error.strerror}; choose another folder") from error
    if engine == "vllm":
        with progress() as report:
            ensure_vllm(report)  # before asyncio takes the signals over, so that Ctrl-C also ends an installation
    file = ON_VLLM if engine == "vllm" else OUR_WORKERS
    try:
        asyncio.run(run(DemoDisplay(results, console), state=state, keep=keep, file=file))
    except KeyboardInterrupt:
        console.print("\nInterrupted. The demo stopped everything that it started.")
        raise typer.Exit(0 if keep and results.total_seconds else 130) from None
    if results.problems:
        console.print(f"The demo failed. Logs: {state}/sandbox", highlight=False)
        raise typer.Exit(1)
