"""Proves that preferences are read as they were written, and that a header that breaks its form is refused,
never read as something else.
"""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prfaas.errors import RequestError
from prfaas.wire.headers import DATACENTERS, DEADLINE_SECONDS, OFFLOAD
from prfaas.wire.preferences import (
    NO_PREFERENCES,
    Preferences,
    covers,
    forbids,
    read_datacenters,
    read_deadline_seconds,
    read_offload,
    read_preferences,
    write_datacenters,
)

NAMES = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,20}[A-Za-z0-9])?", fullmatch=True)
LISTS = st.lists(NAMES, max_size=8, unique=True)


def test_a_request_without_headers_has_no_preferences():
    assert read_preferences({"x-prfaas-other": "1"}) is NO_PREFERENCES


def test_all_three_headers_are_read():
    headers = {DATACENTERS: "prefer eu-west,eu-north ;forbid  us", OFFLOAD: "always"}
    assert read_preferences(headers) == Preferences(("eu-west", "eu-north"), ("us",), "always")
    assert read_preferences({OFFLOAD: "never"}) == Preferences(offload="never")
    assert read_deadline_seconds("2.5") == 2.5


@given(LISTS, LISTS)
def test_what_is_written_is_read_back(prefer, forbid):
    prefer = [name for name in prefer if not any(covers(other, name) for other in forbid)]
    if text := write_datacenters(prefer, forbid):
        assert read_datacenters(text) == (tuple(prefer), tuple(forbid))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "prefer",
        "prefer ",
        "forbid us;",
        "eu-west",
        "Prefer eu-west",
        "prefers eu-west",
        "forbid us, ",
        "forbid us cn",
        "forbid us; forbid cn",
        "prefer -eu",
        "prefer eu\u0000",
        "forbid " + "a" * 64,
        "forbid " + ",".join(f"d{number}" for number in range(33)),
        "prefer us-east; forbid us",
        "forbid " + "a" * 5000,
    ],
)
def test_a_form_that_is_broken_is_refused_and_names_its_header(text):
    with pytest.raises(RequestError) as refused:
        read_datacenters(text)
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, "invalid_header", DATACENTERS)


@given(st.text())
@example("prefer eu;forbid us")
def test_any_text_is_read_exactly_or_refused(text):
    try:
        prefer, forbid = read_datacenters(text)
    except RequestError:
        return
    assert read_datacenters(write_datacenters(prefer, forbid)) == (prefer, forbid)
    assert prefer or forbid


@pytest.mark.parametrize("text", ["", "Always", "auto ", "no", "never,never"])
def test_an_unknown_wish_about_offloading_is_refused(text):
    with pytest.raises(RequestError, match=OFFLOAD):
        read_offload(text)


@pytest.mark.parametrize(
    "text", ["", "0", "0.0", "-1", "+1", "1e3", "inf", "nan", "86400.1", "99999", "1.", ".5", "٣", "1\n"]
)
def test_a_deadline_is_a_plain_number_above_zero_and_within_a_day(text):
    with pytest.raises(RequestError, match=DEADLINE_SECONDS):
        read_deadline_seconds(text)


@pytest.mark.parametrize(
    ("datacenter", "is_covered"),
    [("us", True), ("US-East-1", True), ("us-east-1", True), ("usa", False), ("eu-us", False), ("", False)],
)
def test_a_name_covers_its_datacenter_and_those_within_it(datacenter, is_covered):
    assert covers("us", datacenter) is covers("US", datacenter) is is_covered


def test_a_wider_place_may_be_the_forbidden_one():
    assert forbids(("us-east-1",), "us")
    assert forbids(("us-east-1",), "US-East")
    assert not forbids(("us-east-1",), "us-east-2")
    assert not forbids(("us-east-1",), "u")


def test_where_anything_is_forbidden_a_place_that_nobody_named_is_too():
    assert forbids(("us",), "us-east-1")
    assert forbids(("us",), "")
    assert not forbids(("us",), "eu")
    assert not forbids((), "")
