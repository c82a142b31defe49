"""The optimum of equations (3), (4) and (7): it balances, follows links, and says when too little is known."""

import math
from itertools import pairwise
from statistics import NormalDist

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import InternalError
from prfaas.routing.feedforward import HORIZON_SECONDS, NO_QUEUES, PoolFacts, Waiting, optimum, sustainable_in_hub
from prfaas.routing.lengths import BINS, EDGES, Bins, LengthTally, demand_of
from prfaas.wire.profile import Profile

FAST = Profile(
    state_bytes=180_400_000, token_bytes=17_143, fixed_seconds=0.3891, token_seconds=4.107e-5,
    squared_seconds=9.476e-11, samples=9,
)  # fmt: skip
SLOW = Profile(
    state_bytes=180_400_000, token_bytes=17_143, fixed_seconds=0.39, token_seconds=1.07e-4, squared_seconds=1e-9,
    samples=9,
)  # fmt: skip
BOUNDS = (256.0, 131_072.0)
NORMAL = NormalDist(9.9, 1.0)


def pools(fast: int = 4, slow: int = 3) -> list[PoolFacts]:
    return [
        PoolFacts(cluster="eu", ready_instances=fast, profile=FAST),
        PoolFacts(cluster="hub", ready_instances=slow, profile=SLOW),
    ]


def paper_lengths(bins: Bins = BINS):
    cumulated = [NORMAL.cdf(math.log(min(max(edge, 128.0), 131_072.0))) for edge in bins.edges]
    return demand_of(bins, [1e6 * (b - a) for a, b in pairwise(cumulated)])


def best(
    mbps: float = 1e5, arrivals: float | None = None, of: list[PoolFacts] | None = None, waiting: Waiting = NO_QUEUES
) -> float:
    demand = paper_lengths()
    assert demand is not None
    found = optimum(demand, pools() if of is None else of, {"eu": mbps}, arrivals, BOUNDS, waiting)
    assert found is not None
    return found


# --- the histogram ----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(2, 1_000_000), min_size=1, max_size=60), st.floats(0, 2e6), st.floats(0, 2e6))
def test_what_lies_above_a_threshold_only_falls_as_it_rises_and_everything_lies_above_nothing(lengths, one, other):
    tally = LengthTally()
    for tokens in lengths:
        tally.add(tokens)
    demand = demand_of(BINS, tally.counts)
    assert demand is not None
    lower, higher = demand.above(min(one, other)), demand.above(max(one, other))
    assert all(a >= b - 1e-9 * abs(a) for a, b in zip(lower, higher, strict=True))
    everything = demand.above(0)
    assert everything.share == pytest.approx(1)
    assert everything.tokens == pytest.approx(sum(lengths) / len(lengths), rel=0.05)
    assert everything.squares == pytest.approx(sum(n * n for n in lengths) / len(lengths), rel=0.1)


def test_a_tally_counts_every_length_once_and_no_prompt_that_is_cached_whole():
    tally = LengthTally()
    for tokens in (0, 1, 2, 1000, 1 << 24, 1 << 30):
        tally.add(tokens)
    assert sum(tally.counts) == 5
    assert tally.counts[-1] == 2
    place = next(i for i, count in enumerate(tally.counts) if count and EDGES[i] > 500)
    assert EDGES[place] < 1000 <= EDGES[place + 1]


def test_within_a_bin_lengths_are_evenly_spread():
    demand = demand_of(Bins([0.0, 10.0]), [4])
    assert demand is not None
    above = demand.above(4.0)
    assert above.share == pytest.approx(0.6)
    assert above.tokens == pytest.approx(0.6 * 7)
    assert above.squares == pytest.approx((1000 - 64) / 30)


@pytest.mark.parametrize("counts", [[0, 0], [1, -1], [math.inf, 1], [math.nan, 1], [1], [1, 2, 3], []])
def test_counts_that_make_no_sense_are_no_demand(counts):
    assert demand_of(Bins([0.0, 10.0, 20.0]), counts) is None


@pytest.mark.parametrize("edges", [[], [1.0], [2.0, 1.0], [0.0, 0.0], [-1.0, 1.0], [0.0, math.inf], [0.0, math.nan]])
def test_edges_that_do_not_rise_are_a_mistake_of_ours(edges):
    with pytest.raises(InternalError):
        Bins(edges)


# --- the optimum ------------------------------------------------------------------------------------------------------


def busy_seconds(threshold_tokens: float) -> tuple[float, float]:
    """Return how long a request keeps the offload pool busy in the mean, and the local one."""
    demand = paper_lengths()
    assert demand is not None
    above, everything = demand.above(threshold_tokens), demand.above(0)
    return above.seconds(FAST) / 4, (everything.seconds(SLOW) - above.seconds(SLOW)) / 3


def test_at_the_optimum_both_sides_are_equally_busy():
    offload, local = busy_seconds(best())
    assert offload == pytest.approx(local, rel=3e-3)


@pytest.mark.parametrize("waiting", [Waiting(3.0, 0.0), Waiting(0.0, 3.0), Waiting(1.5, 12.0)])
def test_at_the_optimum_both_sides_are_equally_busy_with_what_waits_besides(waiting):
    offload, local = busy_seconds(best(waiting=waiting))
    assert offload * (1 + waiting.away_seconds / HORIZON_SECONDS) == pytest.approx(
        local * (1 + waiting.hub_seconds / HORIZON_SECONDS), rel=3e-3
    )
    assert offload != pytest.approx(local, rel=0.1), "negative control"


