"""Proves that a chart puts its values where its axes say, is whole XML, and takes any name as a word."""

import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cli.chart import Axis, ChartSigns, Mark, draw_bars, draw_lines, draw_stacks

LINEAR, LOGARITHMIC = Axis("requests/s"), Axis("tokens", is_log=True)


def places(chart: str) -> list[list[tuple[float, float]]]:
    """Return the points of each line, in pixels."""
    lines = [one.attrib["points"].split() for one in ET.fromstring(chart).iter("polyline")]
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in line)] for line in lines]


def words(chart: str) -> list[str]:
    return [one.text or "" for one in ET.fromstring(chart).iter("text")]


def test_equal_steps_are_equally_far_on_a_linear_axis_and_equal_ratios_on_a_logarithmic_one():
    even = places(draw_lines(LINEAR, LINEAR, {"a": [(0, 0), (5, 50), (10, 100)]}))[0]
    assert even[1][0] - even[0][0] == pytest.approx(even[2][0] - even[1][0], abs=0.2)
    assert even[0][1] - even[1][1] == pytest.approx(even[1][1] - even[2][1], abs=0.2)
    ratios = places(draw_lines(LOGARITHMIC, LINEAR, {"a": [(1, 0), (10, 1), (100, 2)]}))[0]
    assert ratios[1][0] - ratios[0][0] == pytest.approx(ratios[2][0] - ratios[1][0], abs=0.2)
    uneven = places(draw_lines(LINEAR, LINEAR, {"a": [(1, 0), (10, 1), (100, 2)]}))[0]
    assert uneven[1][0] - uneven[0][0] < (uneven[2][0] - uneven[1][0]) / 5


def test_a_linear_axis_begins_at_zero_or_below():
    assert "0" in words(draw_lines(LINEAR, LINEAR, {"a": [(1, 90), (2, 100)]}))
    percent = Axis("gain", shown="{:+.0%}".format)
    assert {"-20%", "+0%"} <= set(words(draw_lines(LINEAR, percent, {"a": [(1, -0.2), (2, 0.4)]})))


def test_a_mark_stands_at_its_value_and_widens_the_axis():
    chart = draw_lines(LINEAR, LINEAR, {"a": [(0, 1), (10, 1)]}, Mark(20, "now"))
    (left,) = re.findall(r'class="mark" d="M([\d.]+)', chart)
    line = places(chart)[0]
    assert float(left) == pytest.approx(line[0][0] + 2 * (line[1][0] - line[0][0]), abs=0.2)


def test_bars_are_as_high_as_their_values_and_say_them():
    chart = draw_bars(LINEAR, ["short", "long"], {"here": [1, 4], "there": [2, 0]})
    heights = [float(one.attrib["height"]) for one in ET.fromstring(chart).iter("rect")]
    assert heights[2] == pytest.approx(4 * heights[0], abs=0.5)
    assert heights[3] == 0
    assert {"short", "long", "here", "there", "1", "2", "4"} <= set(words(chart))


def test_a_name_is_a_word_whatever_it_is():
    name = '<script>alert("x")</script> & co'
    for chart in (draw_lines(Axis(name), LINEAR, {name: [(1, 1)]}), draw_bars(LINEAR, [name], {name: [1]})):
        assert "<script" not in chart
        assert name in words(chart)


def test_a_chart_without_points_says_so():
    assert words(draw_lines(LINEAR, LINEAR, {"a": []})) == ["nothing to show"]


@given(st.lists(st.tuples(st.floats(1e-6, 1e9), st.floats(1e-6, 1e9)), min_size=1, max_size=8), st.booleans())
def test_any_values_stay_within_the_frame_with_few_round_ticks(points: list[tuple[float, float]], is_log: bool):
    axis = Axis("x", is_log=is_log)
    chart = draw_lines(axis, axis, {"a": sorted(points)})
    assert all(62 <= x <= 622 and 34 <= y <= 254 for line in places(chart) for x, y in line)
    assert chart.count('class="grid"') <= 9
    assert "nan" not in chart


def test_what_stands_beside_a_line_stands_at_its_values_and_widens_the_axis():
    beside = ChartSigns({"a": [(1, 0, 40)]}, {"a": [(1, 10)]}, {"a": [(1, 20)]})
    chart = draw_lines(LINEAR, LINEAR, {"a": [(1, 20), (2, 20)]}, beside=beside)
    (interval, cross) = re.findall(r'<path class="sign s0" d="M([\d.]+) ([\d.]+)', chart)
    ((ring_x, ring_y),) = re.findall(r'<circle class="sign s0" cx="([\d.]+)" cy="([\d.]+)"', chart)
    line = places(chart)[0]
    assert float(interval[0]) == float(ring_x) == line[0][0]
    assert float(ring_y) == pytest.approx((float(interval[1]) + line[0][1]) / 2, abs=0.2)
    assert (float(cross[0]) + 4, float(cross[1]) + 4) == pytest.approx(line[0], abs=0.2)


def test_parts_stand_upon_each_other_and_say_their_sum():
    chart = draw_stacks(LINEAR, ["low", "high"], {"waits": [1, 2], "works": [3, 4]})
    rects = [one.attrib for one in ET.fromstring(chart).iter("rect")]
    first, second = ((float(one["y"]), float(one["height"])) for one in rects[:2])
    assert second[0] + second[1] == pytest.approx(first[0], abs=0.2)
    assert second[1] == pytest.approx(3 * first[1], abs=0.5)
    assert {"low", "high", "4", "6"} <= set(words(chart))


def test_parts_are_listed_as_they_stand_and_only_if_they_are_there():
    chart = draw_stacks(LINEAR, ["low"], {"waits": [1], "never": [0], "works": [3]})
    assert [word for word in words(chart) if word in ("waits", "never", "works")] == ["works", "waits"]


def test_the_interval_of_a_bar_stands_at_its_values_and_widens_the_axis():
    chart = draw_bars(LINEAR, ["here"], {"seen": [10], "said": [10]}, {"seen": [(5, 20)]})
    ((bottom, top),) = re.findall(r'<path class="span" d="M[\d.]+ ([\d.]+)V([\d.]+)', chart)
    first, _ = (one.attrib for one in ET.fromstring(chart).iter("rect"))
    height = float(first["height"])
    assert float(bottom) == pytest.approx(float(first["y"]) + height / 2, abs=0.2)
    assert float(top) == pytest.approx(float(first["y"]) - height, abs=0.2)


def test_parts_of_no_group_are_an_empty_chart():
    assert "rect" not in draw_stacks(LINEAR, [], {"waits": []})
