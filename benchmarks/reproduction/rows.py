"""Pairs a published figure with ours, and writes the pairs as tables."""

from collections.abc import Sequence

import msgspec


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure. `model` follows from equations, `simulated` from requests served one by one; None: there is none."""

    name: str
    published: float
    model: float | None
    simulated: float | None
    digits: int = 2
    reason: str = ""
    """Why ours differs or is missing."""


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A table of the document."""

    title: str
    intro: str
    rows: tuple[Row, ...]
    after: str = ""


def shown(value: float | None, digits: int) -> str:
    """Return a figure as the document shows it."""
    return "-" if value is None else f"{value:,.{digits}f}"


def off_by(value: float | None, published: float) -> str:
    """Return the relative difference of ours."""
    return "-" if value is None or not published else f"{value / published - 1:+.1%}"


def cells(row: Row) -> list[str]:
    """Return a row of the document's table."""
    return [
        row.name,
        shown(row.published, row.digits),
        shown(row.model, row.digits),
        off_by(row.model, row.published),
        shown(row.simulated, row.digits),
        off_by(row.simulated, row.published),
        row.reason,
    ]


HEAD = ("", "published", "model", "difference", "simulated", "difference", "reason")


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    lines = [HEAD, ("---", *["---:"] * 5, "---"), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