def test_a_side_that_computes_more_than_lengths_count_gets_less():
    """As where a prefix is cached in the hub, but not at the instance that prefills."""
    hub, away = (
        [msgspec.structs.replace(one, work=1.25) if one.cluster == name else one for one in pools()]
        for name in ("hub", "eu")
    )
    assert best(of=hub) < best() < best(of=away)
    both = [msgspec.structs.replace(one, work=1.25) for one in pools()]
    assert best(of=both) == pytest.approx(best(), rel=2e-3), "negative control"


def test_equal_waits_on_both_sides_move_nothing():
    assert best(waiting=Waiting(7.0, 7.0)) == pytest.approx(best(), rel=2e-3)


def test_without_local_pools_what_waits_away_is_done_beside_what_arrives():
    fast_only = pools()[:1]
    queue = Waiting(0.0, HORIZON_SECONDS / 2)
    assert best(arrivals=2.0, of=fast_only, waiting=queue) == best(arrivals=3.0, of=fast_only)
    assert best(arrivals=2.0, of=fast_only) < best(arrivals=3.0, of=fast_only), "negative control"


def test_the_hub_keeps_up_with_what_arrives_and_with_what_waits_there():
    demand = paper_lengths()
    assert demand is not None
    calm, queued = (sustainable_in_hub(demand, pools(), 2.0, BOUNDS, Waiting(seconds, 0.0)) for seconds in (0.0, 3.0))
    assert 2.0 * busy_seconds(calm)[1] == pytest.approx(1.0, rel=3e-3)
    assert 2.0 * busy_seconds(queued)[1] == pytest.approx(1 / 1.5, rel=3e-3)


def test_bins_of_any_width_find_the_same_optimum():
    fine = paper_lengths(Bins([128 + i * (131_072 - 128) / 5000 for i in range(5001)]))
    assert fine is not None
    assert optimum(fine, pools(), {"eu": 1e5}, None, BOUNDS) == pytest.approx(best(), rel=0.005)


def test_a_link_that_is_short_raises_it():
    assert best(5e3) > 1.2 * best(1e5)


@given(st.floats(0.01, 100))
def test_more_than_both_sides_can_do_is_shared_by_both(arrivals):
    """A bound to what the link carries would leave all of the excess at home."""
    assert best(5e3, arrivals) == best(5e3)


@given(st.floats(1, 1e6), st.floats(1, 1e6), st.floats(0.01, 100), st.floats(0.01, 100))
def test_it_falls_with_the_link_and_without_local_pools_rises_with_the_arrivals(
    one_mbps, other_mbps, one_rate, other_rate
):
    assert best(max(one_mbps, other_mbps)) <= best(min(one_mbps, other_mbps)) + 1
    fast_only = pools()[:1]
    assert best(5e3, min(one_rate, other_rate), fast_only) <= best(5e3, max(one_rate, other_rate), fast_only) + 1


def test_more_offload_instances_lower_it_and_more_local_ones_raise_it():
    assert best(of=pools(fast=8)) < best() < best(of=pools(slow=6))


def test_a_pool_in_a_second_cluster_counts_by_what_it_can_do():
    apart = [*pools(fast=2), PoolFacts(cluster="us", ready_instances=2, profile=FAST)]
    demand = paper_lengths()
    assert demand is not None
    assert optimum(demand, apart, {"eu": 1e5, "us": 1e5}, None, BOUNDS) == pytest.approx(best(), rel=1e-3)
    without = optimum(demand, apart, {"eu": 1e5}, None, BOUNDS)
    assert without == best(of=pools(fast=2)), "a dead link's pools take nothing"


def test_without_local_pools_only_the_arrivals_decide():
    fast_only = pools()[:1]
    assert best(arrivals=0.01, of=fast_only) == BOUNDS[0]
    assert best(arrivals=3.0, of=fast_only) > BOUNDS[0]
    demand = paper_lengths()
    assert demand is not None
    assert optimum(demand, fast_only, {"eu": 1e5}, None, BOUNDS) is None


def test_too_little_known_gives_none():
    few, more = (demand_of(Bins([0.0, 10.0, 20.0, 30.0, 40.0]), [count, 6, 6, 6]) for count in (1, 2))
    same = demand_of(Bins([0.0, 10.0, 20.0]), [0, 1000])
    enough = paper_lengths()
    assert few is not None
    assert more is not None
    assert same is not None
    assert enough is not None
    assert optimum(few, pools(), {"eu": 1e5}, 1.0, BOUNDS) is None
    assert optimum(more, pools(), {"eu": 1e5}, 1.0, BOUNDS) is not None, "negative control"
    assert optimum(same, pools(), {"eu": 1e5}, 1.0, BOUNDS) is None, "a threshold cannot divide equal lengths"
    assert optimum(enough, [], {"eu": 1e5}, 1.0, BOUNDS) is None
    assert optimum(enough, pools(), {}, 1.0, BOUNDS) is None
    unmeasured = [PoolFacts(cluster="eu", ready_instances=1, profile=Profile(state_bytes=1, token_bytes=1))]
    assert optimum(enough, unmeasured, {"eu": 1e5}, 1.0, BOUNDS) is None
