"""Proves of the choice of a codec: it never slows a link by its own model, a faster link never gets a heavier codec, a
link on the edge does not flap, nothing lossy is chosen unless it is set; and of the estimates that they follow
real frames and forget them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.routing.compression import (
    ADOPT_GAIN,
    HALF_LIFE_SECONDS,
    CodecFacts,
    CodecSpeed,
    Estimate,
    choose_codec,
    time_share,
)
from prfaas.wire.frames import Codec

ALL = (Codec.NONE, Codec.LOSSLESS, Codec.INT8)
SPEED = CodecSpeed(encode_mbps=8000, decode_mbps=16000, ratio=1.4)

positive = st.floats(1e-3, 1e6)
speeds = st.builds(CodecSpeed, encode_mbps=positive, decode_mbps=positive, ratio=st.floats(0.5, 10))
links = st.builds(
    CodecFacts,
    setting=st.just("auto"),
    delivery_mbps=positive | st.sampled_from([0.0, math.nan, math.inf, -1.0]) | st.none(),
    cores=st.floats(0, 8),
    lossless=speeds,
    peer_decodes=st.sets(st.sampled_from([*ALL, 3, 200])).map(tuple),
    current=st.sampled_from(ALL),
)


def link(delivery_mbps: float | None, *, setting="auto", current=Codec.NONE, cores=1.0, peer=ALL) -> CodecFacts:
    return CodecFacts(
        setting=setting,
        delivery_mbps=delivery_mbps,
        cores=cores,
        lossless=SPEED,
        peer_decodes=tuple(int(codec) for codec in peer),
        current=current,
    )


def replaced(facts: CodecFacts, **changes) -> CodecFacts:
    return CodecFacts(**{name: getattr(facts, name) for name in CodecFacts.__struct_fields__} | changes)


@given(links)
def test_auto_never_slows_a_link_nor_loses_anything_nor_sends_what_the_peer_cannot_read(facts):
    choice = choose_codec(facts)
    assert choice.reason
    if choice.codec is Codec.NONE:
        return
    assert choice.codec is Codec.LOSSLESS
    assert Codec.LOSSLESS in facts.peer_decodes
    assert facts.delivery_mbps is not None
    share = time_share(facts.lossless, facts.delivery_mbps, facts.cores)
    assert share < (1 if facts.current is Codec.LOSSLESS else 1 - ADOPT_GAIN)


@given(links, positive, positive)
def test_a_faster_link_never_gets_a_heavier_codec(facts, one, other):
    slow, fast = sorted((one, other))
    at_slow = choose_codec(replaced(facts, delivery_mbps=slow)).codec
    assert choose_codec(replaced(facts, delivery_mbps=fast)).codec <= at_slow


@given(links)
def test_what_was_chosen_is_chosen_again(facts):
    chosen = choose_codec(facts).codec
    assert choose_codec(replaced(facts, current=chosen)).codec is chosen


@given(speeds, st.floats(1, 1e5), st.floats(0.1, 8))
def test_time_share_is_that_of_the_slowest_stage(speed, delivery_mbps, cores):
    stages = (1 / (speed.encode_mbps * cores), 1 / (speed.ratio * delivery_mbps), 1 / (speed.decode_mbps * cores))
    assert time_share(speed, delivery_mbps, cores) == pytest.approx(max(stages) * delivery_mbps)


def test_a_slow_link_is_compressed_and_a_fast_one_is_not():
    assert choose_codec(link(200)).codec is Codec.LOSSLESS
    assert choose_codec(link(1000)).codec is Codec.LOSSLESS
    assert choose_codec(link(10_000)).codec is Codec.NONE


def test_less_processor_time_means_less_compression():
    assert choose_codec(link(3000, cores=1.0)).codec is Codec.LOSSLESS
    assert choose_codec(link(3000, cores=0.3)).codec is Codec.NONE
    assert choose_codec(link(3000, cores=0.0)).codec is Codec.NONE


@pytest.mark.parametrize("delivery_mbps", [None, 0.0, -5.0, math.nan, math.inf])
def test_does_not_compress_on_a_link_that_was_not_measured(delivery_mbps):
    assert choose_codec(link(delivery_mbps)).codec is Codec.NONE


def test_a_rate_that_wavers_does_not_change_the_codec_each_time():
    edge = SPEED.encode_mbps * (1 - ADOPT_GAIN / 2)  # saves half of what would take it up
    codec, changes = Codec.NONE, 0
    for delivery_mbps in [edge * 0.5, *[edge * 0.97, edge * 1.03] * 20]:
        chosen = choose_codec(link(delivery_mbps, current=codec)).codec
        codec, changes = chosen, changes + (chosen is not codec)
    assert (codec, changes) == (Codec.LOSSLESS, 1)


@pytest.mark.parametrize(
    ("setting", "codec"), [("none", Codec.NONE), ("lossless", Codec.LOSSLESS), ("int8", Codec.INT8)]
)
@pytest.mark.parametrize("delivery_mbps", [None, 1.0, 1e6])
def test_takes_a_named_codec_on_any_link(setting, codec, delivery_mbps):
    assert choose_codec(link(delivery_mbps, setting=setting)).codec is codec


def test_does_not_send_a_named_codec_to_a_peer_that_cannot_read_it():
    assert choose_codec(link(1, setting="lossless", peer=[Codec.NONE])).codec is Codec.NONE
    # Linear states go through LOSSLESS under INT8.
    assert choose_codec(link(1, setting="int8", peer=[Codec.NONE, Codec.INT8])).codec is Codec.NONE
    assert choose_codec(link(1, setting="int8", peer=[Codec.NONE, Codec.LOSSLESS])).codec is Codec.NONE


def test_an_estimate_begins_with_what_was_measured_at_the_start():
    found = Estimate(start=SPEED, at_seconds=5.0).speed(1000.0)
    assert (found.encode_mbps, found.decode_mbps) == pytest.approx((SPEED.encode_mbps, SPEED.decode_mbps))
    assert found.ratio == pytest.approx(SPEED.ratio)


def test_an_estimate_follows_real_frames_and_forgets_them():
    estimate = Estimate(start=SPEED, at_seconds=0.0)
    for second in range(100):  # 1 Gbit/s of cores, hardly smaller
        estimate = estimate.observe(125_000_000, 120_000_000, 1.0, float(second))
    seen = estimate.speed(99.0)
    assert seen.encode_mbps == pytest.approx(1000, rel=0.01)
    assert seen.ratio == pytest.approx(125 / 120, rel=0.01)
    later = estimate.speed(99.0 + 20 * HALF_LIFE_SECONDS)
    assert later.encode_mbps == pytest.approx(SPEED.encode_mbps, rel=0.01)
    assert later.ratio == pytest.approx(SPEED.ratio, rel=0.01)


def test_a_codec_that_had_a_bad_minute_is_tried_again():
    estimate = Estimate(start=SPEED, at_seconds=0.0).observe(10**9, 10**9, 100.0, 0.0)
    facts = link(200)
    assert choose_codec(replaced(facts, lossless=estimate.speed(1.0))).codec is Codec.NONE
    assert choose_codec(replaced(facts, lossless=estimate.speed(3600.0))).codec is Codec.LOSSLESS


@given(speeds, st.lists(st.tuples(st.integers(1, 10**9), st.integers(1, 10**9), st.floats(0, 100), positive)))
def test_an_estimate_is_always_a_speed(start, frames):
    estimate = Estimate(start=start, at_seconds=0.0)
    for tensor_bytes, wire_bytes, seconds, now_seconds in frames:  # the clock may even go back
        estimate = estimate.observe(tensor_bytes, wire_bytes, seconds, now_seconds)
    found = estimate.speed(1.0)
    assert all(math.isfinite(x) and x > 0 for x in (found.encode_mbps, found.decode_mbps, found.ratio))
