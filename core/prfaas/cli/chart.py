"""Draws lines and bars as SVG text: no library, no script, nothing to load.

The page around a chart gives colours to its classes: `s0`, `s1` and so on for the series, `grid`, `mark` and `word`. So
one drawing is legible on dark and on light ground, and in print. Lines differ in their dashes, too: a reader without
colours tells them apart. Words are escaped.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from html import escape
from typing import Final, NamedTuple

WIDTH: Final = 640
HEIGHT: Final = 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 622, 34, 254
_STACKS_RIGHT: Final = 400
"""Where a chart of parts ends, and the list of its parts begins."""
_MOST_TICKS: Final = 8
_GAP: Final = 0.25
"""The part of a group's room that stays free between the groups of bars."""


class Axis(NamedTuple):
    """What an axis counts; a logarithmic one takes values above 0 only."""

    title: str
    is_log: bool = False
    shown: Callable[[float], str] = "{:,.6g}".format


class Mark(NamedTuple):
    """A vertical line at a value of the x axis."""

    x: float
    word: str


Lines = Mapping[str, Sequence[tuple[float, float]]]
"""Points (x, y) in the order of x, by the name of their line."""


class ChartSigns(NamedTuple):
    """What else is known at the points of lines, by their names: intervals (x, low, high), and two kinds of points."""

    intervals: Mapping[str, Sequence[tuple[float, float, float]]]
    rings: Lines
    crosses: Lines


NOTHING_BESIDE: Final = ChartSigns({}, {}, {})


class _Scale(NamedTuple):
    """Maps values from `low` to `high` onto pixels from `start` to `end`."""

    axis: Axis
    low: float
    high: float
    start: int
    end: int

    def at(self, value: float) -> float:
        low, high, value = (math.log(one) if self.axis.is_log else one for one in (self.low, self.high, value))
        return round(self.start + (self.end - self.start) * (value - low) / (high - low), 1)


def draw_lines(x: Axis, y: Axis, lines: Lines, mark: Mark | None = None, beside: ChartSigns = NOTHING_BESIDE) -> str:
    """Return a chart of lines; one without any point says so. What stands beside has the colour of its line."""
    points = [point for some in (lines, beside.rings, beside.crosses) for line in some.values() for point in line]
    points += [(at, end) for spans in beside.intervals.values() for at, *ends in spans for end in ends]
    if not points:
        return _svg(y.title, [_text((_LEFT + _RIGHT) / 2, (_TOP + _BOTTOM) / 2, "nothing to show", "middle")])
    across = _scale(x, [one for one, _ in points] + ([mark.x] if mark else []), (_LEFT, _RIGHT))
    upward = _scale(y, [one for _, one in points], (_BOTTOM, _TOP))
    drawn = [*_frame(upward, x.title), *_legend(lines)]
    for value in _ticks(across):
        drawn.append(_text(across.at(value), _BOTTOM + 16, x.shown(value), "middle"))
    if mark is not None:
        place = across.at(mark.x)
        anchor = "end" if place > (_LEFT + _RIGHT) / 2 else "start"
        drawn.append(f'<path class="mark" d="M{place} {_TOP}V{_BOTTOM}"/>')
        drawn.append(_text(place + (-5 if anchor == "end" else 5), _TOP + 12, mark.word, anchor))
    for number, (name, line) in enumerate(lines.items()):
        drawn += _beside(name, number, beside, across, upward)
        places = [f"{across.at(a)},{upward.at(b)}" for a, b in line]
        drawn.append(f'<polyline class="line s{number}" points="{" ".join(places)}"/>')
        if len(places) == 1:
            drawn.append('<circle class="bar s{}" cx="{}" cy="{}" r="3"/>'.format(number, *places[0].split(",")))
    return _svg(y.title, drawn)


