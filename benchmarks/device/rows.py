"""The figures as rows for docs/understand/benchmarks.md."""

import math
from collections.abc import Sequence

from benchmarks.report import Figure

COMMAND = "`benchmarks/device/run.sh`"


def markdown(device: str, commit: str, figures: Sequence[Figure], left_out: Sequence[str]) -> str:
    """Return a sentence, a table and what is left out of it."""
    lines = [f"On {device}, at commit {commit}.", "", "| what | figure | rival | command |", "|---|---|---|---|"]
    lines += [
        f"| {one.name} | {number(one.value)} {one.unit} | {_rival(one)} | {'the same' if at else COMMAND} |"
        for at, one in enumerate(figures)
    ]
    if left_out:
        lines += ["", "Left out:", "", *(f"- {one}" for one in left_out)]
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    """Return three digits that count, or all of a large number."""
    if math.isfinite(value) and abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _rival(figure: Figure) -> str:
    if figure.rival_value is None:
        return ""
    ratio = f" (ratio {figure.value / figure.rival_value:.2f})" if figure.rival_value else ""
    return f"{figure.rival}: {number(figure.rival_value)}{ratio}"
