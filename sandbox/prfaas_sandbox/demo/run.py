"""One run of the demo: sandbox up, prfaas installed, the acts played, the report written, everything stopped."""

import asyncio
import time
from pathlib import Path

import msgspec

from prfaas_sandbox.demo.client import Client
from prfaas_sandbox.demo.install import MODEL, Installation
from prfaas_sandbox.demo.records import Story, ThresholdSample, judge
from prfaas_sandbox.demo.show import Show, summary
from prfaas_sandbox.demo.story import WIDE_MBPS, Teller
from prfaas_sandbox.demo.watch import Watch
from prfaas_sandbox.sandbox import Sandbox


async def run(show: Show, story: Story, *, state: Path, keep: bool) -> None:
    """Run the demo and write `state`/demo.json; with `keep` go on until cancelled.

    Raises:
        PrfaasError: the system could not be started; what happened after that is told by the story's problems.

    """
    started = time.monotonic()

    def report(text: str) -> None:
        show.line(f"  {text}")

    show.act("Starting two clusters joined by a shaped link")
    async with Sandbox.start(state / "sandbox", link_mbps=WIDE_MBPS, report=report) as sandbox:
        story.startup_seconds["clusters"] = round(time.monotonic() - started, 1)
        installation = await Installation.create(sandbox, report=report)
        story.startup_seconds["all"] = round(time.monotonic() - started, 1)
        await _tell(installation, show, story)
        story.total_seconds = round(time.monotonic() - started, 1)
        story.problems = judge(story)
        path = state / "demo.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(story), indent=2) + b"\n")
        for text in summary(story):
            show.line(text)
        show.line(f"  report      {path}")
        if keep:
            show.line(installation.next_commands("Still running. Ctrl-C stops everything. In another terminal:"))
            await asyncio.Event().wait()
        show.line("  stopping everything")


async def _tell(installation: Installation, show: Show, story: Story) -> None:
    """Play the acts, watched."""

    def on_sample(sample: ThresholdSample) -> None:
        story.threshold.append(sample)
        show.sample(sample)

    client = Client(installation.gateway_url, MODEL)
    watch = Watch(installation.place.prometheus_url, on_sample)
    try:
        with show.live():
            async with watch.running():
                await Teller(installation, client, watch, story, show).tell()
    finally:
        await client.close()
