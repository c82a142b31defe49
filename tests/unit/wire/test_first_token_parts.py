"""Proves that the parts of a time to the first token add up to it, whatever overlaps, and that what nobody knows is
never a number.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import BadInputError
from prfaas.wire.trace import (
    PARTS,
    UNKNOWN,
    LegTimes,
    Stamps,
    at_gateway,
    first_token_moments,
    read_parts,
    split,
    write_parts,
)

times = st.floats(-10, 10)
maybe = st.none() | times
LOCAL = Stamps(admitted=1.0, prefill_seconds=2.0, computed=4.0, step_began=3.0)
REMOTE = Stamps(
    admitted=0.5,
    prefill_seconds=2.0,
    computed=6.5,
    step_began=6.0,
    fetched=5.5,
    first_byte=1.5,
    source_computed=3.5,
    is_remote=True,
)


def parts_of(stamps: Stamps, ended: float = 7.0) -> dict[str, float]:
    return split(0.0, ended, first_token_moments(stamps))


def parts_with(**parts: float) -> dict[str, float]:
    """All parts, 0 but for these."""
    return dict.fromkeys(PARTS, 0.0) | parts


def test_a_local_request_waits_prefills_and_draws_and_has_no_link():
    assert parts_of(LOCAL) == parts_with(prefill_queue=2.0, prefill=2.0, first_step=3.0)


def test_a_transfer_that_overlaps_with_its_prefill_counts_from_the_prefills_end():
    assert parts_of(REMOTE) == parts_with(
        prefill_queue=1.5, prefill=2.0, transfer=2.0, decode_queue=0.5, first_step=1.0
    )


def test_a_cache_that_waits_for_its_destination_and_then_for_the_link_says_so():
    late = REMOTE._replace(admitted=4.0, first_byte=4.75)
    expected = parts_with(
        prefill_queue=1.5, prefill=2.0, decode_queue=1.0, link_wait=0.75, transfer=0.75, first_step=1.0
    )
    assert parts_of(late) == pytest.approx(expected)


def test_a_prefix_is_fetched_before_the_rest_is_prefilled():
    prefix = LOCAL._replace(computed=6.0, fetched=3.0, first_byte=2.0)
    expected = parts_with(prefill_queue=2.0, link_wait=1.0, transfer=1.0, prefill=2.0, first_step=1.0)
    assert parts_of(prefix) == expected


def test_the_wait_for_a_cache_that_did_not_come_is_a_wait_for_the_link():
    lost = LOCAL._replace(computed=6.0, fetched=3.0)
    assert parts_of(lost) == parts_with(prefill_queue=2.0, link_wait=2.0, prefill=2.0, first_step=1.0)


def test_what_a_source_does_not_report_is_absent_and_its_time_is_unknown():
    found = parts_of(REMOTE._replace(source_computed=None))
    expected = {"gateway_queue": 0.0, "first_step": 1.0, UNKNOWN: 6.0}
    assert found == expected, "not even the transfer, which overlaps with the prefill"


@given(st.builds(Stamps, times, times, times, times, maybe, maybe, maybe, st.booleans()), times, times)
def test_the_parts_add_up_and_none_is_negative(stamps: Stamps, began: float, ended: float):
    found = split(began, ended, first_token_moments(stamps))
    assert sum(found.values()) == pytest.approx(max(0.0, ended - began))
    assert all(seconds >= 0 for seconds in found.values())
    assert found.keys() <= {*PARTS, UNKNOWN}
    assert (found.keys() == set(PARTS)) == (UNKNOWN not in found)


@given(times, st.builds(LegTimes, st.floats(0, 10), maybe, st.just(True)), times)
def test_the_gateways_parts_add_up_to_what_it_measured(queue: float, leg: LegTimes, worker_seconds: float):
    worker = split(0.0, worker_seconds, first_token_moments(LOCAL))
    for parts in (worker, {}):
        found = at_gateway(queue, leg, parts)
        assert sum(found.values()) == pytest.approx(max(0.0, queue) + leg.seconds, rel=0.05)
        assert all(seconds >= 0 for seconds in found.values())


def test_the_way_to_a_worker_counts_as_first_step_and_the_rest_of_a_whole_answer_as_nothing():
    worker = parts_with(prefill=2.0, first_step=0.5)
    assert at_gateway(0.25, LegTimes(3.0), worker) == parts_with(gateway_queue=0.25, prefill=2.0, first_step=1.0)
    assert at_gateway(0.25, LegTimes(9.0, is_stream=False), worker) == worker | {"gateway_queue": 0.25}


def test_of_an_engine_that_reports_nothing_the_gateway_knows_its_queue_and_the_sources_leg():
    assert at_gateway(0.25, LegTimes(3.0, 2.0), {}) == {"gateway_queue": 0.25, "prefill": 2.0, UNKNOWN: 1.0}
    assert at_gateway(0.25, LegTimes(3.0), {}) == {"gateway_queue": 0.25, UNKNOWN: 3.0}
    assert at_gateway(0.25, LegTimes(3.0, is_stream=False), {}) == {}
    assert at_gateway(0.25, LegTimes(3.0), parts_with(prefill=4.0)) == {"gateway_queue": 0.25, UNKNOWN: 3.0}, (
        "longer than all"
    )


def test_a_header_brings_back_what_was_written():
    parts = {"gateway_queue": 0.001234, "prefill": 2.0, UNKNOWN: 0.5}
    assert write_parts(parts) == "gateway_queue=0.001234, prefill=2.000000, unknown=0.500000"
    assert read_parts(write_parts(parts)) == parts


@pytest.mark.parametrize(
    "text",
    [
        *("", "prefill", "prefill=", "prefill=-1.0", "prefill=nan", "prefill=1e9", "prefill=\u0663", "sleep=1.0"),
        *("prefill=1.0, prefill=2.0", "prefill=1.0,transfer=2.0", "x" * 500),
    ],
)
def test_anything_else_is_refused_in_a_sentence(text: str):
    with pytest.raises(BadInputError, match=r"no part of|no number of seconds|more than a header"):
        read_parts(text)
