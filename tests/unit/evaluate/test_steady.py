"""Proves the statistics against processes whose figures are known."""

import math
from functools import cache
from random import Random

import pytest

from prfaas.evaluate.record import AnsweredRequest, Loss, MachineTiming, Run, RunKey
from prfaas.evaluate.steady import (
    FEWEST,
    Sampled,
    combine,
    find_steady,
    growth_share,
    mean_of,
    of_seeds,
    quantile_of,
    quotient,
    rate_of,
    warmup_length,
)

Request = tuple[float, float, float]
"""Arrival, time in the system, and the end."""


def queue(seed: int, load: float, count: int) -> list[Request]:
    """Return the requests of an M/M/1 queue that begins empty; a service takes a second in the mean."""
    rng, at, free, served = Random(seed), 0.0, 0.0, []
    for _ in range(count):
        at += rng.expovariate(load)
        free = max(at, free) + rng.expovariate(1.0)
        served.append((at, free - at, free))
    return served


def noise(seed: int, count: int) -> list[float]:
    rng = Random(seed)
    return [rng.expovariate(1.0) for _ in range(count)]


def run_of(requests: list[Request], lost: int = 0, loss: Loss = "refused") -> Run:
    """Return a run whose first token is its last, and whose first requests are lost."""
    answers = [
        AnsweredRequest(at_seconds=at, prompt_tokens=1, ttft_seconds=took, seconds=took) for at, took, _ in requests
    ]
    answers[:lost] = [
        AnsweredRequest(at_seconds=one.at_seconds, prompt_tokens=1, lost=loss, error=loss) for one in answers[:lost]
    ]
    return Run(
        key=RunKey("threshold", 0.5, 1),
        case="",
        rate_per_second=1.0,
        instances={},
        stretch=1.0,
        cache_scale=1,
        link_mbps=0,
        answers=tuple(answers),
        readings=(),
        machine=MachineTiming(mean_late=0.0, p99_late=0.0, busy_share=0.0),
        began_at="",
        software="",
    )


@cache
def held(load: float, quantile: float | None) -> float:
    """Return how often the interval of 200 runs held the true value. The time in an M/M/1 system is exponential."""
    mean = 1 / (1 - load)
    true = mean if quantile is None else -mean * math.log(1 - quantile)
    hits = 0
    for seed in range(200):
        values = [took for _, took, _ in queue(seed, load, 4000)]
        values = values[warmup_length(values) :]
        found = mean_of(values) if quantile is None else quantile_of(values, quantile)
        hits += found.low <= true <= found.high
    return hits / 200


@pytest.mark.parametrize("quantile", [None, 0.9, 0.99])
def test_intervals_hold_what_is_true_of_a_queue_about_95_times_of_100(quantile):
    assert 0.91 <= held(0.5, quantile) <= 0.99


def test_an_interval_that_takes_neighbours_for_independent_is_too_short():
    """The negative control: that is why there are batches."""
    hits = 0
    for seed in range(100):
        values = [took for _, took, _ in queue(seed, 0.5, 4000)]
        mean = sum(values) / len(values)
        off = 1.96 * math.sqrt(sum((one - mean) ** 2 for one in values)) / len(values)
        hits += mean - off <= 2.0 <= mean + off

    assert hits < 80


def test_noise_keeps_all_but_the_tenth():
    assert {warmup_length(noise(seed, 1000)) for seed in range(20)} == {100}


def test_a_beginning_unlike_the_rest_is_left_out():
    beginning = [5 + one for one in noise(1, 300)]

    assert 290 <= warmup_length(beginning + noise(2, 700)) <= 320


def test_times_that_rise_until_the_end_leave_no_steady_part():
    assert warmup_length([float(place) for place in range(1000)]) > 500


@pytest.mark.parametrize("count", [0, 1, 4, 5, 29])
def test_a_few_values_have_no_warmup_to_find(count):
    assert warmup_length([1.0] * count) <= 3


@pytest.mark.parametrize("load", [1.2, 1.5, 2.0])
def test_an_overloaded_queue_is_not_steady(load):
    found = [find_steady(run_of(queue(seed, load, 1000))) for seed in range(20)]

    assert sum(one.overloaded for one in found) >= 18
    assert all(one.why_not for one in found if one.overloaded)
    assert all(one.answers == () for one in found if one.why_not and not one.overloaded)


@pytest.mark.parametrize(("load", "most"), [(0.5, 0), (0.8, 1), (0.9, 3)])
def test_a_queue_with_room_is_not_overloaded(load, most):
    """The negative control: even close to its limit a queue that has one seldom grows as an overloaded one does."""
    found = [find_steady(run_of(queue(seed, load, 1000))) for seed in range(40)]

    assert sum(one.overloaded for one in found) <= most
    assert sum(not one.why_not for one in found) >= (38 if load == 0.5 else 28)


def test_requests_that_stay_are_counted():
    """Two arrive a second, and one ends."""
    spans = [(at / 2, float(at)) for at in range(1000)]

    assert growth_share(spans, 0.0, 500.0) == pytest.approx(0.5, abs=0.02)


def test_a_system_that_fills_until_the_first_answer_does_not_grow():
    """Each answer takes 100 s: the first 100 s only fill the system."""
    assert growth_share([(float(at), at + 100.0) for at in range(400)], 0.0, 400.0) == 0.0


def test_what_ends_at_once_does_not_grow():
    assert growth_share([], 0.0, 10.0) == growth_share([(1.0, 2.0)], 0.0, 1.0) == 0.0


def test_a_run_with_few_requests_says_so():
    assert "too few" in find_steady(run_of(queue(1, 0.5, FEWEST))).why_not


