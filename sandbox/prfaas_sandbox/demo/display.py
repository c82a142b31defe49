"""Displays the demo: a live table on a terminal, plain lines elsewhere."""

import contextlib
from collections.abc import Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from prfaas_sandbox.demo.records import DemoResults, RequestRecord, ThresholdSample

BARS = "▁▂▃▄▅▆▇█"
SHOWN_REQUESTS = 14


def human_bytes(count: int) -> str:
    if count == 0:
        return "-"
    return f"{count / 1e6:.2f} MB" if count >= 1e5 else f"{count / 1e3:.1f} KB"


def sparkline(values: list[int], width: int = 40) -> str:
    """Return the last `width` values as bars between their own extremes."""
    values = values[-width:]
    if not values:
        return ""
    low, high = min(values), max(values)
    return "".join(BARS[(value - low) * (len(BARS) - 1) // max(high - low, 1)] for value in values)


def request_table(records: list[RequestRecord]) -> Table:
    table = Table(expand=False, pad_edge=False, box=None, header_style="bold")
    for name in ("request", "act"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens", "cached", "threshold"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("prefilled in", no_wrap=True)
    for name in ("cache moved", "TTFT", "out"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    for record in records:
        where = Text(record.prefilled_in, style="cyan" if record.prefilled_in != "hub" else "")
        style = {"ok": "green", "fallback": "yellow"}.get(record.outcome, "red")
        table.add_row(
            record.id,
            record.act,
            f"{record.tokens:,}",
            f"{record.cached_tokens:,}",
            f"{record.threshold_tokens:,}",
            where,
            human_bytes(record.kv_bytes),
            f"{record.ttft_seconds:.2f} s",
            str(record.output_tokens),
            Text(record.outcome[:60], style=style),
        )
    return table


class DemoDisplay:
    """Shows the results as they grow; it only reads them. On a terminal it is a live table."""

    def __init__(self, results: DemoResults, console: Console):
        self.console = console
        self.results = results
        self._live: Live | None = None

    def line(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def step(self, text: str) -> None:
        self.console.print(f"\n[bold]{text}[/bold]", highlight=False)
        self._refresh()

    def request(self, record: RequestRecord) -> None:
        if self._live is None:
            self.console.print(
                f"  {record.id}  {record.tokens:>6} tokens  prefilled in {record.prefilled_in:<10} "
                f"cache {human_bytes(record.kv_bytes):>9}  TTFT {record.ttft_seconds:6.2f} s  {record.outcome}",
                highlight=False,
            )
        self._refresh()

    def sample(self, sample: ThresholdSample) -> None:
        if self._live is None and len(self.results.threshold) % 5 == 0:
            percent = "" if sample.utilisation_percent is None else f", link at {sample.utilisation_percent:.0f}%"
            self.console.print(f"  threshold {sample.tokens} tokens{percent}", highlight=False)
        self._refresh()

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        """Keep the table on the screen while the block runs; leave the whole table on a terminal."""
        if not self.console.is_terminal:
            yield
            return
        with Live(self._picture(), console=self.console, refresh_per_second=4, transient=True) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None
        self.console.print(request_table(self.results.requests))

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._picture())

    def _picture(self) -> Group:
        results = self.results
        status = "waiting for the first sample"
        if results.threshold:
            last = results.threshold[-1]
            percent = "?" if last.utilisation_percent is None else f"{last.utilisation_percent:.0f}%"
            status = f"threshold {last.tokens:,} tokens   link {last.link_mbps} Mbit/s at {percent}   "
            status += sparkline([sample.tokens for sample in results.threshold])
        return Group(request_table(results.requests[-SHOWN_REQUESTS:]), Text(status, style="bold blue"))


def summary(results: DemoResults) -> list[str]:
    """Return the closing lines in console markup: the figures, and the problems if there are any."""
    offloaded = [record for record in results.requests if record.decision == "offload"]
    moved = human_bytes(results.crossed_bytes)
    lines = [
        f"\n[bold]Summary[/bold]  {len(results.requests)} requests, {len(offloaded)} offloaded, "
        f"{moved} of cache crossed the link, {results.total_seconds:.0f} s",
        f"  threshold   {results.threshold_before_narrowing:,} before, {results.threshold_narrow_peak:,} on the narrow "
        f"link, {results.threshold_after_widening:,} after widening",
    ]
    longest = max(offloaded, key=lambda record: (record.outcome == "ok", record.tokens), default=None)
    if longest is not None and longest.prefill_seconds:
        lines.append(
            f"  pipelining  the cache of {longest.tokens:,} tokens began to cross after "
            f"{longest.first_byte_seconds:.3f} s of its {longest.prefill_seconds:.2f} s prefill"
        )
        lines.append(f"  text        which went on: {escape(repr(longest.text))}")
    if (drill := results.failure_drill) is not None:
        arrived = drill.transfer.payload_bytes if drill.transfer else 0
        lines.append(
            f"  failure     killed after {human_bytes(arrived)} of cache; the request completed "
            f"({drill.request.outcome}), the worker was back after {drill.recovered_seconds:.1f} s"
        )
    if (stream := results.stream_drill) is not None:
        same = (
            "the text of the undisturbed one"
            if stream.request.text == stream.undisturbed.text
            else "another text after a near-tie"
        )
        lines.append(
            f"  stream      killed after {stream.events_before_kill} of {stream.request.output_tokens} tokens; it "
            f"went on elsewhere, with {same}"
        )
    return lines + [f"  [red]problem[/red]     {problem}" for problem in results.problems]
