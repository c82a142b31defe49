"""A prefix is fetched exactly where it saves a good share of the time, and never where anything is not known."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.routing.affinity import MARGIN, PrefixFacts, computing_seconds, fetching_seconds, pays
from prfaas.wire.profile import Profile

PROFILE = Profile(
    state_bytes=10_000_000, token_bytes=8_000, fixed_seconds=0.01, token_seconds=0.001, squared_seconds=1e-8, samples=9
)
FACTS = PrefixFacts(
    prompt_tokens=10_000,
    cached_tokens=2_000,
    source_tokens=8_000,
    profile=PROFILE,
    link_mbps=200.0,
    round_trip_seconds=0.03,
)


def facts(**fields: object) -> PrefixFacts:
    return msgspec.structs.replace(FACTS, **fields)


def test_the_formulas_of_the_module():
    # 6,000 tokens of 8,000 bytes, and the states, at 25 MB/s; three round trips.
    assert fetching_seconds(FACTS) == pytest.approx(3 * 0.03 + (48_000_000 + 10_000_000) / 25e6)
    # The fixed part is paid either way; of the squares, those between 2,000 and 8,000 tokens.
    assert computing_seconds(FACTS) == pytest.approx(6.0 + 1e-8 * (8_000**2 - 2_000**2))


def test_fetches_by_a_quick_link_and_not_by_a_slow_one():
    assert pays(FACTS)
    assert not pays(facts(link_mbps=100.0))
    assert pays(facts(link_mbps=100.0, profile=msgspec.structs.replace(PROFILE, token_seconds=0.01)))


def test_a_prompt_that_is_fetched_almost_wholly_still_pays_the_fixed_part_for_its_rest():
    dear = msgspec.structs.replace(PROFILE, fixed_seconds=100.0)
    assert computing_seconds(facts(profile=dear)) == pytest.approx(computing_seconds(FACTS))


@pytest.mark.parametrize(
    "unknown",
    [
        {"link_mbps": 0.0},
        {"link_mbps": math.inf},
        {"link_mbps": math.nan},
        {"profile": Profile(state_bytes=1, token_bytes=1)},
        {"source_tokens": 2_000},
        {"source_tokens": 0},
    ],
)
def test_what_is_not_known_or_brings_nothing_is_not_fetched(unknown: dict[str, object]):
    assert not pays(facts(**unknown))


@given(
    prompt=st.integers(2, 200_000),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    mbps=st.floats(0.1, 1e6),
    round_trip=st.floats(0, 1),
    token_seconds=st.floats(0, 0.1),
)
def test_it_saves_the_margin_whenever_it_is_chosen(
    prompt: int, ends: tuple[float, float], mbps: float, round_trip: float, token_seconds: float
):
    cached, source = (int(end * (prompt - 1)) for end in ends)
    case = facts(
        prompt_tokens=prompt,
        cached_tokens=cached,
        source_tokens=source,
        link_mbps=mbps,
        round_trip_seconds=round_trip,
        profile=msgspec.structs.replace(PROFILE, token_seconds=token_seconds),
    )
    if pays(case):
        assert source > cached
        assert fetching_seconds(case) < (1 - MARGIN) * computing_seconds(case)
        assert pays(msgspec.structs.replace(case, link_mbps=2 * mbps)), "a quicker link pays too"