def test_a_run_without_any_answer_says_so():
    assert find_steady(run_of(queue(1, 0.5, 20), lost=20)).why_not == "20 of 20 requests were refused"


def test_a_run_that_loses_requests_has_no_steady_part():
    requests = queue(1, 0.5, 1000)

    assert "11 of 1000 requests were refused" in find_steady(run_of(requests, lost=11)).why_not
    assert find_steady(run_of(requests, lost=11)).overloaded
    assert find_steady(run_of(requests, lost=10)).why_not == ""


def test_too_few_requests_are_no_overload():
    assert not find_steady(run_of(queue(1, 2.0, FEWEST))).overloaded


def test_the_steady_part_has_the_ends_within_it():
    found = find_steady(run_of(queue(1, 0.5, 1000)))

    assert found.begin_seconds == found.answers[0].at_seconds
    assert found.served_from_seconds == found.begin_seconds + found.answers[0].seconds
    assert found.served_from_seconds <= found.ends_seconds[0] <= found.ends_seconds[-1] <= found.end_seconds
    assert len(found.ends_seconds) == pytest.approx(len(found.answers), abs=5)


def test_the_end_of_a_run_is_not_counted():
    requests = queue(1, 0.5, 1000)
    last = requests[-1][0]
    whole, found = find_steady(run_of(requests)), find_steady(run_of(requests), 100.0)

    assert (whole.end_seconds, found.end_seconds) == (last, last - 100)
    assert whole.answers[-1].at_seconds == last
    assert last - 110 < found.answers[-1].at_seconds <= last - 100
    assert found.ends_seconds[-1] <= last - 100


def test_a_run_that_is_hardly_longer_than_its_tail_has_no_steady_part():
    found = find_steady(run_of(queue(1, 0.5, 300)), 500.0)

    assert "until 500 s before the last" in found.why_not
    assert not found.overloaded


def test_an_overloaded_run_is_one_however_long_its_tail():
    assert find_steady(run_of(queue(1, 2.0, 1000)), 400.0).overloaded


def test_answers_that_take_longer_than_the_run_leave_no_steady_part():
    requests = [(at, 500.0, at + 500.0) for at, *_ in queue(1, 1.0, 400)]

    assert "before the first answers" in find_steady(run_of(requests)).why_not


def test_the_rate_of_a_poisson_process_lies_in_its_interval():
    hits = 0
    for seed in range(200):
        ends = [ended for *_, ended in queue(seed, 0.5, 1000)]
        rate = rate_of([(one, one, 1.0) for one in ends], 100.0, 1600.0)
        hits += rate.low <= 0.5 <= rate.high

    assert 0.91 <= hits / 200 <= 0.99


def test_quantiles_are_values_that_occurred():
    values = [float(one) for one in range(1, 101)] * 10
    found = quantile_of(values, 0.9)

    assert found.value == 90.0
    assert {found.low, found.high} <= set(values)


def test_a_quotient_is_as_unsure_as_both_of_its_figures():
    found = quotient(Sampled(4.0, 3.6, 4.4), Sampled(2.0, 2.0, 2.0))

    assert found == Sampled(2.0, pytest.approx(1.8), pytest.approx(2.2))
    wider = quotient(Sampled(4.0, 3.6, 4.4), Sampled(2.0, 1.8, 2.2))
    assert (wider.low, wider.high) == (pytest.approx(2 - 0.2 * math.sqrt(2)), pytest.approx(2 + 0.2 * math.sqrt(2)))


def test_what_the_same_requests_do_to_both_systems_is_no_error_of_their_quotient():
    """The negative control: two systems that met other requests."""

    def of(values: list[float], first_seed: int) -> Sampled:
        return of_seeds([(first_seed + n, Sampled(one, one, one)) for n, one in enumerate(values)])

    theirs = [1.0, 2.0, 3.0]
    shared = quotient(of([2 * one for one in theirs], 1), of(theirs, 1))
    others = quotient(of([2 * one for one in theirs], 4), of(theirs, 1))

    assert (shared.low, shared.value, shared.high) == pytest.approx((2.0, 2.0, 2.0))
    assert others.low < 1.0
    assert others.high > 3.0


def test_a_quantile_that_few_values_exceed_has_no_interval():
    values = noise(1, 999)

    assert (quantile_of(values, 0.99).low, quantile_of(values, 0.99).high) == (0.0, math.inf)
    assert quantile_of(noise(1, 1000), 0.99).high < math.inf
    assert quantile_of(values[:100], 0.9).high < math.inf


def test_batches_that_are_alike_by_chance_are_no_proof():
    values = [*range(10)] * 20
    mean, p90 = mean_of(values), quantile_of([float(one) for one in values], 0.9)

    assert mean.high - mean.value == pytest.approx(1.96 * math.sqrt(8.25 / 200))
    assert p90.low < p90.high
    assert mean_of([1.0] * 100).high == 1.0, "what never differs is sure"


def test_seeds_give_an_interval_by_their_spread():
    runs = [Sampled(value, value, value) for value in (11.0, 12.0, 13.0)]

    assert combine(runs) == Sampled(
        12.0, pytest.approx(12 - 4.303 / math.sqrt(3)), pytest.approx(12 + 4.303 / math.sqrt(3))
    )
    assert combine([Sampled(value, value, value) for value in (1.0, 2.0, 3.0)]).low == 0.0, "nothing is less"


def test_fewer_than_three_seeds_keep_their_own_intervals():
    one = Sampled(10.0, 7.0, 14.0)

    assert combine([one]) == one
    assert combine([one, one]) == Sampled(
        10.0, pytest.approx(10 - 3 / math.sqrt(2)), pytest.approx(10 + 4 / math.sqrt(2))
    )
