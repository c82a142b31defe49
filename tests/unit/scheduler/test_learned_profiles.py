"""Curves of engines that only count: exact where single prefills end, from a pool's own figures until then."""

import random

import pytest

from prfaas.capacity.profile import cache_bytes, prefill_seconds
from prfaas.wire.profile import PoolProfile, Profile
from prfaas_scheduler import measure
from prfaas_scheduler.measure import CacheSizes, Measurements, Prefills
from prfaas_scheduler.profiles import MIN_PREFILLS, LearnedProfiles
from prfaas_scheduler.prometheus import FIGURE_LABEL, Figure

TRUE = Profile(
    state_bytes=180_000_000, token_bytes=17_143, fixed_seconds=0.3, token_seconds=4e-5, squared_seconds=9e-11
)
SIZES = CacheSizes(TRUE.state_bytes, TRUE.token_bytes)
POOL = ("eu", "offload")


class Process:
    """An engine process that counts its prefills as vLLM does."""

    def __init__(self, profile: Profile, key=("eu", "offload", "192.0.2.1:8000", "0")):
        self.profile, self.key = profile, key
        self.counters = Prefills(0.0, 0.0, 0.0, 0.0)

    def prefill(self, tokens: int, start_tokens: int = 0) -> None:
        now = self.counters
        self.counters = Prefills(
            now.count + 1,
            now.seconds + prefill_seconds(self.profile, tokens, start_tokens),
            now.tokens + tokens,
            now.cached_tokens + start_tokens,
        )


def measured(*processes: Process, sizes=True, pool=POOL) -> Measurements:
    prefills = {one.key: one.counters for one in processes}
    return Measurements({}, hub_measured=True, errors=(), prefills=prefills, cache_sizes={pool: SIZES} if sizes else {})


def seed(of: Profile, cluster="eu", pool="offload", samples=3) -> PoolProfile:
    known = Profile(**{name: getattr(of, name) for name in of.__struct_fields__} | {"samples": samples})
    return PoolProfile(cluster=cluster, pool=pool, profile=known)


def served(learned, table, process, lengths, together=1):
    found = learned.profiles(table, measured(process))
    for start in range(0, len(lengths), together):
        for tokens in lengths[start : start + together]:
            process.prefill(tokens)
        found = learned.profiles(table, measured(process))
    return found


def error(profile: Profile, tokens: int) -> float:
    return abs(prefill_seconds(profile, tokens) / prefill_seconds(TRUE, tokens) - 1)


@pytest.mark.parametrize("absurd", [1.7e308, -1.7e308, float("inf"), float("nan")])
def test_an_absurd_figure_of_one_process_says_nothing_and_ends_nothing(table, absurd):
    place = {"cluster": "eu", "pool": "offload", "instance": "i", "engine": "0"}

    def figure(name: str, value: float, **more: str) -> Figure:
        return Figure({**place, FIGURE_LABEL: name, **more}, value, 0.0)

    learned = LearnedProfiles()
    for value in (1.0, absurd, -absurd, 2.0):
        figures = [figure(name, value) for name in ("prompts", "prompts_seconds", "prompts_tokens")]
        figures += [figure("cache_bytes", size, tokens=text) for text, size in (("1024", 1.0), ("65536", value))]
        figures += [figure("cache_bytes", 5.0, tokens="9" * 400), figure("profile_samples", value)]
        sizes, prefills = measure.cache_sizes_of(figures), measure.prefills_of(figures)
        found = Measurements({}, hub_measured=True, errors=(), prefills=prefills, cache_sizes=sizes)
        assert learned.profiles(table(), found) == {}
        assert measure.profiles_of(figures) == {}


def test_single_prefills_give_the_curve_again(table):
    rng = random.Random(1)
    lengths = [rng.randrange(500, 60_000) for _ in range(200)]
    found = served(LearnedProfiles(), table(), Process(TRUE), lengths)[POOL]
    assert max(error(found, tokens) for tokens in (500, 5_000, 60_000)) < 0.01
    assert cache_bytes(found, 1000) == cache_bytes(TRUE, 1000)


def test_prefills_that_end_between_the_same_scrapes_give_it_nearly(table):
    rng = random.Random(2)
    lengths = [rng.randrange(500, 60_000) for _ in range(400)]
    found = served(LearnedProfiles(), table(), Process(TRUE), lengths, together=4)[POOL]
    assert max(error(found, tokens) for tokens in (2_000, 20_000, 60_000)) < 0.15


def test_a_cached_prefix_is_no_work(table):
    learned, process, rng = LearnedProfiles(), Process(TRUE), random.Random(3)
    learned.profiles(table(), measured(process))
    for _ in range(200):
        process.prefill(rng.randrange(500, 20_000), rng.choice([0, 30_000]))
        found = learned.profiles(table(), measured(process))
    assert max(error(found[POOL], tokens) for tokens in (500, 20_000)) < 0.01


