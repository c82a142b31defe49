"""Pictures of runs: PNG, or one HTML file that needs nothing else. matplotlib is loaded when one is drawn."""

import html
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prfaas.errors import ConfigError, install_extra
from prfaas.simulate.outcome import Result
from prfaas.simulate.scenario import PolicyName

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS = (".png", ".html")
TIMELINE = (("threshold_tokens", "threshold, tokens"), ("utilisation_percent", "link, %"), ("in_flight", "in flight"))
PERCENTILES = ("p50", "p90", "p99")


def check_plot(path: Path | None) -> None:
    """Raise ConfigError for a name without a known format, before minutes of work."""
    if path is not None and path.suffix not in ENDINGS:
        raise ConfigError(f"--plot is {path}; its name must end in {' or '.join(ENDINGS)}")


def draw_runs(path: Path, results: Mapping[PolicyName, Result]) -> None:
    """Draw TTFT by policy, and threshold, utilisation and requests in flight over time, a line a policy."""
    figure, axes = _figure(rows=1 + len(TIMELINE), height=11)
    for place, key in enumerate(PERCENTILES):
        heights = [getattr(one.ttft_seconds, key) for one in results.values()]
        axes[0].bar([i + 0.27 * (place - 1) for i in range(len(results))], heights, width=0.25, label=key)
    axes[0].set_xticks(range(len(results)), list(results))
    axes[0].set_ylabel("TTFT, s")
    axes[0].legend(loc="upper left")
    for axis, (field, label) in zip(axes[1:], TIMELINE, strict=True):
        for name, result in results.items():
            points = result.timeline
            axis.plot([one.at_seconds for one in points], [getattr(one, field) for one in points], label=name, lw=0.8)
        axis.set_ylabel(label)
        axis.sharex(axes[1])
    axes[1].legend(loc="upper right")
    axes[-1].set_xlabel("seconds")
    _save(figure, path, "Simulated runs")


def _figure(rows: int, height: float) -> "tuple[Figure, Any]":
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib; {install_extra('plot')}") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, figsize=(10, height), layout="constrained")


def _save(figure: "Figure", path: Path, title: str) -> None:
    from matplotlib import pyplot

    picture = io.BytesIO()
    kind = "png" if path.suffix == ".png" else "svg"
    figure.savefig(picture, format=kind, dpi=120)  # pyright: ignore[reportUnknownMemberType]
    pyplot.close(figure)
    content = picture.getvalue()
    if kind == "svg":
        drawn = content.decode()
        drawn = drawn[drawn.index("<svg") :]
        head = f'<!doctype html>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        content = f"{head}<h1>{html.escape(title)}</h1>\n{drawn}".encode()
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error}") from error
