"""Proves the readers of published traces: their quirks, and that a torn or empty one is named with its line."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import ConfigError
from prfaas.simulate.arrivals import at_rate, read_trace

MOONCAKE = [
    '{"timestamp": 0, "input_length": 600, "output_length": 50, "hash_ids": [0, 1]}',
    '{"timestamp": 0, "input_length": 512, "output_length": 0, "hash_ids": [0]}',
    '{"timestamp": 3000, "input_length": 1500, "output_length": 7, "hash_ids": [0, 2, 3]}',
]
AZURE = [
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2023-11-16 18:17:03.9799600,4808,10",
    "2023-11-16 18:17:04.0319600,3180,8",
]


def test_mooncake_requests_of_one_stamp_are_spread_until_the_next():
    found = read_trace("t", MOONCAKE)
    assert [one.at_seconds for one in found] == [0.0, 1.5, 3.0]
    assert [(one.input_tokens, one.output_tokens, list(one.blocks)) for one in found] == [
        (600, 50, [0, 1]),
        (512, 1, [0]),
        (1500, 7, [0, 2, 3]),
    ]


def test_azure_stamps_have_seven_decimals_and_no_prefixes():
    found = read_trace("t", [line + "\r\n" for line in AZURE])
    assert found[1].at_seconds == pytest.approx(0.052)
    assert [(one.input_tokens, one.output_tokens, list(one.blocks)) for one in found] == [(4808, 10, []), (3180, 8, [])]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "t is empty"),
        (["", " \n"], "t is empty"),
        (["hello"], "t, line 1: this is no trace"),
        (AZURE[:1], "t has no requests"),
        ([*MOONCAKE, MOONCAKE[0][:30]], "t, line 4: .*torn"),
        ([*MOONCAKE, "null"], "t, line 4: .*torn"),
        ([MOONCAKE[0].replace("[0, 1]", "[0]")], "t, line 1: 1 hash_ids for input_length 600; .* would be 2"),
        ([MOONCAKE[2], MOONCAKE[0]], "request 2: it comes before the one above"),
        ([*AZURE, "2023-11-16 18:17:04.0319600,31"], "t, line 4: .*torn"),
        ([*AZURE, "2023-11-16 18:17:05.1,many,8"], "t, line 4: .*torn"),
        ([*AZURE, "2023-11-16 18:17:05.1,0,8"], "request 3: its input length is 0"),
        ([*AZURE, "2023-11-16 18:17:03.9,10,8"], "request 3: it comes before"),
    ],
)
def test_a_trace_that_makes_no_sense_is_named_with_its_place(lines, message):
    with pytest.raises(ConfigError, match=message):
        read_trace("t", lines)


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused_in_one_sentence(text):
    with suppress(ConfigError):
        assert all(one.input_tokens > 0 for one in read_trace("t", text.splitlines()))


def test_a_trace_served_at_another_rate_keeps_its_shape():
    found = list(at_rate(read_trace("t", MOONCAKE), 4.0))
    assert [one.at_seconds for one in found] == [0.0, 0.25, 0.5]


def test_a_rate_needs_two_different_times():
    with pytest.raises(ConfigError, match="within no time"):
        at_rate(read_trace("t", MOONCAKE[:1]), 1.0)
