"""How an emulated worker is compared with a real engine: by the same requests, with figures that tell both apart."""

import msgspec
import pytest
from benchmarks.emulation import MIXES, Arrival, Mix, Outcome, capacity, compared, drawn, outcome, without

from prfaas.capacity.builtin import DecodeStep
from prfaas.errors import ConfigError
from prfaas.measure.answers import StreamedAnswer, TokenMark
from prfaas.measure.fit import Measurement
from prfaas.wire.profile import Profile

PROFILE = Profile(state_bytes=1, token_bytes=1, fixed_seconds=0.01, token_seconds=1e-4, samples=2, max_tokens=4096)
FOUND = Measurement(
    model="m",
    source="s",
    profile=PROFILE,
    cache_source="c",
    lengths=(),
    decode_context_tokens=1056,
    decode_steps=(DecodeStep(batch=1, seconds=0.002), DecodeStep(batch=8, seconds=0.008)),
    least_prompt_seconds=0.005,
)


def test_a_rate_at_capacity_leaves_no_time():
    short, long = Mix("short", 500, 500, 17), Mix("long", 5120, 5120, 17)
    assert capacity(FOUND, short, 8, 512) == pytest.approx(1 / (0.06 + 16 / 8 * 0.008))
    # Ten chunks a prompt, beside which 16 further tokens are decoded for 1.6 streams: a step of two.
    assert capacity(FOUND, long, 8, 512) == pytest.approx(1 / (0.522 + 10 * (0.002 + 0.006 / 7)))
    with pytest.raises(ConfigError, match="no decode step of 8 streams"):
        capacity(msgspec.structs.replace(FOUND, decode_steps=FOUND.decode_steps[:1]), short, 8, 512)


def test_requests_come_at_the_rate_with_the_lengths_of_their_mix_and_the_same_again():
    for mix in MIXES:
        made = drawn(mix, 20.0, 100.0, 3)
        assert len(made) == pytest.approx(2000, rel=0.1)
        assert made == drawn(mix, 20.0, 100.0, 3) != drawn(mix, 20.0, 100.0, 4)
        lengths = [one.prompt_tokens for one in made]
        assert mix.shortest <= min(lengths) < 1.1 * mix.shortest
        assert 0.9 * mix.longest < max(lengths) <= mix.longest


def test_waits_begin_when_a_request_was_due_and_not_when_it_was_sent():
    arrivals = [Arrival(1.0, 10), Arrival(2.0, 10)]
    answers = [
        StreamedAnswer(101.4, (TokenMark(101.5, 1), TokenMark(102.0, 4)), 10, 0),
        StreamedAnswer(102.0, (TokenMark(102.1, 1), TokenMark(103.0, 4)), 10, 0),
    ]
    seen = outcome(arrivals, 100.0, answers)
    assert seen.mean_seconds == pytest.approx((0.5 + 0.1) / 2)
    assert seen.p90_seconds == pytest.approx(0.5)
    assert seen.tokens_per_second == pytest.approx(8 / 2)


def test_the_workers_own_front_is_taken_off_a_profile():
    own = Profile(state_bytes=1, token_bytes=1, fixed_seconds=0.002, token_seconds=1e-6, squared_seconds=1e-12)
    left = without(FOUND, own)
    assert left.profile.fixed_seconds == pytest.approx(0.008)
    assert left.profile.token_seconds == pytest.approx(0.99e-4)
    assert left.profile.squared_seconds == 0, "never less"
    assert left.least_prompt_seconds == pytest.approx(0.003)


def test_each_figure_stands_beside_that_of_the_real_engine_and_by_how_much_it_is_off():
    made = list(compared("short", Outcome(0.1, 0.2, 50.0), Outcome(0.104, 0.18, 50.0), 5.0))
    assert [(one.value, one.rival_value) for one in made[::2]] == [(104, 100), (180, 200), (50, 50)]
    assert [one.value for one in made[1::2]] == pytest.approx([4, 10, 0])
    assert {one.reach for one in made[1::2]} == {5.0}
