"""How an emulated worker is compared with a real engine: by the same requests, with figures that tell both apart."""

import msgspec
import pytest
from benchmarks.emulation import (
    KINDS,
    LENGTHS,
    MIXES,
    Mix,
    Outcome,
    Pair,
    capacity,
    compared,
    drawn,
    outcome,
    simulated_seconds,
    without,
)

from prfaas.capacity.builtin import DecodeStep
from prfaas.capacity.profile import Sample, prefill_seconds
from prfaas.errors import ConfigError
from prfaas.measure.answers import StreamedAnswer, TokenMark
from prfaas.measure.curve import Point, PrefillTimes
from prfaas.measure.fit import FEW_TOKENS, LengthTimes, Measurement, times_of
from prfaas.simulate.request import Arrival
from prfaas.wire.profile import Profile

PROFILE = Profile(state_bytes=1, token_bytes=1, fixed_seconds=0.01, token_seconds=1e-4, samples=2, max_tokens=4096)


def times_at(tokens: int) -> LengthTimes:
    """Return what was measured: a tenth more than the fit says, but for the longest."""
    fit = prefill_seconds(PROFILE, tokens)
    seconds = (1.1 if tokens < 8192 else 1.0) * fit
    spread = {"quickest_seconds": seconds, "slowest_seconds": seconds}
    return LengthTimes(tokens=tokens, repeats=3, near=3, seconds=seconds, fitted_seconds=fit, **spread)


FOUND = Measurement(
    model="m",
    source="s",
    profile=PROFILE,
    cache_source="c",
    lengths=tuple(times_at(tokens) for tokens in (512, 1024, 8192)),
    decode_context_tokens=1056,
    decode_steps=(DecodeStep(batch=1, seconds=0.002), DecodeStep(batch=8, seconds=0.008)),
    least_prompt_seconds=0.005,
)


def test_a_rate_at_capacity_leaves_no_time():
    short, long = Mix("short", 512, 512, 17), Mix("long", 8192, 8192, 17)
    assert capacity(FOUND, short, 8, 512) == pytest.approx(1 / (1.1 * 0.0612 + 16 / 8 * 0.008)), "not by the fit"
    # Sixteen chunks a prompt, beside each of which one further token is decoded for one stream.
    assert capacity(FOUND, long, 8, 512) == pytest.approx(1 / (0.8292 + 16 * 0.002))
    with pytest.raises(ConfigError, match="no decode step of 8 streams"):
        capacity(msgspec.structs.replace(FOUND, decode_steps=FOUND.decode_steps[:1]), short, 8, 512)


def test_requests_come_at_the_rate_with_the_lengths_of_their_mix_and_the_same_again():
    for mix in MIXES:
        made = drawn(mix, 20.0, 100.0, 3)
        assert len(made) == pytest.approx(2000, rel=0.1)
        assert made == drawn(mix, 20.0, 100.0, 3) != drawn(mix, 20.0, 100.0, 4)
        lengths = [one.input_tokens for one in made]
        assert mix.shortest <= min(lengths) < 1.1 * mix.shortest
        assert 0.9 * mix.longest < max(lengths) <= mix.longest


def test_waits_begin_when_a_request_was_due_and_not_when_it_was_sent():
    arrivals = [Arrival(1.0, 10, 4), Arrival(2.0, 10, 4)]
    answers = [
        StreamedAnswer(101.4, (TokenMark(101.5, 1), TokenMark(102.0, 4)), 10, 0),
        StreamedAnswer(102.0, (TokenMark(102.1, 1), TokenMark(103.0, 4)), 10, 0),
    ]
    seen = outcome(arrivals, 100.0, answers)
    assert seen.mean_seconds == pytest.approx((0.5 + 0.1) / 2)
    assert seen.p90_seconds == pytest.approx(0.5)
    assert seen.tokens_per_second == pytest.approx(8 / 2)


def test_all_lengths_of_the_benchmark_are_told_apart():
    samples = [Sample(tokens, prefill_seconds(PROFILE, tokens)) for tokens in LENGTHS]
    assert [one.tokens for one in times_of(samples, PROFILE)] == list(LENGTHS)
    assert LENGTHS[0] <= min(mix.shortest for mix in MIXES)
    assert LENGTHS[-1] >= max(mix.longest for mix in MIXES)


OWN = PrefillTimes.through([Point(FEW_TOKENS, 0.002), Point(8192, 0.003)], Profile(state_bytes=1, token_bytes=1))


def test_the_workers_own_front_is_taken_off_the_measured_points():
    left = without(FOUND, OWN)
    for one, measured in zip(left.lengths, FOUND.lengths, strict=True):
        assert one.seconds == pytest.approx(measured.seconds - OWN.prompt_seconds(one.tokens))
        assert left.times.prefill.prompt_seconds(one.tokens) == pytest.approx(one.seconds)
    assert left.least_prompt_seconds == pytest.approx(0.003)
    slow = PrefillTimes.through([Point(1, 99.0)], PROFILE)
    assert min(one.seconds for one in without(FOUND, slow).lengths) > 0, "never nothing"


def test_the_simulator_gets_the_same_requests_with_the_times_of_the_emulated_worker():
    bare = without(FOUND, OWN)
    apart, together = ([Arrival(1.0, 512, 1), Arrival(at, 512, 1)] for at in (3.0, 1.0))
    alone, own = FOUND.lengths[0].seconds, OWN.prompt_seconds(512)
    assert simulated_seconds(bare, OWN, 1.0, KINDS["worker"], apart) == pytest.approx(alone)
    stretched = simulated_seconds(bare, OWN, 2.0, KINDS["worker"], apart)
    assert stretched == pytest.approx(2 * (alone - own) + own), "the front is as quick as ever"
    assert simulated_seconds(bare, OWN, 1.0, KINDS["worker"], together) > 1.4 * alone, "one waits"


def test_each_figure_stands_beside_that_of_the_real_engine_and_by_how_much_it_is_off():
    made = list(compared("short", Pair(Outcome(0.1, 0.2, 50.0), Outcome(0.104, 0.18, 50.0), 0.1092), 10.0))
    assert [(one.value, one.rival_value) for one in made[:6:2]] == [(104, 100), (180, 200), (50, 50)]
    assert [one.value for one in made[1::2]] == pytest.approx([4, 10, 0])
    assert {one.reach for one in made[1::2]} == {10.0}
    assert (made[6].value, made[6].reach) == (pytest.approx(5), 5.0), "the simulator is off the emulated worker"
