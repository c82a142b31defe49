"""The ratios as a picture, each beside what it should reach."""

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from benchmarks.report import Figure
from matplotlib import pyplot as plt


def plot_ratios(directory: Path, figures: list[Figure]) -> None:
    """Write ratios.png: green where a ratio reaches what it should, which is the black line."""
    ratios = [one for one in reversed(figures) if one.unit == "ratio" and one.reach]
    drawn, axes = plt.subplots(figsize=(9, 1 + 0.4 * len(ratios)))
    for place, one in enumerate(ratios):
        assert one.reach is not None
        is_reached = one.value >= one.reach if one.better == "higher" else one.value <= one.reach
        axes.barh(place, one.value, color="tab:green" if is_reached else "tab:red")
        axes.plot([one.reach, one.reach], [place - 0.4, place + 0.4], color="black", linewidth=2)
    axes.set_yticks(range(len(ratios)), [one.name for one in ratios])
    axes.grid(axis="x", alpha=0.3)
    drawn.tight_layout()
    directory.mkdir(parents=True, exist_ok=True)
    drawn.savefig(directory / "ratios.png", dpi=120)
    plt.close(drawn)
