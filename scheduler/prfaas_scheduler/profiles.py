"""The profiles of pools, from what their instances show: times and sizes at a few lengths.

Instances show points of curves that are exact: a parabola through three of them is the curve again, and the mean over
a pool's instances is one too. Points that make no such curve (absurd, falling, of another version) give no profile.
"""

import math
from collections.abc import Mapping, Sequence

from prfaas.capacity.profile import MeasuredPoint, profile_through
from prfaas.wire.profile import Profile
from prfaas_scheduler.prometheus import FIGURE_LABEL, Figure

Points = dict[int, float]
Key = tuple[str, str]


def profiles_of(figures: Sequence[Figure]) -> Mapping[Key, Profile]:
    """Return the profile of every pool that has one, by cluster and pool."""
    seconds: dict[Key, Points] = {}
    sizes: dict[Key, Points] = {}
    samples: dict[Key, int] = {}
    for figure in figures:
        key = figure.labels.get("cluster", ""), figure.labels.get("pool", "")
        match figure.labels.get(FIGURE_LABEL):
            case "prefill_seconds":
                _note(seconds.setdefault(key, {}), figure)
            case "cache_bytes":
                _note(sizes.setdefault(key, {}), figure)
            case "profile_samples" if math.isfinite(figure.value):
                samples[key] = int(figure.value)
            case _:
                pass
    found = {
        key: profile_of(seconds[key], sizes[key], count)
        for key, count in samples.items()
        if count > 0 and key in seconds and key in sizes
    }
    return {key: profile for key, profile in found.items() if profile is not None}


def _note(points: Points, figure: Figure) -> None:
    text = figure.labels.get("tokens", "")
    if text.isdecimal() and math.isfinite(figure.value):
        points[int(text)] = figure.value


def profile_of(seconds: Points, sizes: Points, samples: int) -> Profile | None:
    """Return the curve through the shortest, the middle and the longest point; None where there is none."""
    lengths = sorted(seconds.keys() & sizes.keys() - {0})
    if len(lengths) < 3:
        return None
    chosen = (lengths[0], lengths[len(lengths) // 2], lengths[-1])
    return profile_through([MeasuredPoint(tokens, seconds[tokens], sizes[tokens]) for tokens in chosen], samples)
