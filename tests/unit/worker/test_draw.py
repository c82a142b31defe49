"""Draws beside a plain float64 reference: the same token is drawn by every temperature, min_p, top_k and top_p."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prfaas.wire.engine import Sampling
from prfaas_worker.engine.sampling import draw

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 3.5])
FIRST, SECOND = torch.softmax(LOGITS, dim=-1).sort(descending=True).values[:2].tolist()
NEAR = 1e-5  # float32 and float64 may disagree on what lies closer to a bound than this


class NearBoundError(Exception):
    """The answer hangs on a last bit."""


def sampling(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> Sampling:
    return Sampling(temperature, top_p, top_k, 1, min_p)


def kept_tokens(logits: np.ndarray, cut: Sampling) -> tuple[np.ndarray, np.ndarray]:
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


def reference(logits: np.ndarray, cut: Sampling, number: float) -> int:
    ids, probabilities = kept_tokens(logits, cut)
    cumulative = np.cumsum(probabilities)
    if np.abs(cumulative[:-1] - number).min(initial=1) < NEAR or number < NEAR:
        raise NearBoundError
    return int(ids[np.searchsorted(cumulative, number, side="right")])


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, list[Sampling], list[float]]:
    width = draw(st.sampled_from([3, 64, 264, 1000]))
    rows = draw(st.integers(1, 5))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = generator.normal(0, draw(st.sampled_from([0.1, 1.0, 6.0])), (rows, width))
    if draw(st.booleans()):
        logits = np.round(logits * 4) / 4  # many ties
    cuts = [
        sampling(
            temperature=draw(st.sampled_from([0.25, 1.0, 3.0])),
            min_p=draw(st.sampled_from([0.0, 0.0, 0.03, 0.5])),
            top_k=draw(st.sampled_from([0, 0, 1, 2, 7, 40, 5000])),
            top_p=draw(st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.93, 0.999])),
        )
        for _ in range(rows)
    ]
    return torch.from_numpy(logits.astype(np.float32)), cuts, generator.random(rows).tolist()


@settings(max_examples=150, deadline=None)
@given(batch=batches())
def test_a_draw_is_the_one_that_sorting_everything_gives(batch: tuple[torch.Tensor, list[Sampling], list[float]]):
    logits, cuts, numbers = batch
    rows = logits.double().numpy()
    try:
        expected = [reference(*row) for row in zip(rows, cuts, numbers, strict=True)]
    except NearBoundError:
        assume(False)
    assert draw(logits, cuts, numbers) == expected


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        (sampling(temperature=1e-300), {4}),
        (sampling(top_k=2), {4, 1}),
        (sampling(top_k=99, temperature=2), {0, 1, 2, 3, 4}),
        (sampling(top_p=FIRST - 0.001), {4}),
        (sampling(top_p=FIRST + 0.001), {4, 1}),
        (sampling(top_p=0.0), {4}),
        (sampling(top_k=2, top_p=FIRST / (FIRST + SECOND) - 0.001), {4}),
        (sampling(top_k=2, top_p=FIRST / (FIRST + SECOND) + 0.001), {4, 1}),
        (sampling(min_p=math.exp(3.0 - 3.5) + 0.001), {4}),
        (sampling(min_p=math.exp(3.0 - 3.5) - 0.001), {4, 1}),
    ],
)
def test_each_cut_is_a_share_of_what_the_one_before_leaves(cut: Sampling, kept: set[int]):
    numbers = [(row + 0.5) / 4000 for row in range(4000)]
    assert set(draw(LOGITS.expand(4000, -1), [cut] * 4000, numbers)) == kept


def test_of_equal_tokens_top_k_keeps_the_lower_ids():
    numbers = [row / 100 for row in range(100)]
    assert set(draw(torch.zeros(100, 300), [sampling(top_k=3)] * 100, numbers)) == {0, 1, 2}


@pytest.mark.parametrize("top_p", [1.0, 0.9999])
def test_the_ends_of_the_unit_interval_draw_the_first_and_the_last_token(top_p: float):
    logits = torch.tensor([[-math.inf, 1.0, 1.0, -math.inf]]).expand(2, -1)
    assert draw(logits, [sampling(top_p=top_p)] * 2, [0.0, 1 - 2**-53]) == [1, 2]
