"""Cuts and draws beside a plain float64 reference: the same token is drawn, whatever the depth the cut looks at."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prfaas_worker.engine import top_k_top_p
from prfaas_worker.engine.top_k_top_p import RowDraw, draw_rows

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 3.5])
NEAR = 1e-5  # float32 and float64 may disagree on what lies closer to a bound than this


class NearBoundError(Exception):
    """The answer hangs on a last bit."""


def kept_tokens(logits: np.ndarray, cut: RowDraw) -> tuple[np.ndarray, np.ndarray]:
    """Ids that the cuts leave, ascending, and their probabilities; by one sort of everything."""
    probabilities = np.exp((logits - logits.max()) / cut.temperature)
    probabilities /= probabilities.sum()
    ratio = probabilities / probabilities.max() - cut.min_p
    if cut.min_p and np.abs(ratio).min() < NEAR:
        raise NearBoundError
    probabilities[ratio < 0] = 0
    # Float32 rounds near neighbours to ties, which the lower id wins.
    order = np.lexsort((np.arange(len(logits)), -probabilities))
    if cut.top_k:
        order = order[: cut.top_k]
    cumulative = np.cumsum(probabilities[order]) / probabilities[order].sum()
    before = np.concatenate([[0], cumulative[:-1]])
    if cut.top_p < 1 and np.abs(before[1:] - cut.top_p).min(initial=1) < NEAR:
        raise NearBoundError
    order = np.sort(order[before < cut.top_p])
    return order, probabilities[order] / probabilities[order].sum()


def reference(logits: np.ndarray, cut: RowDraw) -> int:
    ids, probabilities = kept_tokens(logits, cut)
    cumulative = np.cumsum(probabilities)
    if np.abs(cumulative[:-1] - cut.uniform).min(initial=1) < NEAR or cut.uniform < NEAR:
        raise NearBoundError
    return int(ids[np.searchsorted(cumulative, cut.uniform, side="right")])


def draw_all(logits: torch.Tensor, asked: list[RowDraw]) -> list[int]:
    return draw_rows(logits, logits.amax(-1), asked)


def spread(temperature: float = 1.0, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> Counter[int]:
    """Tokens drawn at 4000 evenly spread random numbers."""
    asked = [RowDraw(row, temperature, min_p, top_k, top_p, (row + 0.5) / 4000) for row in range(4000)]
    return Counter(draw_all(LOGITS.expand(4000, -1), asked))


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, list[RowDraw]]:
    width = draw(st.sampled_from([3, 64, 264, 1000, 1024]))
    rows = draw(st.integers(1, 5))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = generator.normal(0, draw(st.sampled_from([0.1, 1.0, 6.0])), (rows, width))
    if draw(st.booleans()):
        logits = np.round(logits * 4) / 4  # many ties
    asked = [
        RowDraw(
            row,
            temperature=draw(st.sampled_from([0.25, 1.0, 3.0])),
            min_p=draw(st.sampled_from([0.0, 0.0, 0.03, 0.5])),
            top_k=draw(st.sampled_from([0, 0, 1, 2, 7, 40, 5000])),
            top_p=draw(st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.93, 0.999])),
            uniform=float(generator.random()),
        )
        for row in range(rows)
    ]
    return torch.from_numpy(logits.astype(np.float32)), asked


# Small depths have small vocabularies take every way: few blocks, many tokens, everything.
@pytest.mark.parametrize("depths", [top_k_top_p.DEPTHS, (4, 16)])
@settings(max_examples=150, deadline=None)
@given(batch=batches())
def test_a_draw_is_the_one_that_sorting_everything_gives(
    depths: tuple[int, ...], batch: tuple[torch.Tensor, list[RowDraw]]
):
    logits, asked = batch
    try:
        expected = [reference(logits[cut.row].double().numpy(), cut) for cut in asked]
    except NearBoundError:
        assume(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top_k_top_p, "DEPTHS", depths)
        patch.setattr(top_k_top_p, "_NARROW", 0)
        assert draw_all(logits, asked) == expected


def test_looking_at_few_tokens_first_changes_no_draw_from_a_wide_vocabulary(monkeypatch: pytest.MonkeyPatch):
    generator = np.random.default_rng(5)
    logits = torch.from_numpy(generator.normal(0, 3, (8, 20_001)).astype(np.float32))
    logits[4:] /= 30  # so flat that top_p needs nearly every token
    limits = enumerate((0, 50, 0, 6000) * 2)
    asked = [RowDraw(row, 1.0, 0.0, top_k, 0.9, float(generator.random())) for row, top_k in limits]
    found = draw_all(logits, asked)
    monkeypatch.setattr(top_k_top_p, "DEPTHS", ())
    assert draw_all(logits, asked) == found


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_those_of_the_softmax(temperature: float):
    found = spread(temperature)
    for token, probability in enumerate(torch.softmax(LOGITS / temperature, dim=-1).tolist()):
        # Evenly spread numbers: each token gets its share but for one at each bound.
        assert abs(found[token] - 4000 * probability) <= 1.01


@pytest.mark.parametrize("scale", [0.0, 1.0, 5.0])
def test_weights_add_up_to_the_same_in_any_order(scale: float):
    logits = scale * torch.randn(1, 1 << 18, generator=torch.Generator().manual_seed(1))
    columns = top_k_top_p._columns([RowDraw(0, 0.9, 0.0, 0, 1.0, 0.5)], logits)
    weights = top_k_top_p._weights(logits, logits.amax(-1), columns)[0].double()
    assert torch.equal(weights, weights.round())
    assert 0.999 < float(weights.sum()) / 2**52 < 1.001
    orders = [weights, weights.flip(0), weights.sort().values]
    assert len({float(order.cumsum(0)[-1]) for order in orders} | {float(weights.sum())}) == 1


def test_a_tiny_temperature_is_as_good_as_greedy():
    assert spread(1e-300) == {4: 4000}
    assert spread(1e-7) == {4: 4000}


def test_top_k_keeps_the_most_likely():
    assert set(spread(top_k=2)) == {4, 1}
    assert set(spread(top_k=99, temperature=2)) == {0, 1, 2, 3, 4}


def test_of_equal_tokens_top_k_keeps_the_lower_ids():
    logits = torch.zeros(100, 300)
    found = draw_all(logits, [RowDraw(row, 1.0, 0.0, 3, 1.0, row / 100) for row in range(100)])
    assert set(found) == {0, 1, 2}


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    first, second = torch.softmax(LOGITS, dim=-1).sort(descending=True).values[:2].tolist()
    assert set(spread(top_p=first - 0.001)) == {4}
    assert set(spread(top_p=first + 0.001)) == {4, 1}
    assert set(spread(top_p=first + second + 0.001)) == {4, 1, 2}
    assert set(spread(top_p=1e-9)) == {4}
    assert set(spread(top_p=0.0)) == {4}


def test_top_p_is_a_share_of_what_top_k_leaves():
    first, second = torch.softmax(LOGITS, dim=-1).sort(descending=True).values[:2].tolist()
    share = first / (first + second)
    assert set(spread(top_k=2, top_p=share - 0.001)) == {4}
    assert set(spread(top_k=2, top_p=share + 0.001)) == {4, 1}


def test_min_p_is_a_share_of_the_most_likely():
    ratio = math.exp(3.0 - 3.5)
    assert set(spread(min_p=ratio + 0.001)) == {4}
    assert set(spread(min_p=ratio - 0.001)) == {4, 1}
    assert set(spread(min_p=1.0)) == {4}


@pytest.mark.parametrize("top_p", [1.0, 0.9999])
def test_the_ends_of_the_unit_interval_draw_the_first_and_the_last_token(top_p: float):
    logits = torch.tensor([[-math.inf, 1.0, 1.0, -math.inf]]).expand(2, -1)
    asked = [RowDraw(0, 1.0, 0.0, 0, top_p, 0.0), RowDraw(1, 1.0, 0.0, 0, top_p, 1 - 2**-53)]
    assert draw_all(logits, asked) == [1, 2]
