"""How caches cross a constrained link: goodput, CPU, memory, and what a prefill's end still waits for.

    prfaas bench transfer [goodput secure far tail memory] [--plots DIR] [-o json]

Source and destination are processes in network namespaces with a link between them (see link.py); iperf3 crosses the
same link in the same minute, and what counts is the ratio. Needs root's rights over namespaces, which
`unshare --user --map-root-user --net` gives too. Without iperf3 plain sockets stand for it, and without a C compiler
there is no `far` (Debian: apt-get install iperf3 gcc libc6-dev).
"""

import argparse
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.report import Figure, run
from benchmarks.transfer import measures

MEASURES: dict[str, Callable[[], Iterator[Figure]]] = {
    "goodput": partial(measures.goodput, measures.GOODPUT),
    "secure": measures.secure,
    "far": partial(measures.goodput, measures.FAR),
    "tail": measures.tail,
    "memory": measures.memory,
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Example: prfaas bench transfer goodput tail -o json"
    parser.add_argument("measures", nargs="*", metavar="MEASURE", help=f"of {', '.join(MEASURES)}; all without it")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="also write ratios.png here, from the checkout")


def figures(given: argparse.Namespace) -> list[Figure]:
    """Measure what is asked for."""
    unknown = set(given.measures) - set(MEASURES)
    if unknown:
        raise SystemExit(f"prfaas bench transfer measures {', '.join(MEASURES)}, not {', '.join(sorted(unknown))}")
    if shutil.which("iperf3") is None:
        measures.say("plain sockets stand for iperf3, which is not installed: apt-get install iperf3")
    started, found = time.monotonic(), []
    for name in given.measures or MEASURES:
        found += MEASURES[name]()
    if given.plots is not None:
        from benchmarks.transfer.plots import plot_ratios

        plot_ratios(given.plots, found)
    measures.say(f"{time.monotonic() - started:.0f} s in all")
    return found


if __name__ == "__main__":
    run("transfer", __doc__, figures, add_flags)
