"""What the scheduler learns of the demand: lengths from the gateway's counts, profiles from what instances show."""

import math

import msgspec
import pytest

from prfaas.capacity.profile import cache_bytes, prefill_seconds
from prfaas.routing.balance import MOST_WORK, find_work
from prfaas.wire.control import Counters, PrefillTokens
from prfaas.wire.profile import Profile
from prfaas_scheduler.measure import profile_of, profiles_of
from prfaas_scheduler.observe import CounterHistory
from prfaas_scheduler.prometheus import Figure

PROFILE = Profile(
    state_bytes=1_000_000, token_bytes=1024, fixed_seconds=0.02, token_seconds=3e-5, squared_seconds=4e-11, samples=7
)
LENGTHS = (256, 1024, 4096, 16384, 65536)


def counters(*lengths: int) -> Counters:
    total = sum(lengths)
    return Counters(offloaded=total, local=0, failed_offloads=0, lengths=lengths)


def test_lengths_and_arrivals_are_those_of_the_window():
    history = CounterHistory()
    for second in range(0, 601):
        history.add(float(second), counters(second, 2 * second))
    assert history.lengths() == [300, 600]
    assert history.arrivals_per_second() == pytest.approx(3.0)


def test_what_a_side_computes_of_each_counted_token_is_that_of_the_window():
    history, none = CounterHistory(), PrefillTokens()
    assert history.work("hub") == 1.0
    for second in range(0, 601):
        local = PrefillTokens(
            counted=1000 * second, computed=3000 * second if second < 300 else 450_000 + 1500 * second
        )
        history.add(float(second), msgspec.structs.replace(counters(second), local_tokens=local, offloaded_tokens=none))
    assert history.work("hub") == pytest.approx(1.5)
    assert history.work("eu") == 1.0, "nothing was offloaded"


def test_a_few_prompts_change_what_is_computed_only_so_far():
    history = CounterHistory()
    history.add(0.0, counters(0))
    far = PrefillTokens(counted=1, computed=1_000_000)
    history.add(1.0, msgspec.structs.replace(counters(1), local_tokens=far))
    assert history.work("hub") == MOST_WORK


def test_a_gateway_that_restarts_says_nothing_of_what_is_computed_until_it_counts_again():
    history, before = CounterHistory(), PrefillTokens(counted=9_000, computed=18_000)
    history.add(0.0, counters(0))
    history.add(1.0, msgspec.structs.replace(counters(9), local_tokens=before))
    assert history.work("hub") == 2.0
    history.add(2.0, msgspec.structs.replace(counters(1), local_tokens=PrefillTokens(counted=500, computed=500)))
    assert history.work("hub") == 1.0
    history.add(3.0, msgspec.structs.replace(counters(2), local_tokens=PrefillTokens(counted=1000, computed=1250)))
    assert history.work("hub") == 1.5


@pytest.mark.parametrize(("counted", "computed"), [(-1, 5), (5, -1), (0, 5)])
def test_a_count_that_fell_or_stood_says_nothing(counted, computed):
    first = PrefillTokens(counted=10, computed=10)
    assert find_work(first, PrefillTokens(counted=10 + counted, computed=10 + computed)) == 1.0
    assert find_work(first, PrefillTokens(counted=15, computed=20)) == 2.0, "negative control"


@pytest.mark.parametrize("more", [b"", b', "local_tokens": {"counted": 7, "guessed": 1}, "dropped": [1]'])
def test_the_counters_of_an_older_and_of_a_newer_gateway_are_read(more):
    got = msgspec.json.decode(b'{"offloaded": 1, "local": 2, "failed_offloads": 0' + more + b"}", type=Counters)
    assert got == Counters(
        offloaded=1, local=2, failed_offloads=0, local_tokens=PrefillTokens(counted=7 if more else 0)
    )


def test_a_gateway_that_counts_no_lengths_offers_none():
    history = CounterHistory()
    history.add(0.0, counters())
    assert list(history.lengths()) == []


def test_one_count_is_no_rate():
    history = CounterHistory()
    assert history.arrivals_per_second() is None
    history.add(0.0, counters(5))
    assert history.arrivals_per_second() is None


def test_a_restarted_gateway_begins_anew():
    history = CounterHistory()
    for second in range(20):
        history.add(float(second), counters(100 + second, 100))
    history.add(20.0, counters(1, 0))
    history.add(21.0, counters(3, 0))
    assert list(history.lengths()) == [2, 0]
    assert history.arrivals_per_second() is None


def shown(profile: Profile) -> tuple[dict[int, float], dict[int, float]]:
    return {n: prefill_seconds(profile, n) for n in LENGTHS}, {n: cache_bytes(profile, n) for n in LENGTHS}


def test_the_curve_through_what_an_instance_shows_is_its_own():
    found = profile_of(*shown(PROFILE), samples=7)
    assert found is not None
    for tokens in (100, 5000, 120_000):
        assert prefill_seconds(found, tokens) == pytest.approx(prefill_seconds(PROFILE, tokens), rel=1e-9)
        assert cache_bytes(found, tokens) == cache_bytes(PROFILE, tokens)


def test_points_that_make_no_curve_give_no_profile():
    seconds, sizes = shown(PROFILE)
    assert profile_of({256: 1.0, 1024: 2.0}, sizes, 7) is None
    assert profile_of(dict.fromkeys(LENGTHS, 0.0), sizes, 7) is None
    assert profile_of(seconds | {65536: 0.001}, sizes, 7) is None


def figure(name: str, value: float, **labels: str) -> Figure:
    return Figure({"cluster": "eu", "pool": "offload", "figure": name} | labels, value, 1000.0)


def test_pools_without_samples_or_with_absurd_figures_are_left_out():
    seconds, sizes = shown(PROFILE)
    curve = [figure("prefill_seconds", value, tokens=str(tokens)) for tokens, value in seconds.items()]
    curve += [figure("cache_bytes", value, tokens=str(tokens)) for tokens, value in sizes.items()]
    assert profiles_of([*curve, figure("profile_samples", 7)]).keys() == {("eu", "offload")}
    assert profiles_of(curve) == {}
    assert profiles_of([*curve, figure("profile_samples", 0)]) == {}
    assert profiles_of([*curve, figure("profile_samples", math.nan)]) == {}
    strange = [figure("prefill_seconds", math.inf, tokens="64"), figure("cache_bytes", 1.0, tokens="many")]
    assert profiles_of([*curve, *strange, figure("profile_samples", 7)]) == profiles_of(
        [*curve, figure("profile_samples", 7)]
    )
