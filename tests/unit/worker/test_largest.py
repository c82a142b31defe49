"""The largest of long rows, beside a stable sort of everything."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas_worker.engine.top_k_top_p import BLOCK, largest, pad_to_blocks


def reference(row: np.ndarray, depth: int) -> list[int]:
    return np.argsort(-row, kind="stable")[:depth].tolist()


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 4),
    blocks=st.integers(1, 40),
    depth=st.integers(1, 200),
    steps=st.sampled_from([1, 3, 1000]),
    seed=st.integers(0, 2**32 - 1),
)
def test_they_are_found_in_order_and_of_equal_ones_the_first(rows: int, blocks: int, depth: int, steps: int, seed: int):
    generator = np.random.default_rng(seed)
    numbers = generator.integers(-steps, steps + 1, (rows, blocks * BLOCK)).astype(np.float32) / 8
    depth = min(depth, numbers.shape[1])
    values, places = largest(torch.from_numpy(numbers), depth)
    assert places.tolist() == [reference(row, depth) for row in numbers]
    assert torch.equal(values, torch.from_numpy(numbers).gather(1, places))


@pytest.mark.parametrize("width", [1, 63, 64, 65])
def test_padding_is_never_among_them(width: int):
    numbers = pad_to_blocks(torch.full((2, width), -1e30), -torch.inf)
    assert numbers.shape[1] % BLOCK == 0
    _, places = largest(numbers, width)
    assert places.tolist() == [list(range(width))] * 2
