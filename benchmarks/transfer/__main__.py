"""How caches cross a constrained link: goodput, CPU, memory, and what a prefill's end still waits for.

    prfaas bench transfer [goodput secure movers far tail memory] [--plots DIR] [-o json]

Source and destination are processes in network namespaces with a link between them (see link.py); iperf3 crosses the
same link in the same minute, and what counts is the ratio. Needs root's rights over namespaces, which
`unshare --user --map-root-user --net` gives too. Without iperf3 plain sockets stand for it, and without a C compiler
there is no `far` (Debian: apt-get install iperf3 gcc libc6-dev).
"""

import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from benchmarks.report import Figure, run, say
from benchmarks.transfer import measures

MEASURES: dict[str, Callable[[], Iterator[Figure]]] = {
    "goodput": partial(measures.goodput, measures.GOODPUT),
    "secure": measures.secure,
    "movers": measures.movers,
    "far": partial(measures.goodput, measures.FAR),
    "tail": measures.tail,
    "memory": measures.memory,
}


def figures(
    names: Annotated[list[str] | None, typer.Argument(metavar="MEASURE", help="All without it.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Also write ratios.png here, from the checkout.")] = None,
) -> list[Figure]:
    """Measure what is asked for."""
    if unknown := set(names or ()) - set(MEASURES):
        raise typer.BadParameter(f"there is no {', '.join(sorted(unknown))}, only {', '.join(MEASURES)}")
    if shutil.which("iperf3") is None:
        say("plain sockets stand for iperf3, which is not installed: apt-get install iperf3")
    started, found = time.monotonic(), []
    for name in names or MEASURES:
        found += MEASURES[name]()
    if plots is not None:
        from benchmarks.transfer.plots import plot_ratios

        plot_ratios(plots, found)
    say(f"{time.monotonic() - started:.0f} s in all")
    return found


if __name__ == "__main__":
    run("transfer", __doc__, figures)
