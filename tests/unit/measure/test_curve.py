"""Measured points count, whatever was fitted to them: the curve goes through them, and like the fit between them."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.capacity.profile import prefill_seconds
from prfaas.measure.curve import Point, PrefillTimes
from prfaas.wire.profile import Profile

FIT = Profile(state_bytes=1, token_bytes=1, fixed_seconds=0.02, token_seconds=2e-5, squared_seconds=3e-9)
LENGTHS = (256, 1024, 4096, 16_384)
OFF = [
    Point(tokens, off * prefill_seconds(FIT, tokens))
    for tokens, off in zip(LENGTHS, (1.07, 0.93, 1.07, 1), strict=True)
]
TIMES = PrefillTimes.through(reversed(OFF), FIT)


def test_the_curve_goes_through_points_that_are_off_the_fit():
    for tokens, seconds in OFF:
        assert TIMES.prompt_seconds(tokens) == pytest.approx(seconds)
    assert TIMES.prompt_seconds(1024) == pytest.approx(0.93 * prefill_seconds(FIT, 1024)), "not the fit's time"
    assert TIMES.prompt_seconds(0) == 0


@pytest.mark.parametrize("tokens", [1, 300, 1024, 9000, 50_000])
def test_points_on_the_fit_change_nothing_and_none_are_the_fit(tokens: int):
    on_it = PrefillTimes.through([Point(one, prefill_seconds(FIT, one)) for one in LENGTHS], FIT)
    for times in (on_it, PrefillTimes(FIT)):
        assert times.prompt_seconds(tokens) == pytest.approx(prefill_seconds(FIT, tokens))
        behind = times.chunk_seconds(2000, tokens, is_first=True)
        assert behind == pytest.approx(prefill_seconds(FIT, tokens, 2000))


def test_a_point_that_is_slower_than_a_longer_one_was_disturbed():
    times = PrefillTimes.through([Point(100, 0.1), Point(200, 0.5), Point(300, 0.3)], FIT)
    assert [point.seconds for point in times.points] == [0.1, 0.3, 0.3]


def test_the_longest_prompt_is_known_that_was_measured_whatever_was_fitted():
    fit = msgspec.structs.replace(FIT, max_tokens=4096)
    assert PrefillTimes.through(OFF, fit).longest_tokens == 16_384
    assert PrefillTimes(fit).longest_tokens == 4096


def test_beyond_the_ends_it_goes_on_like_the_fit():
    for end, beyond in ((0, 10), (-1, 30_000)):
        last = OFF[end]
        rise = prefill_seconds(FIT, beyond) - prefill_seconds(FIT, last.tokens)
        assert TIMES.prompt_seconds(beyond) == pytest.approx(last.seconds + rise)


def test_between_points_that_are_far_apart_it_grows_as_attention_does():
    """The negative control of a line: it would be a third too high in the middle."""
    low, high = OFF[2:]
    line = low.seconds + (high.seconds - low.seconds) * (8192 - 4096) / (16_384 - 4096)
    assert line > 1.2 * prefill_seconds(FIT, 8192)
    assert TIMES.prompt_seconds(8192) == pytest.approx(prefill_seconds(FIT, 8192), rel=0.07)


points = st.lists(st.builds(Point, st.integers(1, 20_000), st.floats(1e-4, 10)), min_size=1, max_size=6)


@given(points, st.lists(st.integers(1, 40_000), min_size=2, max_size=30), st.integers(1, 9))
def test_it_never_falls_and_chunks_sum_to_the_prompt(measured: list[Point], lengths: list[int], pieces: int):
    times = PrefillTimes.through(measured, FIT)
    seconds = [times.prompt_seconds(tokens) for tokens in sorted(lengths)]
    assert all(low <= high + 1e-9 for low, high in pairwise(seconds))
    whole = max(lengths)
    cuts = [whole * piece // pieces for piece in range(pieces + 1)]
    parts = [times.chunk_seconds(a, b - a, is_first=not a) for a, b in pairwise(cuts) if a < b]
    assert sum(parts) == pytest.approx(times.prompt_seconds(whole))
    assert min(parts) >= -1e-9
