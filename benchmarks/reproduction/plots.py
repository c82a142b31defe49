"""Draws the page's pictures as SVG. Text stays text, and equal figures give equal bytes."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from benchmarks.reproduction import published
from benchmarks.reproduction.rows import Section
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

KINDS = ("published", "model", "simulated")
PANELS = (("Λ_max, 1/s", "requests/s"), ("mean TTFT, s", "s"), ("P90 TTFT, s", "s"))


def plot_all(directory: Path, table_6: Section) -> None:
    """Write table-6.svg and phi.svg."""
    directory.mkdir(parents=True, exist_ok=True)
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "reproduction"})
    _bars(directory / "table-6.svg", table_6)
    _phi(directory / "phi.svg")


def _bars(path: Path, section: Section) -> None:
    figure, axes = plt.subplots(1, len(PANELS), figsize=(11, 3.2))
    for axis, (key, unit) in zip(axes, PANELS, strict=True):
        rows = [row for row in section.rows if row.name.endswith(key)]
        for place, kind in enumerate(KINDS):
            values = [getattr(row, kind) or 0.0 for row in rows]
            axis.bar([i + 0.27 * (place - 1) for i in range(len(rows))], values, width=0.25, label=kind)
        axis.set_xticks(range(len(rows)), [row.name.split(":")[0] for row in rows])
        axis.set_title(key.split(",")[0])
        axis.set_ylabel(unit)
    axes[0].legend(fontsize="small")
    _save(figure, path)


def _phi(path: Path) -> None:
    figure, axis = plt.subplots(figsize=(7, 3.6))
    curves: dict[str, Sequence[float]] = {**published.PHI_GBPS}
    curves["internal 1T hybrid"] = [gbps for _, _, gbps in published.TABLE_5.values()]
    for name, values in curves.items():
        axis.plot(published.LENGTHS, values, marker="o", markersize=3, label=name)
    _logarithmic(axis)
    axis.legend(fontsize="x-small")
    _save(figure, path)


def _logarithmic(axis: Axes) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(published.LENGTHS, [f"{tokens // 1024}K" for tokens in published.LENGTHS])
    axis.set_xlabel("prompt tokens")
    axis.set_ylabel("Gbit/s of cache, an instance")


def _save(figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(str(path), metadata={"Date": None})
    plt.close(figure)
