"""Learns the profiles of engines that only count their prefills, and joins them with what pools say of themselves.

Such an engine shows, for each of its processes, how many prompts it finished, the tokens that it computed for them and
the seconds that this took. The difference of two scrapes is the mean prefill between them, and a single one where only
one finished. A curve is fitted to these as our worker fits its own (prfaas.capacity.profile). What a pool's spec says
stands in for what was not measured: its points begin the curve, and every class of length forgets them as its own
prefills come. Without such points a curve counts once there are enough prefills, of lengths that differ enough.

The size of a cache is a property of the model. So what one pool shows or says holds for all pools of the policy. A
member's pool without a known size has no profile: nobody could say what it sends. In the hub none is needed.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from prfaas.capacity.profile import Curve, Sample, prefill_seconds
from prfaas.names import HUB
from prfaas.wire.profile import Profile
from prfaas.wire.routes import RoutingTable
from prfaas_scheduler.measure import CacheSizes, Measurements, PoolKey, Prefills

LONGEST_SEED_TOKENS: Final = 131_072
"""Taken for the longest point of a seed that does not say it."""
SEED_OCTAVES: Final = 6
"""A seed's curve stands in at so many halves of its longest point, each of which is forgotten by itself."""
MIN_PREFILLS: Final = 8
MIN_SPREAD: Final = 2.0
"""The longest prefill has so many times the tokens of the shortest, or a curve without a seed says too little."""


class LearnedProfiles:
    """The curves of a policy's pools, and the counters that they were last learned from."""

    def __init__(self) -> None:
        self.measured: frozenset[PoolKey] = frozenset()
        """Pools whose last profile is measured, and not only what their specs say."""
        self._curves: dict[PoolKey, _LearnedCurve] = {}
        self._before: dict[tuple[str, ...], Prefills] = {}

    def profiles(self, table: RoutingTable, measured: Measurements) -> dict[PoolKey, Profile]:
        """Learn from a round of measurements, and return the profile of every pool that has one."""
        seeds = {(one.cluster, one.pool): one.profile for one in table.profiles}
        self._learn(measured.prefills, seeds)
        sizes = _cache_sizes(measured, seeds)
        found: dict[PoolKey, Profile] = {}
        for key in sorted(seeds.keys() | self._curves.keys()):
            curve = self._curves.get(key)
            profile = curve.profile if curve is not None and curve.counts else seeds.get(key)
            if profile is not None and profile.samples and (sizes or key[0] == HUB):
                found[key] = msgspec.structs.replace(profile, **sizes._asdict()) if sizes else profile
        learned = {key for key, curve in self._curves.items() if curve.counts}
        self.measured = frozenset(measured.profiles.keys() | (learned & found.keys()))
        return {**found, **measured.profiles}

    def _learn(self, prefills: Mapping[tuple[str, ...], Prefills], seeds: Mapping[PoolKey, Profile]) -> None:
        for key, now in prefills.items():
            before, pool = self._before.get(key), (key[0], key[1])
            seed = seeds.get(pool)
            if (curve := self._curves.get(pool)) is None or curve.seed != seed:
                curve = self._curves[pool] = _LearnedCurve(seed)
            if before is not None and (sample := _mean_between(before, now)) is not None:
                curve.add(sample)
        self._before = dict(prefills)


class _LearnedCurve:
    """A pool's curve, and whether it says enough to be used."""

    def __init__(self, seed: Profile | None):
        self.seed = seed
        seeded = seed is not None and seed.samples > 0
        self._curve = Curve.fitted(_points_of(seed)) if seed is not None and seeded else Curve()
        self._added = 0
        self._lengths: tuple[int, int] | None = None
        self._seeded = seeded

    def add(self, sample: Sample) -> None:
        self._curve.add(sample)
        self._added += 1
        low, high = self._lengths or (sample.tokens, sample.tokens)
        self._lengths = min(low, sample.tokens), max(high, sample.tokens)

    @property
    def counts(self) -> bool:
        """True once prefills were measured: enough of them where no seed tells the shape of the curve."""
        if self._lengths is None:
            return False
        low, high = self._lengths
        return self._seeded or (self._added >= MIN_PREFILLS and high >= MIN_SPREAD * low)

    @property
    def profile(self) -> Profile:
        return self._curve.profile(0, 0)


def _points_of(seed: Profile) -> list[Sample]:
    longest = seed.max_tokens or LONGEST_SEED_TOKENS
    lengths = sorted({max(1, longest >> halves) for halves in range(SEED_OCTAVES + 1)})
    return [Sample(tokens, prefill_seconds(seed, tokens)) for tokens in lengths]


def _mean_between(before: Prefills, now: Prefills) -> Sample | None:
    """Return the mean prefill between two scrapes; None where none ended, or the process began anew."""
    count = now.count - before.count
    if count < 1 or now.seconds < before.seconds or now.tokens < before.tokens:
        return None
    cached_tokens = max(0.0, now.cached_tokens - before.cached_tokens)
    return Sample(
        tokens=round((now.tokens - before.tokens) / count),
        seconds=(now.seconds - before.seconds) / count,
        start_tokens=round(cached_tokens / count),
    )


def _cache_sizes(measured: Measurements, seeds: Mapping[PoolKey, Profile]) -> CacheSizes | None:
    """Return the measured size of a cache, or what a pool says; None where nobody does."""
    if measured.cache_sizes:
        return measured.cache_sizes[min(measured.cache_sizes)]
    declared = [CacheSizes(one.state_bytes, one.token_bytes) for _, one in sorted(seeds.items())]
    return next((one for one in declared if one.token_bytes or one.state_bytes), None)