def draw_bars(
    y: Axis,
    groups: Sequence[str],
    bars: Mapping[str, Sequence[float]],
    intervals: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> str:
    """Return a chart of bars from 0: one a name in each group, whose value stands above it. `intervals` (low, high) are
    drawn over the bars of their name."""
    spans = intervals or {}
    ends = [high for some in spans.values() for _, high in some]
    upward = _scale(y, [0.0, *ends, *(value for values in bars.values() for value in values)], (_BOTTOM, _TOP))
    drawn = [*_frame(upward, ""), *_legend(bars)]
    room = (_RIGHT - _LEFT) / len(groups)
    width = room * (1 - _GAP) / len(bars)
    for place, group in enumerate(groups):
        drawn.append(_text(_LEFT + room * (place + 0.5), _BOTTOM + 16, group, "middle"))
        for number, (name, values) in enumerate(bars.items()):
            left, top = _LEFT + room * (place + _GAP / 2) + width * number, upward.at(values[place])
            middle = left + width / 2 - 1
            size = f'width="{width - 2:.1f}" height="{_BOTTOM - top:.1f}"'
            drawn.append(f'<rect class="bar s{number}" x="{left:.1f}" y="{top}" {size}/>')
            if name in spans:
                bottom, top = (upward.at(end) for end in spans[name][place])
                drawn.append(f'<path class="span" d="{_interval(middle, bottom, top)}"/>')
            drawn.append(_text(middle, top - 4, y.shown(values[place]), "middle"))
    return _svg(y.title, drawn)


def draw_stacks(y: Axis, groups: Sequence[str], parts: Mapping[str, Sequence[float]]) -> str:
    """Return a chart of one bar a group, whose parts stand upon each other. Those that are 0 are left out of the list
    beside it."""
    sums = [sum(values) for values in zip(*parts.values(), strict=True)]
    upward = _scale(y, [0.0, *sums], (_BOTTOM, _TOP))
    drawn = _frame(upward, "", _STACKS_RIGHT)
    room = (_STACKS_RIGHT - _LEFT) / max(1, len(groups))
    for place, group in enumerate(groups):
        left, below = _LEFT + room * (place + _GAP / 2), 0.0
        for number, (name, values) in enumerate(parts.items()):
            top, bottom = upward.at(below + values[place]), upward.at(below)
            size = f'width="{room * (1 - _GAP):.1f}" height="{bottom - top:.1f}"'
            title = f"<title>{escape(name)}: {escape(y.shown(values[place]))}</title>"
            drawn.append(f'<rect class="bar s{number}" x="{left:.1f}" y="{top}" {size}>{title}</rect>')
            below += values[place]
        middle = _LEFT + room * (place + 0.5)
        drawn.append(_text(middle, upward.at(below) - 4, y.shown(below), "middle"))
        drawn.append(_text(middle, _BOTTOM + 16, group, "middle"))
    listed = [(number, name) for number, (name, values) in enumerate(parts.items()) if any(values)]
    for line, (number, name) in enumerate(reversed(listed)):  # as they stand upon each other
        top = _TOP + 24 * line
        drawn.append(f'<path class="bar s{number}" d="M{_STACKS_RIGHT + 24} {top}h12v12h-12z"/>')
        drawn.append(_text(_STACKS_RIGHT + 44, top + 10, name, "start"))
    return _svg(y.title, drawn)


def _beside(name: str, number: int, beside: ChartSigns, across: _Scale, upward: _Scale) -> list[str]:
    """Return what stands beside one line."""
    drawn: list[str] = []
    for at, low, high in beside.intervals.get(name, ()):
        x, bottom, top = across.at(at), upward.at(low), upward.at(high)
        drawn.append(f'<path class="sign s{number}" d="{_interval(x, bottom, top)}"/>')
    for at, value in beside.rings.get(name, ()):
        drawn.append(f'<circle class="sign s{number}" cx="{across.at(at)}" cy="{upward.at(value)}" r="4.5"/>')
    for at, value in beside.crosses.get(name, ()):
        x, y = across.at(at), upward.at(value)
        cross = f"M{x - 4:.1f} {y - 4:.1f}l8 8M{x - 4:.1f} {y + 4:.1f}l8 -8"
        drawn.append(f'<path class="sign s{number}" d="{cross}"/>')
    return drawn


def _interval(x: float, bottom: float, top: float) -> str:
    """Return the path of an upright line with a stroke at both ends."""
    return f"M{x:.1f} {bottom}V{top}M{x - 4:.1f} {top}h8M{x - 4:.1f} {bottom}h8"


def _scale(axis: Axis, values: Iterable[float], pixels: tuple[int, int]) -> _Scale:
    """Return the scale that holds all values: a linear one begins at 0, a logarithmic one at a round number."""
    there = list(values)
    low, high = (min(there) if axis.is_log else min(0.0, *there)), max(there)
    if axis.is_log:
        low = max(one for one in _round_numbers(low / 10, low) if one <= low)
        high = min(one for one in _round_numbers(high, high * 10) if one >= high and one > low)
    else:
        high = low + 1.0 if high == low else high + 0.06 * (high - low)  # room for the line's own width
    return _Scale(axis, low, high, *pixels)


def _ticks(scale: _Scale) -> list[float]:
    """Return round values within a scale, at most eight."""
    if scale.axis.is_log:
        for digits in ((1, 2, 5), (1, 3), (1,)):
            found = _round_numbers(scale.low, scale.high, digits)
            found = [one for one in found if scale.low <= one <= scale.high]
            if len(found) <= _MOST_TICKS:
                return found
        return found[:: -(-len(found) // _MOST_TICKS)]
    step = 10.0 ** math.floor(math.log10((scale.high - scale.low) / 2))
    step *= next(factor for factor in (0.5, 1, 2, 5, 10) if (scale.high - scale.low) / (step * factor) <= _MOST_TICKS)
    first = math.ceil(scale.low / step)
    return [step * place for place in range(first, math.floor(scale.high / step) + 1)]


def _round_numbers(low: float, high: float, digits: Sequence[int] = (1, 2, 5)) -> list[float]:
    """Return numbers with one digit from below `low` to above `high`."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [float(f"{digit}e{power}") for power in powers for digit in digits]


def _frame(upward: _Scale, across_title: str, right: int = _RIGHT) -> list[str]:
    """Return the lines behind a chart, with their values, and the titles of both axes."""
    drawn = [_text(_LEFT, 12, upward.axis.title, "start"), _text(right, HEIGHT - 8, across_title, "end")]
    for value in _ticks(upward):
        place = upward.at(value)
        drawn.append(f'<path class="grid" d="M{_LEFT} {place}H{right}"/>')
        drawn.append(_text(_LEFT - 6, place + 4, upward.axis.shown(value), "end"))
    return drawn


def _legend(names: Collection[str]) -> list[str]:
    """Return the names of several series with their colours, below the chart."""
    drawn: list[str] = []
    left = float(_LEFT)
    for number, name in enumerate(names if len(names) > 1 else ()):
        drawn.append(f'<path class="line s{number}" d="M{left:.0f} {HEIGHT - 12}h22"/>')
        drawn.append(_text(left + 27, HEIGHT - 8, name, "start"))
        left += 42 + 7 * len(name)
    return drawn


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text class="word" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(title: str, drawn: Iterable[str]) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
    return "\n".join([head, *drawn, "</svg>"])
