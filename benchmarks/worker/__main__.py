"""What a worker does: prefill and decode throughput, the cache's size and reuse, and decoding beside other work.

    prfaas bench worker [--plots DIR] [-o json]

Real worker processes with the model that ships along, one torch thread each, driven over HTTP and the data port. What
must not disturb a decode step is measured against the step alone in the same run: trust those ratios on any machine.
"""

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from benchmarks.report import Figure, run
from benchmarks.worker import beside, measures, wide
from benchmarks.worker.process import running

REUSE_REACH = 0.15
HTTP_REACH = 1.1
TRANSFER_REACH = 1.1


def figures(
    plots: Annotated[Path | None, typer.Option(help="Also write PNG files here, from the checkout.")] = None,
) -> list[Figure]:
    """Measure everything."""
    with running() as worker:  # with steps as long as it serves
        prefill = list(measures.prefill_rates(worker))
        decode = list(measures.decode_rates(worker))
        reuse = measures.prefix_reuse(worker)
        http = beside.http_load(worker)
        with running("--profile-seconds", "0") as other:
            sizes = list(measures.cache_sizes(worker, other))
    with tempfile.TemporaryDirectory() as directory:
        model = wide.write(Path(directory))
        with running("--profile-seconds", "0", "--model-source", directory) as worker:
            transfer = beside.transfer(worker, model)
    found = [Figure(name=f"prefill, {n:,} tokens", value=x, unit="tokens/s", better="higher") for n, x in prefill]
    found += [Figure(name=f"decode, {n} streams", value=x, unit="tokens/s", better="higher") for n, x in decode]
    found += [Figure(name=f"cache of {n:,} tokens", value=x, unit="bytes") for n, x in sizes]
    found += _reused(reuse) + _disturbed("HTTP load", "requests/s", http, HTTP_REACH)
    found += _disturbed("a transfer", "Mbit/s", transfer, TRANSFER_REACH)
    if plots is not None:
        from benchmarks.worker.plots import plot_all

        ratios = {one.name: (one.value, one.reach) for one in found if one.unit == "ratio" and one.reach}
        plot_all(plots, prefill, decode, sizes, ratios)
    return found


def _reused(reuse: measures.Reuse) -> list[Figure]:
    found = []
    for name, seconds in {
        "a prompt that continues": reuse.continued,
        "the third behind one prefix": reuse.branched,
    }.items():
        rival = {"rival": f"a new prompt of {measures.PREFIX_TOKENS:,} tokens", "rival_value": reuse.first}
        found.append(Figure(name=f"first token of {name}", value=seconds, unit="s", **rival))
        ratio = seconds / reuse.first
        found.append(Figure(name=f"first token of {name}, of a new one", value=ratio, unit="ratio", reach=REUSE_REACH))
    return found


def _disturbed(what: str, unit: str, measured: beside.Beside, reach: float) -> list[Figure]:
    return [
        Figure(name=what, value=measured.load, unit=unit, better="higher"),
        Figure(
            name=f"decode step beside {what}",
            value=measured.median_beside * 1e3,
            unit="ms",
            rival="the step alone",
            rival_value=measured.median_alone * 1e3,
        ),
        Figure(name=f"decode step beside {what}, of alone", value=measured.ratio, unit="ratio", reach=reach),
        Figure(name=f"the same without waits for a core, {what}", value=measured.net_ratio, unit="ratio"),
        Figure(name=f"the engine's CPU for it beside {what}, of alone", value=measured.cpu_ratio, unit="ratio"),
    ]


if __name__ == "__main__":
    run("worker", __doc__, figures)