def test_too_few_or_too_equal_prefills_say_nothing(table):
    lengths = [1_000 * n for n in range(1, MIN_PREFILLS)]
    assert served(LearnedProfiles(), table(), Process(TRUE), lengths) == {}
    assert served(LearnedProfiles(), table(), Process(TRUE), [1_000] * 50) == {}
    assert served(LearnedProfiles(), table(), Process(TRUE), [*lengths, 9_000]).keys() == {POOL}


def test_a_process_that_began_anew_is_not_a_negative_prefill(table):
    learned, process = LearnedProfiles(), Process(TRUE)
    served(learned, table(), process, [1_000, 30_000] * 10)
    fresh = Process(TRUE)
    fresh.prefill(40_000)
    found = learned.profiles(table(), measured(fresh))
    fresh.prefill(20_000)
    assert max(error(found[POOL], tokens) for tokens in (1_000, 30_000)) < 0.01
    assert learned.profiles(table(), measured(fresh))[POOL].samples == found[POOL].samples + 1


def test_what_a_pool_says_stands_until_it_is_measured(table):
    learned, seeded = LearnedProfiles(), table(profiles=(seed(TRUE),))
    assert learned.profiles(seeded, Measurements({}, hub_measured=True, errors=()))[POOL].samples == 3
    assert learned.measured == set(), "the long loop knows the pool's own figures itself"


def test_measured_prefills_win_where_there_are_some_and_the_rest_keeps_its_shape(table):
    slower = Profile(
        state_bytes=1, token_bytes=TRUE.token_bytes, fixed_seconds=0.9, token_seconds=1.2e-4, squared_seconds=2.7e-10
    )
    learned, seeded = LearnedProfiles(), table(profiles=(seed(slower),))
    rng = random.Random(4)
    found = served(learned, seeded, Process(TRUE), [rng.randrange(500, 20_000) for _ in range(60)])[POOL]
    assert learned.measured == {POOL}
    assert max(error(found, tokens) for tokens in (500, 5_000, 20_000)) < 0.05
    assert error(found, 100_000) < 0.2, "a length that never came keeps the seed's shape, at the measured speed"
    assert found.state_bytes == TRUE.state_bytes, "the measured size of a cache, and not the pool's"


def test_without_the_size_of_a_cache_only_the_hub_has_a_profile(table):
    there, here = Process(TRUE), Process(TRUE, ("hub", "local", "192.0.2.9:8000", "0"))
    learned = LearnedProfiles()
    for tokens in (0, *(1_000 * n for n in range(1, 20))):
        for process in (there, here):
            if tokens:
                process.prefill(tokens)
        found = learned.profiles(table(), measured(there, here, sizes=False))
    assert found.keys() == {("hub", "local")}
    sizes = Profile(state_bytes=7, token_bytes=8)
    declared = table(profiles=(PoolProfile(cluster="hub", pool="decode", profile=sizes),))
    found = learned.profiles(declared, measured(there, here, sizes=False))
    assert {(one.state_bytes, one.token_bytes) for one in found.values()} == {(7, 8)}, "one model, one size"
    assert found.keys() == {("hub", "local"), POOL}


def test_a_shown_curve_comes_before_all_else(table):
    shown = Profile(state_bytes=1, token_bytes=2, fixed_seconds=3.0, samples=9)
    both = measured(Process(TRUE))._replace(profiles={POOL: shown})
    assert LearnedProfiles().profiles(table(profiles=(seed(TRUE),)), both)[POOL] is shown


@pytest.mark.parametrize("missing", ["prompts", "prompts_seconds", "prompts_tokens"])
def test_counters_without_a_part_are_left_out(missing):
    def figure(name: str, value: float) -> Figure:
        labels = {"cluster": "eu", "pool": "offload", "instance": "a", "engine": "0", "figure": name}
        return Figure(labels, value, 1000.0)

    whole = [figure("prompts", 3.0), figure("prompts_seconds", 1.5), figure("prompts_tokens", 900.0)]
    assert measure.prefills_of(whole) == {("eu", "offload", "a", "0"): Prefills(3.0, 1.5, 900.0, 0.0)}
    assert measure.prefills_of([one for one in whole if one.labels["figure"] != missing]) == {}
    assert measure.prefills_of([*whole[:2], figure("prompts_tokens", float("nan"))]) == {}


def test_the_shown_sizes_of_caches_are_a_line():
    def figure(tokens: str, value: float) -> Figure:
        return Figure({"cluster": "eu", "pool": "offload", "figure": "cache_bytes", "tokens": tokens}, value, 1000.0)

    points = [figure(str(n), cache_bytes(TRUE, n)) for n in (256, 1024, 65_536)]
    assert measure.cache_sizes_of(points) == {POOL: SIZES}
    assert measure.cache_sizes_of(points[:1]) == {}
    assert measure.cache_sizes_of([points[0], figure("many", 1.0), figure("512", float("inf"))]) == {}
