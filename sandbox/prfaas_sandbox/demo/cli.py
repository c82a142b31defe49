"""`prfaas demo`: options, Ctrl-C, the report file and the exit code."""

import asyncio
import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from prfaas_sandbox.demo.client import Client
from prfaas_sandbox.demo.install import MODEL, Installation
from prfaas_sandbox.demo.records import Story, ThresholdSample, judge
from prfaas_sandbox.demo.show import Show, summary
from prfaas_sandbox.demo.story import WIDE_MBPS, Teller
from prfaas_sandbox.demo.watch import Watch
from prfaas_sandbox.sandbox import Sandbox

app = typer.Typer(rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave everything running afterwards, until Ctrl-C.")] = False,
    state: Annotated[Path, typer.Option("--state", help="Folder for logs, kubeconfigs and demo.json.")] = Path(
        ".prfaas"
    ),
) -> None:
    """Run the whole system on this machine and show it at work. Example: prfaas demo --keep."""
    console = Console(soft_wrap=not sys.stdout.isatty())  # a log keeps its lines whole
    story = Story()
    try:
        asyncio.run(_run(story, Show(story, console), state=state, keep=keep))
    except KeyboardInterrupt:
        console.print("\nInterrupted; everything that was started has been stopped.")
        raise typer.Exit(130) from None
    if story.problems:
        console.print(f"The demo did not show what it promises. Logs: {state}/sandbox", highlight=False)
        raise typer.Exit(1)


async def _run(story: Story, show: Show, *, state: Path, keep: bool) -> None:
    state.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    show.act("Starting two clusters joined by a shaped link")
    async with Sandbox.start(
        state / "sandbox", link_mbps=WIDE_MBPS, report=lambda text: show.line(f"  {text}")
    ) as sandbox:
        story.startup_seconds["clusters"] = round(time.monotonic() - started, 1)
        installation = await Installation.create(sandbox, report=lambda text: show.line(f"  {text}"))
        story.startup_seconds["all"] = round(time.monotonic() - started, 1)
        client = Client(installation.gateway_url, MODEL)

        def on_sample(sample: ThresholdSample) -> None:
            story.threshold.append(sample)
            show.sample(sample)

        watch = Watch(sandbox.prometheus_url, on_sample)
        with show.live():
            async with watch.running():
                await Teller(installation, client, watch, story, show).tell()
        await client.close()
        story.total_seconds = round(time.monotonic() - started, 1)
        story.problems = judge(story)
        report = state / "demo.json"
        report.write_bytes(msgspec.json.format(msgspec.json.encode(story), indent=2) + b"\n")
        for text in summary(story):
            show.line(text)
        show.line(f"  report      {report}")
        if keep:
            show.line(installation.next_commands())
            await asyncio.Event().wait()
        show.line("  stopping everything")
