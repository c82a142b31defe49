"""The figures as pictures, one PNG each."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

Points = Sequence[tuple[float, float]]


def plot_all(directory: Path, prefill: Points, decode: Points, sizes: Points, ratios: dict[str, tuple[float, float]]):
    """Write prefill.png, decode.png, cache.png and ratios.png; a ratio stands beside what it should reach."""
    directory.mkdir(parents=True, exist_ok=True)
    _curve(directory / "prefill.png", prefill, ("prompt tokens", "tokens/s", "Prefill throughput"))
    _curve(directory / "decode.png", decode, ("streams", "tokens/s", "Decode throughput"))
    _curve(directory / "cache.png", sizes, ("prompt tokens", "bytes", "Cache that crosses the link"))
    _bars(directory / "ratios.png", ratios)


def _curve(path: Path, points: Points, words: tuple[str, str, str]) -> None:
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.plot(*zip(*points, strict=True), marker="o")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(words[0])
    axes.set_ylabel(words[1])
    _save(figure, axes, path, words[2])


def _bars(path: Path, ratios: dict[str, tuple[float, float]]) -> None:
    figure, axes = plt.subplots(figsize=(8, 3))
    names = list(ratios)
    axes.barh(names, [ratio for ratio, _ in ratios.values()], color="tab:blue")
    for place, (_, reach) in enumerate(ratios.values()):
        axes.plot([reach, reach], [place - 0.4, place + 0.4], color="black", linewidth=2)
    axes.set_xlabel("ratio; the black line is what it should reach at most")
    _save(figure, axes, path, "Ratios")


def _save(figure: plt.Figure, axes: Axes, path: Path, title: str) -> None:
    axes.set_title(title)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
