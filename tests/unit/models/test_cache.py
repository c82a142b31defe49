"""Proves what a sequence's cache promises to the transfer: views stay true, growth follows use, no swap is silent."""

import pytest
import torch

from prfaas.errors import InternalError
from prfaas_worker.models.base import AttentionCache, LayerSpec, LinearState, SequenceCache, TensorSpec

ATTENTION = LayerSpec("attention", (TensorSpec("latent", ("token", "channel"), (6,), "float32"),))
LINEAR = LayerSpec(
    "linear",
    (
        TensorSpec("conv", ("channel", "tap"), (8, 3), "float32"),
        TensorSpec("recurrent", ("head", "key", "value"), (2, 4, 4), "float32"),
    ),
)


def rows(count: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start * 6, (start + count) * 6, dtype=torch.float32).view(count, 6)


def test_rows_come_back_whatever_the_order_of_writes():
    cache = AttentionCache(ATTENTION)
    cache.write(500, rows(300, 500))
    cache.write(0, rows(500))
    assert torch.equal(cache.rows(0, 800), rows(800))
    assert cache.rows(499, 501).is_contiguous()


def test_a_view_keeps_its_values_when_the_cache_grows():
    cache = AttentionCache(ATTENTION)
    cache.write(0, rows(200))
    view = cache.rows(0, 200)
    cache.write(200, rows(5000, 200))
    assert torch.equal(view, rows(200))
    assert torch.equal(cache.rows(0, 5200), rows(5200))


def test_reserved_rows_can_be_received_into():
    cache = AttentionCache(ATTENTION)
    cache.reserve(1000)
    memoryview(cache.rows(10, 20).numpy()).cast("B")[:] = rows(10).numpy().tobytes()
    assert torch.equal(cache.rows(10, 20), rows(10))


def test_what_inference_wrote_can_be_written_outside_of_it():
    with torch.inference_mode():
        cache = SequenceCache((LINEAR, ATTENTION))
        cache.attention(1).write(0, rows(300))
    cache.attention(1).rows(0, 300)[5] = 0
    cache.attention(1).write(300, rows(10))
    cache.linear(0).load({"conv": torch.ones(8, 3), "recurrent": torch.ones(2, 4, 4)})
    assert cache.linear(0).tensors["recurrent"].all()


def test_memory_stays_within_twice_the_rows():
    cache = AttentionCache(ATTENTION)
    allocations = set()
    for start in range(0, 32_768, 64):
        cache.write(start, rows(64))
        allocations.add(cache.nbytes)
    assert cache.nbytes <= 2 * 32_768 * 6 * 4
    assert len(allocations) <= 9


def test_rows_that_nobody_reserved_are_refused():
    cache = AttentionCache(ATTENTION)
    cache.write(0, rows(10))
    with pytest.raises(InternalError, match="reserve first"):
        cache.rows(0, 257)
    with pytest.raises(InternalError, match="width 6"):
        cache.write(0, torch.zeros(3, 5))


def test_a_linear_state_starts_at_zero_and_loads_copies():
    state = LinearState(LINEAR)
    assert not any(tensor.any() for tensor in state.tensors.values())
    given = {"conv": torch.ones(8, 3), "recurrent": torch.ones(2, 4, 4)}
    state.load(given)
    given["conv"].zero_()
    assert state.tensors["conv"].all()
    assert state.nbytes == (8 * 3 + 2 * 4 * 4) * 4


@pytest.mark.parametrize(
    "tensors",
    [
        {"conv": torch.zeros(8, 3)},
        {"conv": torch.zeros(3, 8), "recurrent": torch.zeros(2, 4, 4)},
        {"conv": torch.zeros(8, 3).half(), "recurrent": torch.zeros(2, 4, 4)},
        {"conv": torch.zeros(8, 3), "recurrent": torch.zeros(2, 4, 4), "more": torch.zeros(1)},
    ],
    ids=["missing", "swapped axes", "dtype", "unknown"],
)
def test_a_linear_state_that_does_not_fit_is_refused_whole(tensors):
    state = LinearState(LINEAR)
    with pytest.raises(InternalError, match="linear state loaded with"):
        state.load(tensors)
    assert set(state.tensors) == {"conv", "recurrent"}


def test_layers_are_reached_by_kind():
    cache = SequenceCache((LINEAR, ATTENTION))
    assert cache.length == 0
    assert cache.linear(0) is cache.layers[0]
    assert cache.attention(1) is cache.layers[1]
    for wrong in (lambda: cache.linear(1), lambda: cache.attention(0)):
        with pytest.raises(InternalError):
            wrong()
